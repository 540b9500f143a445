from __future__ import annotations

from dataclasses import dataclass

import pytest

from belayer_env.errors import InvalidInput
from belayer_env.policy import CheckpointPolicy, EveryN, EveryStep, Moment, Never, parse_policy


def due_steps(policy: CheckpointPolicy, num_steps: int) -> list[int]:
    last, due = None, []
    for step in range(num_steps + 1):
        if policy.is_due(Moment(step=step, last_checkpoint_step=last)):
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
    assert not EveryN(3).is_due(Moment(step=5, last_checkpoint_step=3))
    assert EveryN(3).is_due(Moment(step=6, last_checkpoint_step=3))
    assert not EveryStep().is_due(Moment(step=5, last_checkpoint_step=5))


@dataclass
class AtRisk:
    def is_due(self, moment: Moment) -> bool:
        return moment.at_risk_s > 10


def test_an_object_of_the_users_is_taken_as_it_is() -> None:
    policy = AtRisk()
    assert parse_policy(policy) is policy


@pytest.mark.parametrize(
    "wrong",
    ["", "every", "every-0", "every--1", "every-1.5", "every-٣", "Never", "every-5 ", None, 5, AtRisk],
)
def test_anything_else_is_answered_with_the_right_forms(wrong: object) -> None:
    with pytest.raises(InvalidInput, match=r'"never", "every-step", "every-N"'):
        parse_policy(wrong)  # type: ignore[arg-type]


def test_adaptive_is_said_to_be_missing() -> None:
    with pytest.raises(InvalidInput, match="no adaptive policy yet"):
        parse_policy("adaptive")


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_every_n_counts_whole_steps(n: int) -> None:
    with pytest.raises(InvalidInput):
        EveryN(n)
