"""What a pair keeps of each fault of its primary. Plain data; durations in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Path", "Takeover"]

Path = Literal["shadow", "cold"]


@dataclass(slots=True)
class Takeover:
    """One fault, from its being seen to the next primary. Filled in as it goes on."""

    at: float
    """When the fault was seen: seconds since 1970."""
    cause: str
    path: Path = "shadow"
    """By whom it was survived: the shadow, or an engine built anew."""
    reason: str = ""
    """Why not by the shadow."""
    epoch: int = 0
    """Of the primary that came of it."""
    weight_version: int = 0
    detect_s: float | None = None
    """From the last token of the old primary until the fault was seen; None if it was idle."""
    fence_s: float = 0.0
    """Until no process of the old one could act any more."""
    check_s: float = 0.0
    """Until owner and device were found fit."""
    activate_s: float = 0.0
    """For mapping the arena and forgetting local state."""
    swap_s: float = 0.0
    """From the fault being seen until the next primary took requests; in a cold start, all of it."""
    is_over: bool = False
    notes: list[str] = field(default_factory=list)
    """What else went wrong on the way."""
