"""The scripted engine's tokens and faults: what other tests and the bench rely on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_rollout.bench.scripted_model import STOP_TOKEN, TokenSource
from belayer_rollout.bench.scripted_script import Fault, Faults, Settings

ids = st.lists(st.integers(0, 999), min_size=1, max_size=20)


def take(source: TokenSource, num: int) -> list[tuple[int, float]]:
    return [source.next(True) for _ in range(num)]


@given(ids, st.integers(0, 10), st.sampled_from([None, 0, 7]))
def test_a_continuation_gives_what_would_have_come(prompt: list[int], cut: int, seed: int | None) -> None:
    whole = take(TokenSource(prompt, seed=seed), 10)
    begun = prompt + [token for token, _ in whole[:cut]]
    assert take(TokenSource(begun, seed=seed, draw=cut), 10 - cut) == whole[cut:]


def test_seeds_draws_and_prompts_make_a_difference() -> None:
    sources: list[Callable[[], TokenSource]] = [
        lambda: TokenSource([1, 2]),
        lambda: TokenSource([2, 1]),
        lambda: TokenSource([1, 2], seed=1),
        lambda: TokenSource([1, 2], seed=2),
        lambda: TokenSource([1, 2], seed=2, draw=1),
    ]
    assert len({tuple(take(make(), 8)) for make in sources}) == len(sources)


def test_the_end_of_sequence_stands_at_its_place_unless_it_may_not() -> None:
    tokens = [token for token, _ in take(TokenSource([5, 5], stop_at=4), 4)]
    assert [token == STOP_TOKEN for token in tokens] == [False, False, True, False]
    source = TokenSource([5, 5], stop_at=2)
    assert source.next(False)[0] != STOP_TOKEN


def test_logprobs_are_logs_of_probabilities() -> None:
    assert all(-20 < logprob < 0 for _, logprob in take(TokenSource([1]), 200))


def test_a_fault_happens_as_often_as_it_is_scripted() -> None:
    faults = Faults([Fault(kind="reset", after=3, times=2), Fault(kind="status", times=-1)])
    assert faults.due(2, 100) is None
    assert not faults.is_due(2, 100)
    assert [faults.due(3, 3) is not None for _ in range(3)] == [True, True, False]
    assert all(faults.refusal() is not None for _ in range(5))


def test_a_fault_may_count_all_requests() -> None:
    faults = Faults([Fault(kind="die", after=10, of_all=True)])
    assert faults.due(10, 9) is None
    assert faults.due(1, 10) is not None


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="pase_s"):
        Settings().update({"pase_s": 1})
    with pytest.raises(ValueError, match="kind must be one of"):
        Settings().update({"faults": [{"kind": "explode"}]})
