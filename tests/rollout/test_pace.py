"""When silence is suspicious."""

from __future__ import annotations

import pytest

from belayer_rollout.errors import InvalidRequest
from belayer_rollout.pace import Pace, PaceLimits, Suspicion, probe_deadline_s, suspicion

LIMITS = PaceLimits(
    multiple=10,
    floor_s=2,
    ceiling_s=60,
    unlearnt_s=10,
    first_token_s=30,
    probe_s=5,
    probe_each_s=0.05,
    lost_s=300,
    queue_s=5000,
)


def pace(*gaps: float) -> Pace:
    learnt = Pace(LIMITS)
    for gap in gaps:
        learnt.observe(gap)
    return learnt


def test_the_deadline_is_a_multiple_of_the_workers_own_gaps() -> None:
    assert pace(*[0.5] * 50).deadline_s == pytest.approx(5.0)
    assert pace(*[2.0] * 50).deadline_s == pytest.approx(20.0)
    assert pace(*[2.0] * 50).gap_s == 2.0


def test_the_deadline_is_bounded_and_cautious_before_anything_is_learnt() -> None:
    assert pace(*[0.001] * 50).deadline_s == 2.0
    assert pace(*[30.0] * 50).deadline_s == 60.0
    assert pace().deadline_s == pace(*[0.001] * 7).deadline_s == 10.0
    assert pace().gap_s is None


def test_one_long_gap_or_a_burst_of_tokens_at_once_changes_little() -> None:
    assert pace(*[0.5] * 50, 55.0).deadline_s == pytest.approx(5.0)
    assert pace(*[0.0, 0.5] * 50).deadline_s == pytest.approx(5.0)


def test_the_deadline_follows_a_worker_that_slows_down() -> None:
    assert pace(*[0.3] * 256, *[3.0] * 100).deadline_s == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("silent_s", "worker_silent_s", "has_begun", "expected"),
    [
        (4.9, 100.0, True, Suspicion.NONE),
        (5.0, 5.0, True, Suspicion.WORKER),
        # Another stream of the worker moved: preempted, not hung.
        (100.0, 4.9, True, Suspicion.NONE),
        (300.0, 0.0, True, Suspicion.STREAM),
        # Queue time is no gap.
        (29.9, 29.9, False, Suspicion.NONE),
        (3000.0, 1.0, False, Suspicion.NONE),
        (5000.0, 1.0, False, Suspicion.STREAM),
        (30.0, 30.0, False, Suspicion.WORKER),
    ],
)
def test_silence_is_judged_by_what_else_moves(
    silent_s: float, worker_silent_s: float, has_begun: bool, expected: Suspicion
) -> None:
    found = suspicion(
        LIMITS, deadline_s=5.0, silent_s=silent_s, worker_silent_s=worker_silent_s, has_begun=has_begun
    )
    assert found is expected


def test_a_probe_gets_time_for_the_requests_before_it() -> None:
    assert probe_deadline_s(LIMITS, 0) == 5.0
    assert probe_deadline_s(LIMITS, 1000) == pytest.approx(55.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"multiple": 0},
        {"floor_s": -1},
        {"floor_s": 61},
        {"quantile": 0},
        {"quantile": 1.5},
        {"tick_s": float("nan")},
        {"lost_s": 10},
        {"queue_s": 29},
        {"probe_each_s": -1},
    ],
)
def test_limits_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        PaceLimits(**wrong)
