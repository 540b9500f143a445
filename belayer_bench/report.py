"""What a bench found, as one JSON object. Pure. Milliseconds; ratios are ours over theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from belayer_bench.machine import Machine

__all__ = ["OURS", "Peer", "Report", "Target", "quantile"]

OURS = "belayer"
"""The name that our own figures go by, beside those of peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Somebody we are measured against: its version, or why it was left out."""

    version: str = ""
    left_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a figure must not exceed, or must reach: one of the two.

    Raises:
        ValueError: neither is given, or both."""

    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"a target is at_most or at_least: {self}")

    def check(self, value: float) -> dict[str, Any]:
        """The figure beside its target."""
        if self.at_most is not None:
            bound, limit, met = "at_most", self.at_most, value <= self.at_most
        else:
            assert self.at_least is not None
            bound, limit, met = "at_least", self.at_least, value >= self.at_least
        return {"value": round(value, 4), bound: round(limit, 4), "met": met}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of one bench. ``notes`` say how a figure was taken, by its name."""

    bench: str
    machine: Machine
    medians: Mapping[str, float]
    peers: Mapping[str, Peer] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    checks: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(
            dataclasses.replace(
                self,
                medians={name: round(value, 3) for name, value in self.medians.items()},
                ratios={name: round(value, 4) for name, value in self.ratios.items()},
            )
        )


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed.

    Raises:
        ValueError: there are no values, or the share is not in (0, 1]."""
    if not values or not 0 < share <= 1:
        raise ValueError(f"no quantile {share} of {len(values)} values")
    rank = -int(-share * len(values) // 1)  # rounded up
    return sorted(values)[rank - 1]
