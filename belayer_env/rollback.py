"""Telling an agent to which shorter prefix it must go back, and cutting its context there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from belayer_env.errors import InvalidInput

__all__ = ["Conversation", "Rollback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The sandbox is in the state after step ``to_step`` (0: just reset); later steps have not happened.

    ``reason``: a sentence. ``diverged_step``: the step whose replay told another story, if that was it."""

    to_step: int
    reason: str
    diverged_step: int | None = None

    def message(self) -> str:
        """What an agent reads instead of an observation, if its loop knows nothing of rollbacks."""
        undone = (
            f"Everything after step {self.to_step} has been undone"
            if self.to_step
            else "Everything since the start has been undone"
        )
        return (
            "[environment rolled back] The environment failed and was brought back to an earlier state. "
            f"{undone}: those commands have no effect any more, their output no longer describes "
            "the environment, and the last command was not run. Look at the current state before going on.\n"
        )


@dataclass(frozen=True, slots=True)
class _Mark:
    step: int
    num_messages: int
    num_tokens: int


class Conversation:
    """A model's context that can be cut back to a step: messages, token ids, or both side by side.

        talk = Conversation(messages=[system, task])        # or token_ids=prompt_ids
        talk.add_message(action); talk.add_message(observation); talk.mark_step(1)
        if "rollback" in info: talk.cut(info["rollback"])

    ``loss_mask`` is 1 on the model's own tokens and 0 elsewhere; ``logprobs`` are natural logarithms, one a
    token, 0.0 on those the model did not sample. All four lists may be read at any time; change them by
    methods only."""

    def __init__(self, messages: Iterable[Mapping[str, Any]] = (), *, token_ids: Sequence[int] = ()) -> None:
        """What is given here is the prompt: no cut takes it away."""
        self.messages: list[Mapping[str, Any]] = list(messages)
        self.token_ids: list[int] = list(token_ids)
        self.loss_mask: list[int] = [0] * len(self.token_ids)
        self.logprobs: list[float] = [0.0] * len(self.token_ids)
        self._marks = [_Mark(0, len(self.messages), len(self.token_ids))]

    @property
    def last_step(self) -> int:
        """The last step that was marked."""
        return self._marks[-1].step

    def add_message(self, message: Mapping[str, Any]) -> None:
        """Append a message, of the model or of the environment."""
        self.messages.append(message)

    def add_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens that the model sampled; they carry loss.

        Raises:
            InvalidInput: not one logprob a token."""
        if len(token_ids) != len(logprobs):
            raise InvalidInput(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [1] * len(token_ids)

    def add_observed(self, token_ids: Sequence[int]) -> None:
        """Append tokens of an observation or a template; they carry no loss."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.loss_mask += [0] * len(token_ids)

    def mark_step(self, step: int) -> None:
        """Everything so far describes the environment after step ``step``.

        Raises:
            InvalidInput: not the step after the last one marked."""
        if step != self.last_step + 1:
            raise InvalidInput(f"step {step} does not follow step {self.last_step}, the last one marked")
        self._marks.append(_Mark(step, len(self.messages), len(self.token_ids)))

    def cut(self, rollback: Rollback | int) -> int:
        """Go back to what was there after that step; what came later, the action that was not run included,
        is gone. Returns how many messages and tokens were removed, together.

        Raises:
            InvalidInput: no such step is marked; nothing has changed."""
        to_step = rollback.to_step if isinstance(rollback, Rollback) else rollback
        if not 0 <= to_step <= self.last_step:
            raise InvalidInput(f"steps 0 to {self.last_step} are marked, not {to_step}")
        del self._marks[to_step + 1 :]
        mark = self._marks[-1]
        removed = len(self.messages) - mark.num_messages + len(self.token_ids) - mark.num_tokens
        del self.messages[mark.num_messages :]
        for tokens in (self.token_ids, self.loss_mask, self.logprobs):
            del tokens[mark.num_tokens :]
        return removed
