"""How long a running generation goes on."""

from __future__ import annotations

import pytest

from belayer_rollout.bubble import Lengths, predicted_rest_s, predicted_rest_tokens
from belayer_rollout.errors import InvalidRequest


def test_a_generation_goes_on_as_those_did_that_came_so_far() -> None:
    longer = [60, 80, 100, 120]
    assert predicted_rest_tokens(50, 1000, longer, 0.5) == 50
    assert predicted_rest_tokens(50, 1000, longer, 0.0) == 10
    assert predicted_rest_tokens(50, 1000, longer, 1.0) == 70


def test_max_tokens_bounds_it_and_nothing_to_go_by_is_nothing() -> None:
    assert predicted_rest_tokens(50, 64, [500, 500], 0.5) == 14
    assert predicted_rest_tokens(50, 64, [], 0.5) == 0
    with pytest.raises(InvalidRequest):
        predicted_rest_tokens(0, 1, [], 1.5)


def test_a_session_is_asked_first_and_all_others_if_it_knows_too_little() -> None:
    lengths = Lengths()
    for tokens in (10, 20, 30, 40, 50):
        lengths.observe("own", tokens)
    for tokens in (100, 200):
        lengths.observe("other", tokens)
    assert lengths.beyond("own", 15) == [20, 30, 40, 50]
    assert lengths.beyond("own", 25) == [30, 40, 50, 100, 200]
    assert lengths.beyond("new", 60) == [100, 200]
    assert lengths.beyond("own", 1000) == []


def test_seconds_are_tokens_at_the_workers_pace_after_the_queue() -> None:
    assert predicted_rest_s(10, 0.5) == 5.0
    assert predicted_rest_s(10, 0.5, queue_s=3.0) == 8.0
    assert predicted_rest_s(10, 0.5, queue_s=-3.0) == 5.0
    assert predicted_rest_s(0, 0.5, queue_s=3.0) == 0.0
