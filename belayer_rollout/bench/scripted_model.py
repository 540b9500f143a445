"""A model that computes nothing: each token is a hash of what stands before it. Pure.

Greedy tokens depend on the context's ids alone; sampled ones on (context, seed, draw). The draw counts from
the start of the attempt, as an engine's own generator does, or from `belayer_position` where a request asks
to be resumed exactly. So a continuation elsewhere gives the tokens that a real engine would give."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["STOP_TOKEN", "TokenSource"]

STOP_TOKEN = 2
"""The end of sequence."""
SPECIAL_TOKENS = 3
"""Ids below are never drawn."""


@dataclass(slots=True)
class TokenSource:
    """The tokens that follow on ``token_ids``. ``stop_at``: when the context has so many tokens, the next one
    is `STOP_TOKEN`, unless it may not stop yet."""

    token_ids: Sequence[int]
    vocab: int = 1000
    seed: int | None = None
    """None: greedy."""
    draw: int = 0
    stop_at: int | None = None
    _state: int = field(init=False, default=0)
    _length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # CRC-32 goes on where it left off: the hash of prompt + tokens is the same however it is cut.
        self._state = zlib.crc32(array("i", self.token_ids).tobytes())
        self._length = len(self.token_ids)

    def next(self, may_stop: bool) -> tuple[int, float]:
        """The next token and its logprob."""
        drawn = self._state
        if self.seed is not None:
            drawn = zlib.crc32(b"%d:%d" % (self.seed, self.draw), drawn)
        drawn = (drawn * 2654435761) & 0xFFFFFFFF
        if may_stop and self._length == self.stop_at:
            token = STOP_TOKEN
        else:
            token = SPECIAL_TOKENS + drawn % (self.vocab - SPECIAL_TOKENS)
        self._state = zlib.crc32(token.to_bytes(4, "little"), self._state)
        self._length += 1
        self.draw += 1
        return token, -(1 + (drawn >> 8) % 4096) / 512
