"""How fast a worker gives tokens, and when its silence is suspicious. Pure: times are passed in. Seconds, of
a clock that never jumps (`loop.time()`).

A wait for the first token is no gap: it is queue time, which grows with the load and says nothing of health.
A silent stream is no proof either: an engine preempts some requests so that others go on. So silence only
raises a suspicion (`suspicion`), which a health probe confirms or not."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from belayer_rollout.errors import InvalidRequest

__all__ = ["Pace", "PaceLimits", "Suspicion", "probe_deadline_s", "suspicion"]

WINDOW = 256
"""Gaps kept: a few seconds of a busy worker, so that the deadline follows its load."""

ENOUGH = 8
"""Fewer gaps than this tell too little to go by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceLimits:
    """When to suspect a worker, and how long to give it to prove itself.

    Raises:
        InvalidRequest: a value that is not positive, or a floor above its ceiling."""

    multiple: float = 10.0
    """A gap is too long at so many times the worker's own long gaps (its `quantile`)."""
    quantile: float = 0.9
    floor_s: float = 2.0
    """No gap below this is suspicious: garbage collection and a weight update take about so long."""
    ceiling_s: float = 60.0
    unlearnt_s: float = 10.0
    """The deadline of a worker that has given too few tokens to learn from."""
    first_token_s: float = 30.0
    """Suspect a worker from which nothing at all has come for so long while requests queue at it."""
    probe_s: float = 5.0
    probe_each_s: float = 0.05
    """A probe is a request, and queues behind the others: so much more time for each request in flight."""
    lost_s: float = 300.0
    """A stream that gave tokens and then none for so long is lost, however well its worker is otherwise."""
    queue_s: float = 1800.0
    """A request that has waited so long for its first token is lost, too: a proxy dropped it, say. Far beyond
    any queue, as whoever is sent again queues again; infinite to wait for ever."""
    tick_s: float = 0.1
    """How often the watch looks."""

    def __post_init__(self) -> None:
        times = (self.multiple, self.floor_s, self.unlearnt_s, self.first_token_s, self.probe_s, self.tick_s)
        if not all(value > 0 for value in times) or not self.probe_each_s >= 0:
            raise InvalidRequest(f"paces and their deadlines must be positive: {self}")
        if not 0 < self.quantile <= 1:
            raise InvalidRequest(f"quantile must be within (0, 1]: {self}")
        if not self.floor_s <= self.ceiling_s <= self.lost_s or not self.first_token_s <= self.queue_s:
            raise InvalidRequest(f"floor_s <= ceiling_s <= lost_s and first_token_s <= queue_s: {self}")


class Suspicion(Enum):
    """What a stream's silence means."""

    NONE = "none"
    WORKER = "worker"
    """The worker may hang: probe it."""
    STREAM = "stream"
    """This stream is lost, whatever a probe says."""


class Pace:
    """The gaps between chunks of one worker's streams, newest `WINDOW` kept."""

    __slots__ = ("_gaps", "_limits", "observe")

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        # A bare append: it is called for every token of every stream.
        self.observe = self._gaps.append

    @property
    def recent(self) -> tuple[float, ...]:
        """Oldest first."""
        return tuple(self._gaps)

    @property
    def gap_s(self) -> float | None:
        """The median gap; None before there is one."""
        return sorted(self._gaps)[len(self._gaps) // 2] if self._gaps else None

    @property
    def deadline_s(self) -> float:
        """A gap beyond this is suspicious."""
        limits = self._limits
        if len(self._gaps) < ENOUGH:
            return min(max(limits.unlearnt_s, limits.floor_s), limits.ceiling_s)
        ordered = sorted(self._gaps)
        long_gap = ordered[min(len(ordered) - 1, int(limits.quantile * len(ordered)))]
        return min(max(limits.multiple * long_gap, limits.floor_s), limits.ceiling_s)


def suspicion(
    limits: PaceLimits, *, deadline_s: float, silent_s: float, worker_silent_s: float, has_begun: bool
) -> Suspicion:
    """What to think of a stream that has given nothing for ``silent_s``, at a worker of which no stream has
    moved for ``worker_silent_s``. ``has_begun``: it has given a token, so that it does not queue any more."""
    if silent_s >= (limits.lost_s if has_begun else limits.queue_s):
        return Suspicion.STREAM
    patience = deadline_s if has_begun else limits.first_token_s
    # A stream that waits while others move is preempted or queues.
    return Suspicion.WORKER if min(silent_s, worker_silent_s) >= patience else Suspicion.NONE


def probe_deadline_s(limits: PaceLimits, in_flight: int) -> float:
    """How long a health probe may take at a worker with so many requests."""
    return limits.probe_s + limits.probe_each_s * in_flight
