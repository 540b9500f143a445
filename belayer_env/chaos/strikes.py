"""What a chaos run strikes with, and when. Pure: faults are drawn from a seeded generator."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from belayer_env.errors import InvalidInput

__all__ = ["REACH", "Instant", "Kind", "Strike", "draw", "parse_kinds"]


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


def draw(rng: random.Random, kinds: Sequence[Kind]) -> Strike:
    """The next fault: kinds are equally likely, and so are the instants that a kind can hit."""
    kind = rng.choice(kinds)
    return Strike(
        kind=kind, instant=rng.choice(REACH[kind]), delay=rng.random(), is_refusal=rng.random() < 0.5
    )


def parse_kinds(kinds: str) -> tuple[Kind, ...]:
    """The kinds that a comma-separated list names.

    Raises:
        InvalidInput: one is unknown, or there is none."""
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    if not names or not set(names) <= set(Kind):
        raise InvalidInput(f"kinds is a list such as {','.join(Kind)}; not {kinds!r}")
    return tuple(Kind(name) for name in names)
