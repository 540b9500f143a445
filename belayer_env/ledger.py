"""The context ledger: what the model was told, step by step. Pure: no clock, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from belayer_env.errors import InvalidInput

__all__ = ["Ledger", "Step", "observation_digest"]


def observation_digest(observation: str, exit_code: int, timed_out: bool) -> str:
    """What a replayed step must reproduce, as 64 hex digits.

    A timed-out step's digest covers only the fact of the time-out: how far its output got is chance."""
    if timed_out:
        return blake3(b"timed out").hexdigest()
    # The exit code first and a separator that no number holds: no two pairs run together to the same bytes.
    return blake3(f"{exit_code}\0{observation}".encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action and its observation.

    ``number`` counts from 1. ``cost_s`` is host wall time, what a replay would take again. ``digest``,
    if left empty, becomes its `observation_digest`. ``checkpoint_id`` names the checkpoint it rests on: the
    newest one when it began, if any."""

    number: int
    action: str
    observation: str
    exit_code: int
    timed_out: bool = False
    output_truncated: bool = False
    shell_restarted: bool = False
    cost_s: float = 0.0
    digest: str = ""
    checkpoint_id: str | None = None
    reward: float = 0.0
    terminated: bool = False

    def __post_init__(self) -> None:
        if self.number < 1:
            raise InvalidInput(f"steps count from 1, not {self.number}")
        if not self.digest:
            digest = observation_digest(self.observation, self.exit_code, self.timed_out)
            object.__setattr__(self, "digest", digest)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the catalogue; ``from_json`` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Step:
        """The inverse of ``to_json``."""
        return cls(**data)


class Ledger:
    """The steps of one episode, numbered 1, 2, 3, ...; grows by `append` and shrinks by `cut` only."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._steps: list[Step] = []
        for step in steps:
            self.append(step)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, oldest first."""
        return tuple(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Ledger({len(self)} steps)"

    def append(self, step: Step) -> None:
        """Add the step that follows the last one.

        Raises:
            InvalidInput: its number is not one more than the last one's."""
        if step.number != len(self) + 1:
            raise InvalidInput(f"step {step.number} does not follow step {len(self)}")
        self._steps.append(step)

    def prefix(self, step: int) -> tuple[Step, ...]:
        """Steps 1 to ``step``, which may be 0 (none).

        Raises:
            InvalidInput: the ledger is not that long."""
        return tuple(self._steps[: self._checked(step)])

    def since(self, step: int) -> tuple[Step, ...]:
        """The steps after ``step``: what a state that contains ``step`` steps must replay.

        Raises:
            InvalidInput: the ledger is not that long."""
        return tuple(self._steps[self._checked(step) :])

    def cut(self, step: int) -> tuple[Step, ...]:
        """Drop the steps after ``step``, and return them.

        Raises:
            InvalidInput: the ledger is not that long."""
        dropped = self.since(step)
        del self._steps[step:]
        return dropped

    def _checked(self, step: int) -> int:
        if not 0 <= step <= len(self):
            raise InvalidInput(f"the ledger holds steps 1 to {len(self)}; there is no prefix of {step}")
        return step
