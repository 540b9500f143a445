"""Which worker a request goes to, and the circuit breaker's table."""

from __future__ import annotations

import itertools

import pytest

from belayer_rollout.errors import InvalidRequest
from belayer_rollout.routing import (
    TRANSITIONS,
    Affinity,
    Breaker,
    BreakerEvent,
    BreakerLimits,
    BreakerState,
    Candidate,
    choose,
)

FAULT, SUCCESS, TRIAL = BreakerEvent.FAULT, BreakerEvent.SUCCESS, BreakerEvent.TRIAL
PASSED, FAILED = BreakerEvent.TRIAL_PASSED, BreakerEvent.TRIAL_FAILED
LIMITS = BreakerLimits(cool_s=0.5, most_cool_s=4.0)
WAYS = {
    BreakerState.CLOSED: (),
    BreakerState.OPEN: (FAULT,),
    BreakerState.HALF_OPEN: (FAULT, TRIAL),
}


def breaker(*events: BreakerEvent, limits: BreakerLimits = LIMITS, now: float = 0.0) -> Breaker:
    made = Breaker(limits)
    for event in events:
        made.on(event, now)
    return made


@pytest.mark.parametrize(("state", "event"), list(itertools.product(BreakerState, BreakerEvent)))
def test_every_pair_is_in_the_table_or_an_error(state: BreakerState, event: BreakerEvent) -> None:
    made = breaker(*WAYS[state])
    assert made.state is state
    if (state, event) in TRANSITIONS:
        assert made.on(event, 1.0) is TRANSITIONS[state, event] is made.state
    else:
        with pytest.raises(RuntimeError, match=event.value):
            made.on(event, 1.0)
        assert made.state is state


def test_the_table_leads_from_closed_to_open_to_half_open_and_back() -> None:
    made = breaker()
    states = [made.on(event, 0.0) for event in (SUCCESS, FAULT, TRIAL, FAILED, TRIAL, PASSED, FAULT)]
    assert [state.value for state in states] == [
        "closed",
        "open",
        "half-open",
        "open",
        "half-open",
        "closed",
        "open",
    ]


def test_trials_come_ever_later_until_one_passes() -> None:
    made, now, waits = Breaker(LIMITS), 100.0, []
    made.on(FAULT, now)
    for _ in range(6):
        waits.append(made.trial_at - now)
        now = made.trial_at
        made.on(TRIAL, now)
        made.on(FAILED, now)
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    made.on(TRIAL, now)
    made.on(PASSED, now)
    made.on(FAULT, now)
    assert made.trial_at == now + 0.5


def test_late_faults_of_old_requests_put_no_trial_off() -> None:
    made = breaker(FAULT, now=10.0)
    made.on(FAULT, 10.4)
    assert made.trial_at == 10.5


def test_only_faults_in_a_row_count() -> None:
    limits = BreakerLimits(faults=3)
    assert breaker(FAULT, FAULT, SUCCESS, FAULT, FAULT, limits=limits).state is BreakerState.CLOSED
    assert breaker(FAULT, FAULT, FAULT, limits=limits).state is BreakerState.OPEN


@pytest.mark.parametrize("wrong", [{"faults": 0}, {"cool_s": 0}, {"cool_s": 31.0}])
def test_limits_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        BreakerLimits(**wrong)  # type: ignore[arg-type]


A, B, C = Candidate("a", 5, True), Candidate("b", 2, True), Candidate("c", 9, True)


def test_the_home_of_a_session_goes_before_load() -> None:
    assert choose([A, B, C]) == "b"
    assert choose([A, B, C], home="c") == "c"
    assert choose([A, B, C], home="gone") == "b"


def test_what_is_not_fit_gets_nothing() -> None:
    unfit = Candidate("b", 0, False)
    assert choose([A, unfit], home="b") == "a"
    assert choose([unfit]) is None
    assert choose([]) is None


def test_what_broke_or_is_busy_comes_last_but_comes() -> None:
    busy = Candidate("b", 0, True, is_busy=True)
    assert choose([A, B], home="b", avoid={"b"}) == "a"
    assert choose([A, busy], home="b") == "a"
    assert choose([A, busy], avoid={"a"}) == "b"
    assert choose([A], avoid={"a"}) == "a"


def test_equal_loads_go_to_the_one_that_got_least() -> None:
    assert choose([Candidate("a", 1, True, sent=9), Candidate("b", 1, True, sent=3)]) == "b"


def test_only_the_newest_sessions_are_remembered() -> None:
    affinity = Affinity(most=2)
    for session in ("one", "two", "one", "three"):
        affinity.settle(session, f"worker of {session}")
    assert affinity.home("two") is None
    assert affinity.home("one") == "worker of one"
    assert affinity.home("three") == "worker of three"
