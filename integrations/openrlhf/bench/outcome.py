"""What became of one batch, beside the undisturbed one. Pure. Seconds, tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from belayer_integrations.openrlhf.bench.faults import Fault

__all__ = ["Outcome", "Row", "Side", "Told", "row_of"]


@dataclass(frozen=True, slots=True)
class Told:
    """A sample as the trainer has it. ``num_sampled``: tokens that carry loss; 0 for a lost one."""

    token_ids: tuple[int, ...]
    num_sampled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``samples`` by prompt; none where the batch ended with ``error``. ``num_sampled``: tokens of all turns
    that the engine came to the end of. ``num_left``: containers that were still there when it was over."""

    samples: Mapping[str, Told] = field(default_factory=dict)
    wall_s: float
    num_sampled: int
    num_left: int
    error: str = ""
    was_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault, one side. ``num_equal``: of the samples that survived, those with every token of the
    undisturbed run. ``seconds_lost``: beyond what the undisturbed batch took; all of a batch's that gave
    nothing."""

    fault: str
    num_samples: int
    num_survived: int
    num_equal: int
    tokens_lost: int
    seconds_lost: float
    containers_left: int
    what: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"seconds_lost": round(self.seconds_lost, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """All rows of one, and how long its undisturbed batch took."""

    undisturbed_s: float
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "undisturbed_s": round(self.undisturbed_s, 1),
            "rows": [row.to_json() for row in self.rows],
        }


def row_of(fault: Fault, calm: Outcome, hit: Outcome) -> Row:
    """The batch that met the fault, held against the one that met none."""
    whole = {prompt: told for prompt, told in hit.samples.items() if told.num_sampled}
    survived = len(whole)
    kept = sum(told.num_sampled for told in whole.values())
    if hit.was_cut:
        what = f"hangs; cut off after {hit.wall_s:.0f} s"
    elif hit.error:
        what = hit.error
    elif survived == len(calm.samples):
        what = "goes on"
    else:
        what = "goes on, with lost samples masked"
    return Row(
        fault=fault.value,
        num_samples=len(calm.samples),
        num_survived=survived,
        num_equal=sum(told == calm.samples[prompt] for prompt, told in whole.items()),
        tokens_lost=max(0, hit.num_sampled - kept),
        seconds_lost=max(0.0, hit.wall_s - calm.wall_s) if survived else hit.wall_s,
        containers_left=hit.num_left,
        what=what,
    )
