"""What a client tells of itself: plain data, seconds and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ClientStatus", "WorkerStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker, as its client sees it."""

    name: str
    is_fit: bool
    """It gets requests."""
    is_stale: bool
    """It could not follow a weight update, and gets none until it has."""
    breaker: str
    """closed, open or half-open."""
    load: int
    """Requests in flight there."""
    sent: int
    """Attempts it ever got."""
    gap_s: float | None
    """Its median gap between chunks; None before it gave any."""
    deadline_s: float
    """A gap beyond this makes it suspect."""
    weight_version: int | None
    """As far as the client put one there; None if it did not."""
    faults: Mapping[str, int]
    """How often it broke, by the name of the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatus:
    """A client and its workers."""

    workers: tuple[WorkerStatus, ...]
    in_flight: int
    """Requests that are being generated."""
    waiting: int
    """Requests that wait for a place among them (``max_in_flight``, or a weight update)."""
    weight_version: int | None
    """In force, once the client has put one there."""
