"""What stands in for vLLM's parameters and a tokenizer where no model is wanted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Params:
    """The fields of vLLM's SamplingParams that matter here."""

    max_tokens: int | None = None
    min_tokens: int = 1
    logprobs: int | None = 1
    seed: int | None = 5


class Characters:
    """A tokenizer: one token a character."""

    pad_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))
