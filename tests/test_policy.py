from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_env.errors import InvalidInput
from belayer_env.policy import (
    Adaptive,
    CheckpointPolicy,
    Decision,
    EveryN,
    EveryStep,
    Moment,
    Never,
    parse_policy,
)
from belayer_env.predict import BubblePredictor

SECONDS = st.floats(0, allow_nan=False)


def due_steps(policy: CheckpointPolicy, num_steps: int) -> list[int]:
    last, due = None, []
    for step in range(num_steps + 1):
        if policy.decide(Moment(step=step, last_checkpoint_step=last)).checkpoint:
            last = step
            due.append(step)
    return due


@pytest.mark.parametrize(
    ("name", "policy", "due"),
    [
        ("never", Never(), []),
        ("every-step", EveryStep(), [0, 1, 2, 3, 4, 5]),
        ("every-1", EveryN(1), [1, 2, 3, 4, 5]),
        ("every-2", EveryN(2), [2, 4]),
        ("every-9", EveryN(9), []),
    ],
)
def test_each_policy_is_due_when_its_name_says(name: str, policy: CheckpointPolicy, due: list[int]) -> None:
    assert parse_policy(name) == policy
    assert str(policy) == name
    assert due_steps(policy, 5) == due


def test_a_checkpoint_taken_meanwhile_puts_the_next_one_off() -> None:
    assert not EveryN(3).decide(Moment(step=5, last_checkpoint_step=3)).checkpoint
    assert EveryN(3).decide(Moment(step=6, last_checkpoint_step=3)).checkpoint
    assert not EveryStep().decide(Moment(step=5, last_checkpoint_step=5)).checkpoint


@dataclass
class AtRisk:
    def decide(self, moment: Moment) -> Decision:
        return Decision(moment.at_risk_s > 10, "mine")


def test_an_object_of_the_users_is_taken_as_it_is() -> None:
    policy = AtRisk()
    assert parse_policy(policy) is policy


