"""Which worker a request goes to, and which one gets none for now. Pure: no I/O; times are passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from belayer_rollout.errors import InvalidRequest

__all__ = ["Affinity", "Breaker", "BreakerEvent", "BreakerLimits", "BreakerState", "Candidate", "choose"]

MOST_SESSIONS = 65_536
"""Sessions whose worker is remembered. One that was forgotten only loses its prefix cache."""


class BreakerState(Enum):
    """Whether a worker gets requests."""

    CLOSED = "closed"
    """It does."""
    OPEN = "open"
    """It broke: none, until a trial is due."""
    HALF_OPEN = "half-open"
    """Its trial runs: still none."""


class BreakerEvent(Enum):
    """What happens to a worker."""

    FAULT = "fault"
    """A request broke on it."""
    SUCCESS = "success"
    """A request came through."""
    TRIAL = "trial"
    """A health probe begins."""
    TRIAL_PASSED = "trial-passed"
    TRIAL_FAILED = "trial-failed"


TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    # A fault opens once it is the n-th in a row: `Breaker.on` counts.
    (BreakerState.CLOSED, BreakerEvent.FAULT): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.SUCCESS): BreakerState.CLOSED,
    # What requests of before tell while it is open or on trial is old news.
    (BreakerState.OPEN, BreakerEvent.FAULT): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.SUCCESS): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.TRIAL): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.FAULT): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.SUCCESS): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIAL_PASSED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIAL_FAILED): BreakerState.OPEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When a breaker opens, and how long it stays open.

    Raises:
        InvalidRequest: a value out of range."""

    faults: int = 1
    """Opens at so many in a row. One is enough, as the way back is a probe and not a guess."""
    cool_s: float = 0.1
    """The first trial comes after so long, each further one after twice the time."""
    most_cool_s: float = 30.0

    def __post_init__(self) -> None:
        if self.faults < 1 or not 0 < self.cool_s <= self.most_cool_s:
            raise InvalidRequest(f"faults must be 1 or more, 0 < cool_s <= most_cool_s: {self}")


class Breaker:
    """The circuit breaker of one worker."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._in_a_row = 0
        self._cool_s = limits.cool_s
        self.state = BreakerState.CLOSED
        self.trial_at = 0.0
        """When the next trial is due; of meaning while it is open."""

    def on(self, event: BreakerEvent, now: float) -> BreakerState:
        """The state after ``event``.

        Raises:
            RuntimeError: an event that cannot come in this state."""
        try:
            after = TRANSITIONS[self.state, event]
        except KeyError:
            raise RuntimeError(f"a breaker that is {self.state.value} gets no {event.value}") from None
        if self.state is BreakerState.CLOSED:
            self._in_a_row = self._in_a_row + 1 if event is BreakerEvent.FAULT else 0
            if after is BreakerState.OPEN and self._in_a_row < self._limits.faults:
                return self.state
        if after is BreakerState.CLOSED:
            self._in_a_row, self._cool_s = (0, self._limits.cool_s)
        elif after is BreakerState.OPEN and self.state is not BreakerState.OPEN:
            self.trial_at = now + self._cool_s
            self._cool_s = min(2 * self._cool_s, self._limits.most_cool_s)
        self.state = after
        return after


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the choice sees it."""

    name: str
    load: int
    """Requests in flight there."""
    is_fit: bool
    """It may get requests."""
    is_busy: bool = False
    """It refused one just now."""
    sent: int = 0
    """How many it ever got: decides between equal loads."""


def choose(
    candidates: Sequence[Candidate],
    *,
    home: str | None = None,
    avoid: Collection[str] = (),
) -> str | None:
    """The worker for a request; None if none is fit.

    ``home`` (where its session's prefix is cached) if it is fit, else the least loaded. Those in ``avoid``
    broke under this request just now: they come last, as those that are busy do."""
    fit = [candidate for candidate in candidates if candidate.is_fit]
    if not fit:
        return None
    best = min(
        fit,
        key=lambda one: (one.name in avoid, one.is_busy, one.name != home, one.load, one.sent, one.name),
    )
    return best.name


class Affinity:
    """Which worker has the prefix of which session; the `MOST_SESSIONS` used last."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._homes: OrderedDict[str, str] = OrderedDict()

    def home(self, session: str) -> str | None:
        """The session's worker, if it has one."""
        return self._homes.get(session)

    def settle(self, session: str, worker: str) -> None:
        """The session's prefix is at this worker now."""
        self._homes[session] = worker
        self._homes.move_to_end(session)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)
