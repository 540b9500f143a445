"""What an episode cost and met: steps, checkpoints, decisions, faults, recoveries. Plain records; seconds of
host wall time, instants (``started_s``, ``at_s``) counted from the beginning of the episode.

Kept out of Gymnasium's ``info``, which holds only facts that are the same in every run of the same
actions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from belayer_env.errors import Fault

__all__ = [
    "CheckpointRecord",
    "DecisionRecord",
    "FaultRecord",
    "RecoveryRecord",
    "StepRecord",
    "Telemetry",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: its command's time, all of `step()` with reward and recovery, and of that how long it had to
    wait for the checkpoint before it."""

    step: int
    command_s: float
    total_s: float
    waited_s: float = 0.0
    started_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One checkpoint, or the attempt at one (``error`` says why it failed, ``id`` is then empty).

    ``pause_s``: freeze to thaw. ``held_s``: as long as no step could run. ``total_s``: until it was
    published. ``hidden``: no step had to wait for it."""

    step: int
    id: str
    pause_s: float
    total_s: float
    held_s: float = 0.0
    hidden: bool = False
    size_bytes: int = 0
    error: str = ""
    started_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What the policy said in the bubble after a step, and why."""

    step: int
    checkpoint: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """One fault, by the name of its type, and the step it hit (the one under way, counted from 1)."""

    step: int
    kind: str
    message: str
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """One recovery: which rung held ("standby ck-...", "restore ck-..." or "fresh"), what was tried before,
    and what it took. ``rolled_back_to``: the step to which the context was cut, where it was."""

    step: int
    rung: str
    tried: tuple[str, ...]
    num_replayed: int
    total_s: float
    rolled_back_to: int | None = None
    started_s: float = 0.0


@dataclass(slots=True)
class Telemetry:
    """Everything so far, oldest first. ``reset_s`` is what the fresh start took, setup included;
    ``standby_bytes`` what the standby holds in memory now, ``standby_refusal`` why there is none."""

    reset_s: float = 0.0
    standby_bytes: int = 0
    standby_refusal: str = ""
    steps: list[StepRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    decisions: list[DecisionRecord] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)

    def now_s(self) -> float:
        """Seconds since the episode began."""
        return self.clock() - self.began

    def note_fault(self, step: int, fault: Fault) -> None:
        """Add a fault."""
        self.faults.append(
            FaultRecord(step=step, kind=type(fault).__name__, message=str(fault), at_s=self.now_s())
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, for plots and reports; `from_json` is the inverse."""
        return {
            "reset_s": self.reset_s,
            **{name: [_plain(record) for record in getattr(self, name)] for name in _KINDS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Telemetry:
        """The inverse of `to_json`, as far as that says it all: not the clock.

        Raises:
            KeyError, TypeError: it is not of this version."""
        lists: dict[str, Any] = {n: [kind(**record) for record in data[n]] for n, kind in _KINDS.items()}
        # Tuples come back from JSON as lists.
        lists["recoveries"] = [dataclasses.replace(r, tried=tuple(r.tried)) for r in lists["recoveries"]]
        return cls(reset_s=data["reset_s"], **lists)


_KINDS: dict[str, type[Any]] = {
    "steps": StepRecord,
    "checkpoints": CheckpointRecord,
    "decisions": DecisionRecord,
    "faults": FaultRecord,
    "recoveries": RecoveryRecord,
}


def _plain(record: Any) -> dict[str, Any]:
    # Not dataclasses.asdict, which copies every value: the records are flat.
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