@pytest.mark.parametrize(
    "wrong",
    [
        "", "every", "every-0", "every--1", "every-1.5", "every-٣", "Never", "every-5 ", None, 5, AtRisk,
        "adaptive:", "adaptive:quantile", "adaptive:quantile=x", "adaptive:quantile=1.2.3", "adaptive:mood=1",
        "adaptive:quantile=0.5,quantile=0.5", "adaptive:safety=inf", "adaptive:safety=nan",
        "adaptive quantile=0.5",
    ],
)  # fmt: skip
def test_anything_else_is_answered_with_the_right_forms(wrong: object) -> None:
    with pytest.raises(InvalidInput, match=r'"never", "every-step", "every-N".*"adaptive"'):
        parse_policy(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_every_n_counts_whole_steps(n: int) -> None:
    with pytest.raises(InvalidInput):
        EveryN(n)


# -- Adaptive


@pytest.mark.parametrize(
    "parameter",
    [
        {"quantile": 0.0}, {"quantile": 1.0}, {"quantile": math.nan}, {"faults_per_s": -1e-9},
        {"faults_per_s": math.inf}, {"faults_per_s": math.nan}, {"safety": 0.9}, {"safety": math.inf},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(parameter: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Adaptive(**parameter)


@given(
    st.builds(
        Adaptive,
        quantile=st.floats(0, 1, exclude_min=True, exclude_max=True),
        faults_per_s=st.none() | st.floats(0, 1e300),
        safety=st.floats(1, 1e300),
    )
)
def test_the_name_of_a_configured_adaptive_parses_back(policy: Adaptive) -> None:
    assert parse_policy(str(policy)) == policy


def test_the_plain_name_stands_for_the_defaults() -> None:
    assert parse_policy("adaptive") == Adaptive()
    assert str(Adaptive()) == "adaptive"
    assert str(Adaptive(faults_per_s=1e-5)) == "adaptive:faults_per_s=1e-05"


def at(step: int = 5, last: int | None = 3, **more: Any) -> Moment:
    facts: dict[str, Any] = {
        "at_risk_s": 10.0,
        "predicted_bubble_s": 4.0,
        "predicted_cost_s": 0.2,
        "faults_per_s": 1e-4,
        **more,
    }
    return Moment(step=step, last_checkpoint_step=last, **facts)


def test_a_bubble_that_hides_the_cost_gets_a_checkpoint() -> None:
    assert Adaptive().decide(at()) == Decision(True, "a bubble of 4 s hides a cost of 0.2 s 1.5 times over")


def test_a_sandbox_that_did_not_change_needs_none_however_long_the_bubble() -> None:
    moment = Moment(
        step=5, last_checkpoint_step=3, at_risk_s=1e6, is_unchanged=True, predicted_bubble_s=9, faults_per_s=1
    )
    assert Adaptive().decide(moment) == Decision(False, "nothing changed: the last one is moved up")


@pytest.mark.parametrize("is_unchanged", [None, False])
def test_in_doubt_a_sandbox_has_changed(is_unchanged: bool | None) -> None:
    moment = Moment(step=5, last_checkpoint_step=3, is_unchanged=is_unchanged, predicted_bubble_s=9)
    assert Adaptive().decide(moment).checkpoint


def test_unchanged_since_no_checkpoint_means_nothing() -> None:
    moment = Moment(step=5, last_checkpoint_step=None, is_unchanged=True, predicted_bubble_s=9)
    assert Adaptive().decide(moment).checkpoint


def test_no_step_at_risk_needs_none() -> None:
    decision = Adaptive().decide(at(3, 3, at_risk_s=0.0))
    assert not decision.checkpoint
    assert "nothing at risk" in decision.reason


def test_a_short_bubble_waits_until_the_risk_outweighs_the_cost() -> None:
    short: dict[str, Any] = {
        "predicted_bubble_s": 0.25,
        "predicted_cost_s": 0.2,
        "faults_per_s": 1e-3,
    }  # due from 20 s on
    assert Adaptive().decide(at(**short, at_risk_s=19.9)) == Decision(
        False,
        "a bubble of 0.25 s does not hide a cost of 0.2 s 1.5 times over, "
        "and 19.9 s at risk are less than 20 s",
    )
    assert Adaptive().decide(at(**short, at_risk_s=20.1)) == Decision(
        True, "20.1 s at risk outweigh a cost of 0.2 s (from 20 s on)", forced=True
    )


def test_a_given_rate_goes_before_the_learnt_one() -> None:
    short: dict[str, Any] = {"predicted_bubble_s": 0.0, "at_risk_s": 100.0}
    assert not Adaptive(faults_per_s=0.0).decide(at(**short, faults_per_s=1.0)).checkpoint
    assert Adaptive(faults_per_s=1.0).decide(at(**short, faults_per_s=0.0)).forced


def test_without_a_checkpoint_the_setup_is_at_risk_too() -> None:
    short: dict[str, Any] = {
        "predicted_bubble_s": 0.0,
        "predicted_cost_s": 0.2,
        "faults_per_s": 1e-3,
    }  # due from 20 s on
    assert Adaptive().decide(at(0, None, **short, at_risk_s=0.0, setup_s=60.0)).forced
    assert not Adaptive().decide(at(1, 0, **short, at_risk_s=0.0, setup_s=60.0)).checkpoint
    assert not Adaptive().decide(at(0, None, predicted_bubble_s=9.0, at_risk_s=0.0, setup_s=0.0)).checkpoint


@pytest.mark.parametrize(
    "field", ["at_risk_s", "setup_s", "predicted_bubble_s", "predicted_cost_s", "faults_per_s"]
)
@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_a_moment_takes_no_time_below_zero(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        at(**{field: wrong})


@given(
    st.builds(
        Moment,
        step=st.integers(0, 100),
        last_checkpoint_step=st.none() | st.just(0),
        at_risk_s=SECONDS,
        setup_s=SECONDS,
        is_unchanged=st.none() | st.booleans(),
        predicted_bubble_s=SECONDS,
        predicted_cost_s=SECONDS,
        faults_per_s=SECONDS,
    )
)
def test_adaptive_always_decides_with_a_reason(moment: Moment) -> None:
    decision = Adaptive().decide(moment)
    assert decision.reason
    assert decision.checkpoint or not decision.forced


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e3))
def test_more_work_at_risk_never_turns_a_checkpoint_down(less: float, more: float, cost: float) -> None:
    less, more = sorted((less, more))
    short: dict[str, Any] = {"predicted_bubble_s": 0.0, "predicted_cost_s": cost}
    assert (
        Adaptive().decide(at(**short, at_risk_s=less)).checkpoint
        <= Adaptive().decide(at(**short, at_risk_s=more)).checkpoint
    )


def test_in_bubbles_of_a_model_nearly_every_checkpoint_is_hidden_and_the_risk_is_bounded() -> None:
    """LLM waits from a log-normal of median 4 s, steps of about 0.6 s, checkpoints of 0.1 to 0.4 s."""
    chance = random.Random(7)
    policy, bubbles = Adaptive(), BubblePredictor()
    last, at_risk_s, step_s = None, 0.0, 0.0
    taken = hidden = 0
    rate = 1e-3
    for step in range(2000):
        cost = chance.uniform(0.1, 0.4)
        moment = Moment(
            step=step,
            last_checkpoint_step=last,
            at_risk_s=at_risk_s,
            predicted_bubble_s=bubbles.predict(policy.quantile),
            predicted_cost_s=0.25,
            faults_per_s=rate,
        )
        assert at_risk_s <= policy.interval_s(moment) + step_s
        bubble = chance.lognormvariate(math.log(4), 1.0)
        if policy.decide(moment).checkpoint:
            taken += 1
            hidden += cost <= bubble
            last, at_risk_s = step, 0.0
        bubbles.observe(bubble)
        step_s = chance.lognormvariate(math.log(0.6), 1.0)
        at_risk_s += step_s
    assert taken > 1900
    assert hidden / taken >= 0.95


def test_where_the_model_answers_at_once_the_risk_stays_bounded() -> None:
    chance = random.Random(7)
    policy, bubbles = Adaptive(faults_per_s=1e-3), BubblePredictor()
    at_risk_s, forced = 0.0, 0
    for step in range(2000):
        moment = at(step + 1, 0, at_risk_s=at_risk_s, predicted_bubble_s=bubbles.predict(policy.quantile))
        decision = policy.decide(moment)
        assert decision.checkpoint == decision.forced
        assert at_risk_s <= policy.interval_s(moment) + 1.0
        if decision.forced:
            forced += 1
            at_risk_s = 0.0
        bubbles.observe(chance.uniform(0.0, 0.1))
        at_risk_s += 1.0
    assert 90 <= forced <= 100  # every sqrt(2 * 0.2 / 1e-3) = 20 s
