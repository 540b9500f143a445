"""From prompts and observations to token ids, by a trainer's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Encoder", "Prompt", "add_to_prompt"]

Prompt = str | Sequence[Mapping[str, Any]]
"""Of a data set: text, or messages."""

_DUMMY: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "dummy"},
    {"role": "assistant", "content": "dummy"},
)


def add_to_prompt(prompt: Prompt, observation: str) -> Prompt:
    """A reset's observation after the prompt's text, or after its last message's, where TRL puts it too."""
    if not observation:
        return prompt
    if isinstance(prompt, str):
        return prompt + observation
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + observation}]


class Encoder:
    """Speaks for one tokenizer."""

    def __init__(self, tokenizer: Any, template: Mapping[str, Any] | None = None) -> None:
        """``template``: what `apply_chat_template` is to be given besides."""
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
        self._template = dict(template or {})

    @classmethod
    def of_trainer(cls, trainer: Any) -> Encoder:
        """The one of a `trl` trainer."""
        return cls(
            trainer.processing_class,
            {"chat_template": getattr(trainer, "chat_template", None)}
            | dict(getattr(trainer, "chat_template_kwargs", None) or {}),
        )

    @property
    def filler_id(self) -> int:
        """A token that says nothing."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)

    def prompt(self, prompt: Prompt) -> list[int]:
        """A whole prompt, up to where the model is to speak."""
        if isinstance(prompt, str):
            return list(self.tokenizer(text=prompt)["input_ids"])
        return self._render(prompt, add_generation_prompt=True)

    def observation(self, prompt: Prompt, text: str) -> list[int]:
        """What follows a turn of the model: the observation, in the form that the prompt has, up to where the
        model is to speak again. Nothing that was sampled is encoded anew."""
        return self.text_ids(text) if isinstance(prompt, str) else self.user_message(text)

    def text_ids(self, text: str) -> list[int]:
        """Just the text."""
        return list(self.tokenizer(text=text, add_special_tokens=False)["input_ids"])

    def user_message(self, text: str) -> list[int]:
        """The tail that the chat template appends for a user's message and the beginning of the answer.

        Raises:
            ValueError: the template has no such tail."""
        # The tail that a template appends to a conversation, found on a dummy one.
        head = self._render(_DUMMY, add_generation_prompt=False)
        whole = self._render([*_DUMMY, {"role": "user", "content": text}], add_generation_prompt=True)
        # Some templates end a turn with its end token and a newline; the model samples only the former.
        end = self.tokenizer.eos_token_id
        last_end = max((at for at, token in enumerate(head) if token == end), default=len(head) - 1)
        head = head[: last_end + 1]
        if whole[: len(head)] != head:
            raise ValueError(
                "the chat template changes earlier messages when one is added, so that a context cannot "
                "grow by its tail: give encode_observation=..."
            )
        return whole[len(head) :]

    def text(self, token_ids: Sequence[int]) -> str:
        """A turn of the model as text."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                **self._template,
            )
        )
