"""What a chaos run strikes with, and when. Pure: faults are drawn from a seeded generator."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from belayer_env.errors import InvalidInput

__all__ = ["REACH", "Deck", "Instant", "Kind", "Strike", "parse_kinds"]


class Kind(enum.StrEnum):
    """A kind of fault."""

    KILL = "kill"
    OOM = "oom"
    FREEZE = "freeze"
    HANG = "hang"
    CORRUPT = "corrupt"
    RUNTIME = "runtime"
    DISK = "disk"


class Instant(enum.StrEnum):
    """What the sandbox was at when the fault hit. RECOVERY: the replay that follows a restore."""

    BETWEEN = "between steps"
    COMMAND = "in mid-command"
    CHECKPOINT = "during a checkpoint"
    RESTORE = "during a restore"
    RECOVERY = "during a recovery"


REACH: Mapping[Kind, tuple[Instant, ...]] = {
    Kind.KILL: tuple(Instant),
    Kind.OOM: (Instant.BETWEEN, Instant.COMMAND, Instant.CHECKPOINT, Instant.RECOVERY),
    Kind.FREEZE: (Instant.BETWEEN, Instant.COMMAND, Instant.CHECKPOINT, Instant.RECOVERY),
    Kind.HANG: (Instant.BETWEEN, Instant.COMMAND, Instant.CHECKPOINT, Instant.RECOVERY),
    # Not during a restore: what was verified is then being read, and no store survives a disk that lies.
    Kind.CORRUPT: (Instant.BETWEEN, Instant.CHECKPOINT, Instant.RECOVERY),
    Kind.RUNTIME: (Instant.CHECKPOINT, Instant.RESTORE),
    Kind.DISK: (Instant.COMMAND, Instant.CHECKPOINT, Instant.RESTORE),
}
"""When each kind can hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault to come: ``delay`` is how far into the call it is to hit, as a share of the time that such
    calls have taken. ``is_refusal``: a runtime command is not killed under way, but fails at once."""

    kind: Kind
    instant: Instant
    delay: float
    is_refusal: bool = False


class Deck:
    """Every kind at every instant it can hit, shuffled; and again once all have been drawn."""

    def __init__(self, rng: random.Random, kinds: Sequence[Kind]) -> None:
        self._rng = rng
        self._all = [(kind, instant) for kind in kinds for instant in REACH[kind]]
        self._left: list[tuple[Kind, Instant]] = []

    def draw(self) -> Strike:
        """The next fault."""
        if not self._left:
            self._left = self._rng.sample(self._all, len(self._all))
        kind, instant = self._left.pop()
        delay, is_refusal = self._rng.random(), self._rng.random() < 0.5
        return Strike(kind=kind, instant=instant, delay=delay, is_refusal=is_refusal)


def parse_kinds(kinds: str) -> tuple[Kind, ...]:
    """The kinds that a comma-separated list names.

    Raises:
        InvalidInput: one is unknown, or there is none."""
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    if not names or not set(names) <= set(Kind):
        raise InvalidInput(f"kinds is a list such as {','.join(Kind)}; not {kinds!r}")
    return tuple(Kind(name) for name in names)
