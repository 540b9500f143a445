from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_env.errors import InvalidInput
from belayer_env.predict import BASE_COST_S, BYTES_PER_S, BubblePredictor, CostPredictor, FaultRate

SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
QUANTILES = st.floats(0.001, 0.999)
SIZES = st.integers(0, 1 << 50)
MB = 10**6
NO_TIME = [-1.0, -1e-300, math.nan, math.inf, True, "1", None]


def predictor(prior: list[float], own: list[float]) -> BubblePredictor:
    bubbles = BubblePredictor(prior)
    for seconds in own:
        bubbles.observe(seconds)
    return bubbles


# -- bubbles


@given(QUANTILES)
def test_without_any_data_there_is_no_bubble(quantile: float) -> None:
    assert BubblePredictor().predict(quantile) == 0.0


def test_one_or_two_bubbles_of_its_own_prove_no_quarter() -> None:
    assert predictor([], [9.0, 9.0]).predict(0.25) == 0.0
    assert predictor([], [9.0, 9.0, 9.0]).predict(0.25) == 9.0


def test_what_other_episodes_met_counts_until_there_is_enough_of_its_own() -> None:
    prior = [4.0] * 100
    assert BubblePredictor(prior).predict(0.25) == 4.0
    assert predictor(prior, [0.5]).predict(0.25) == 4.0
    assert predictor(prior, [0.5] * 2).predict(0.25) == 0.5
    assert predictor(prior, [60.0] * 32).predict(0.25) == 60.0


def test_old_bubbles_are_forgotten() -> None:
    bubbles = predictor([], [100.0] * 50 + [1.0] * 32)
    assert bubbles.predict(0.9) == 1.0
    assert bubbles.recent == (1.0,) * 32


@given(st.lists(SECONDS), st.lists(SECONDS), QUANTILES)
def test_a_prediction_is_zero_or_a_bubble_that_was_seen(
    prior: list[float], own: list[float], quantile: float
) -> None:
    assert predictor(prior, own).predict(quantile) in {0.0, *prior, *own[-32:]}


@given(st.lists(SECONDS), st.lists(SECONDS), QUANTILES, QUANTILES)
def test_a_higher_quantile_never_predicts_less(
    prior: list[float], own: list[float], one: float, other: float
) -> None:
    bubbles = predictor(prior, own)
    low, high = sorted((one, other))
    assert bubbles.predict(low) <= bubbles.predict(high)


@given(st.lists(SECONDS), st.lists(SECONDS, min_size=1), st.floats(0, 1e6), QUANTILES, st.data())
def test_a_longer_bubble_never_predicts_less(
    prior: list[float], own: list[float], longer: float, quantile: float, data: st.DataObject
) -> None:
    raised = list(own)
    index = data.draw(st.integers(0, len(own) - 1))
    raised[index] = max(raised[index], longer)
    assert predictor(prior, own).predict(quantile) <= predictor(prior, raised).predict(quantile)


def test_a_bubble_falls_short_of_its_prediction_no_oftener_than_was_asked_for() -> None:
    chance = random.Random(3)
    bubbles, short, num = BubblePredictor(), 0, 5000
    for _ in range(num):
        bubble = chance.lognormvariate(math.log(4), 1.0)
        short += bubble < bubbles.predict(0.25)
        bubbles.observe(bubble)
    assert 0.20 <= short / num <= 0.27


def test_a_hint_is_for_the_next_bubble_only() -> None:
    bubbles = predictor([], [4.0] * 10)
    bubbles.hint(30.0)
    bubbles.hint(20.0)
    assert bubbles.predict(0.25) == 20.0
    assert bubbles.predict(0.25) == 20.0
    bubbles.observe(20.0)
    assert bubbles.predict(0.25) == 4.0


def test_hints_that_did_not_hold_are_cut_down() -> None:
    bubbles = BubblePredictor()
    for _ in range(8):
        bubbles.hint(10.0)
        bubbles.observe(2.0)
    bubbles.hint(10.0)
    assert bubbles.predict(0.25) == 2.0


def test_a_hint_of_no_bubble_is_believed() -> None:
    bubbles = predictor([], [4.0] * 10)
    bubbles.hint(0)
    assert bubbles.predict(0.25) == 0.0
    bubbles.observe(0)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=40), SECONDS, QUANTILES)
def test_a_hint_is_never_exceeded(history: list[tuple[float, float]], hint: float, quantile: float) -> None:
    bubbles = BubblePredictor()
    for hinted, bubble in history:
        bubbles.hint(hinted)
        bubbles.observe(bubble)
    bubbles.hint(hint)
    assert 0.0 <= bubbles.predict(quantile) <= hint


