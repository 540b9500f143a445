"""What an executor is asked for: one sample. Tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from belayer_integrations.encoding import Encoder
from belayer_integrations.openrlhf.bubbles import Bubbles

__all__ = ["Request"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `execute`, and which of its prompt's samples it is. ``seed``: what its draws come from, if
    it has one."""

    prompt: str
    label: Any
    sampling_params: Any
    max_length: int
    engine: Any
    bubbles: Bubbles
    encoder: Encoder
    member: int
    seed: int | None

    @property
    def with_logprobs(self) -> bool:
        """Whether the trainer wants them."""
        return self.sampling_params.logprobs is not None

    def prompt_ids(self, instruction: str = "") -> list[int]:
        """The prompt, and what a reset had to say; of one that is too long the end, as upstream has it."""
        room = max(1, self.max_length - (self.sampling_params.max_tokens or 1))
        ids = self.encoder.text_ids(self.prompt + instruction)
        if len(ids) > room:
            log.warning("a prompt of %d tokens is cut to its last %d", len(ids), room)
        return ids[-room:]
