"""The pair's table of states: every pair of state and event."""

from __future__ import annotations

import itertools

import pytest

from belayer_rollout.pair_state import TRANSITIONS, Event, PairState, WrongTransition, after


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PairState, Event)))
def test_every_event_in_every_state_is_listed_or_refused(state: PairState, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert after(state, event) is TRANSITIONS[state][event]
        return
    with pytest.raises(WrongTransition) as refused:
        after(state, event)
    assert (refused.value.state, refused.value.event) == (state, event)


def test_every_state_can_be_closed_and_only_closed_is_for_good() -> None:
    assert {after(state, Event.CLOSE) for state in PairState} == {PairState.CLOSED}
    assert set(TRANSITIONS[PairState.CLOSED]) == {Event.CLOSE}


def test_every_state_is_reached_from_new() -> None:
    reached = {PairState.NEW}
    while more := {after(s, e) for s in reached for e in TRANSITIONS[s]} - reached:
        reached |= more
    assert reached == set(PairState)


def test_a_lost_primary_is_never_followed_by_serving_without_a_new_one() -> None:
    for state in PairState:
        if Event.PRIMARY_LOST in TRANSITIONS[state]:
            assert state.serves
            assert after(state, Event.PRIMARY_LOST).makes_wait
    ready = {Event.PRIMARY_READY, Event.ACTIVATED}
    for state in PairState:
        if state.makes_wait:
            assert {event for event in TRANSITIONS[state] if after(state, event).serves} <= ready


def test_faults_in_a_row_are_survived_as_often_as_they_come() -> None:
    state = after(after(PairState.NEW, Event.START), Event.PRIMARY_READY)
    for _ in range(100):
        for event in (Event.SHADOW_READY, Event.PRIMARY_LOST, Event.ACTIVATED):
            state = after(state, event)
        for event in (Event.PRIMARY_LOST, Event.PRIMARY_READY):
            state = after(state, event)
    assert state is PairState.ALONE
