"""The states of a shadow pair and what leads from one to the other: a table. Pure.

NEW --start--> COLD --primary ready--> ALONE --shadow ready--> GUARDED
GUARDED --primary lost--> PROMOTING --activated--> ALONE      (then a new shadow is built)
                          PROMOTING --refused, or shadow lost--> COLD
ALONE   --primary lost--> COLD;   GUARDED --shadow lost--> ALONE
COLD    --start failed--> BROKEN --start--> COLD;   any --close--> CLOSED"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

__all__ = ["TRANSITIONS", "Event", "PairState", "WrongTransition", "after"]


class PairState(Enum):
    """What a pair can do now."""

    NEW = "new"
    """Nothing was started."""
    COLD = "cold"
    """A primary is being built; requests wait."""
    ALONE = "alone"
    """A primary serves; its shadow is being built. A fault now costs a cold start."""
    GUARDED = "guarded"
    """A primary serves, and a shadow is ready."""
    PROMOTING = "promoting"
    """The primary is lost, and the shadow is taking over; requests wait."""
    BROKEN = "broken"
    """No primary can be built. Only a new start leads out."""
    CLOSED = "closed"
    """For good."""

    @property
    def serves(self) -> bool:
        return self in (PairState.ALONE, PairState.GUARDED)

    @property
    def makes_wait(self) -> bool:
        """A request that comes now will be served if it waits."""
        return self in (PairState.COLD, PairState.PROMOTING)


class Event(Enum):
    """What happens to a pair."""

    START = "start"
    PRIMARY_READY = "primary ready"
    SHADOW_READY = "shadow ready"
    PRIMARY_LOST = "primary lost"
    SHADOW_LOST = "shadow lost"
    ACTIVATED = "activated"
    REFUSED = "refused"
    """A check before the take-over failed, or the shadow's activation did."""
    START_FAILED = "start failed"
    CLOSE = "close"


class WrongTransition(RuntimeError):
    """An event that can't happen in this state: a mistake of the pair's own."""

    def __init__(self, state: PairState, event: Event) -> None:
        super().__init__(f"{event.value!r} can't happen to a pair that is {state.value}")
        self.state = state
        self.event = event


TRANSITIONS: Mapping[PairState, Mapping[Event, PairState]] = {
    PairState.NEW: {
        Event.START: PairState.COLD,
        Event.CLOSE: PairState.CLOSED,
    },
    PairState.COLD: {
        Event.PRIMARY_READY: PairState.ALONE,
        Event.START_FAILED: PairState.BROKEN,
        Event.CLOSE: PairState.CLOSED,
    },
    PairState.ALONE: {
        Event.SHADOW_READY: PairState.GUARDED,
        # One that is still being built: another is begun.
        Event.SHADOW_LOST: PairState.ALONE,
        Event.PRIMARY_LOST: PairState.COLD,
        Event.CLOSE: PairState.CLOSED,
    },
    PairState.GUARDED: {
        Event.SHADOW_LOST: PairState.ALONE,
        Event.PRIMARY_LOST: PairState.PROMOTING,
        Event.CLOSE: PairState.CLOSED,
    },
    PairState.PROMOTING: {
        Event.ACTIVATED: PairState.ALONE,
        Event.REFUSED: PairState.COLD,
        Event.SHADOW_LOST: PairState.COLD,
        Event.CLOSE: PairState.CLOSED,
    },
    PairState.BROKEN: {
        Event.START: PairState.COLD,
        Event.CLOSE: PairState.CLOSED,
    },
    PairState.CLOSED: {
        Event.CLOSE: PairState.CLOSED,
    },
}


def after(state: PairState, event: Event) -> PairState:
    """The next state.

    Raises:
        WrongTransition: the table has none."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise WrongTransition(state, event) from None