@pytest.mark.parametrize("wrong", NO_TIME)
def test_what_is_no_time_is_refused_and_leaves_no_trace(wrong: float) -> None:
    bubbles = predictor([], [4.0] * 10)
    with pytest.raises(InvalidInput):
        bubbles.observe(wrong)
    with pytest.raises(InvalidInput):
        bubbles.hint(wrong)
    with pytest.raises(InvalidInput):
        BubblePredictor([wrong])
    assert bubbles.recent == (4.0,) * 10
    assert bubbles.predict(0.25) == 4.0


@pytest.mark.parametrize("wrong", [0, 1, -0.1, math.nan])
def test_a_quantile_lies_between_zero_and_one(wrong: float) -> None:
    with pytest.raises(InvalidInput):
        BubblePredictor().predict(wrong)


@pytest.mark.parametrize("kind", [BubblePredictor, CostPredictor])
def test_a_window_holds_something(kind: type[BubblePredictor] | type[CostPredictor]) -> None:
    with pytest.raises(InvalidInput):
        kind(window=0)


# -- costs


def test_before_the_first_checkpoint_the_documented_line_holds() -> None:
    assert CostPredictor().predict(0) == BASE_COST_S
    assert CostPredictor().predict(50 * MB) == pytest.approx(BASE_COST_S + 50 * MB / BYTES_PER_S)


def test_a_line_in_the_checkpoints_is_found_in_spite_of_outliers() -> None:
    chance = random.Random(5)
    costs = CostPredictor()
    for _ in range(32):
        size = chance.randrange(400 * MB)
        slow_disk = 5.0 if chance.random() < 0.15 else 0.0
        costs.observe(size, 0.04 + size / 200e6 + slow_disk + chance.uniform(0, 0.01))
    assert costs.predict(0) == pytest.approx(0.04, abs=0.03)
    assert costs.predict(300 * MB) == pytest.approx(0.04 + 1.5, rel=0.1)


def test_checkpoints_of_one_size_move_the_base_and_hold_the_slope() -> None:
    chance = random.Random(5)
    costs = CostPredictor()
    for _ in range(32):
        costs.observe(5 * MB + chance.randrange(10_000), 0.3 + chance.uniform(-0.05, 0.05))
    assert costs.predict(5 * MB) == pytest.approx(0.3, abs=0.03)
    assert costs.predict(505 * MB) == pytest.approx(0.3 + 1.0, rel=0.4)


def test_costs_follow_a_host_that_has_become_slow() -> None:
    costs = CostPredictor()
    for seconds in [0.1] * 32 + [1.0] * 32:
        costs.observe(5 * MB, seconds)
    assert costs.predict(5 * MB) == pytest.approx(1.0, rel=0.05)


@given(st.lists(st.tuples(SIZES, SECONDS), max_size=40), SIZES, SIZES)
def test_costs_are_finite_and_grow_with_size(seen: list[tuple[int, float]], one: int, other: int) -> None:
    costs = CostPredictor()
    for size, seconds in seen:
        costs.observe(size, seconds)
    small, large = sorted((one, other))
    assert 0.0 <= costs.predict(small) <= costs.predict(large) < math.inf


@pytest.mark.parametrize("wrong", [*NO_TIME, 10**400])
def test_what_is_no_size_or_time_is_refused(wrong: int) -> None:
    costs = CostPredictor()
    with pytest.raises(InvalidInput):
        costs.observe(wrong, 1.0)
    with pytest.raises(InvalidInput):
        costs.observe(1, wrong)
    with pytest.raises(InvalidInput):
        costs.predict(wrong)
    assert costs.predict(0) == BASE_COST_S


# -- faults


def test_the_rate_starts_at_one_a_day_and_follows_what_is_seen() -> None:
    rate = FaultRate()
    assert rate.per_s == pytest.approx(1 / 86_400)
    rate.observe(faults=99, seconds=99 * 100.0)
    assert rate.per_s == pytest.approx(100 / (86_400 + 9_900))
    rate.observe(seconds=1e9)
    assert rate.per_s < 1e-6


def test_a_given_rate_stays() -> None:
    rate = FaultRate(given=0.0)
    rate.observe(faults=5, seconds=1.0)
    assert rate.per_s == 0.0


@given(st.integers(0, 10**6), st.integers(0, 10**6), SECONDS, SECONDS)
def test_the_rate_rises_with_faults_and_falls_with_time(
    few: int, many: int, short: float, long: float
) -> None:
    few, many = sorted((few, many))
    short, long = sorted((short, long))

    def rate(faults: int, seconds: float) -> float:
        learnt = FaultRate()
        learnt.observe(faults=faults, seconds=seconds)
        return learnt.per_s

    assert 0 <= rate(few, long) <= rate(few, short) <= rate(many, short) < math.inf


@pytest.mark.parametrize("wrong", [*NO_TIME, 10**400])
def test_what_is_no_time_or_number_of_faults_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidInput):
        FaultRate().observe(seconds=wrong)
    with pytest.raises(InvalidInput):
        FaultRate().observe(faults=wrong)
    if wrong is not None:
        with pytest.raises(InvalidInput):
            FaultRate(given=wrong)
