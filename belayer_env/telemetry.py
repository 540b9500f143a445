"""What an episode cost and met: steps, checkpoints, faults, recoveries. Plain records; seconds of host wall
time.

Kept out of Gymnasium's ``info``, which holds only facts that are the same in every run of the same
actions."""

from __future__ import annotations

from dataclasses import dataclass, field

from belayer_env.errors import Fault

__all__ = ["CheckpointRecord", "FaultRecord", "RecoveryRecord", "StepRecord", "Telemetry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: its command's time, and all of `step()` with reward, recovery and checkpoint."""

    step: int
    command_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One checkpoint, or the attempt at one (``error`` says why it failed, ``id`` is then empty).

    ``pause_s``: freeze to thaw. ``total_s``: until it was published."""

    step: int
    id: str
    pause_s: float
    total_s: float
    size_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """One fault, by the name of its type, and the step it hit (the one under way, counted from 1)."""

    step: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """One recovery: which rung held ("restore ck-..." or "fresh"), what was tried before, and what it
    took."""

    step: int
    rung: str
    tried: tuple[str, ...]
    num_replayed: int
    total_s: float


@dataclass(slots=True)
class Telemetry:
    """Everything so far, oldest first. ``reset_s`` is what the fresh start took, setup included."""

    reset_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)

    def note_fault(self, step: int, fault: Fault) -> None:
        """Add a fault."""
        self.faults.append(FaultRecord(step=step, kind=type(fault).__name__, message=str(fault)))
