"""What is left of a request is decided from its tokens alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_rollout.continuation import Done, continuation, seed_at
from belayer_rollout.types import MOST_SEED, EngineRequest, ModelInfo, SamplingParams

PROMPT = [5, 6, 7]
EOS = ModelInfo(eos_token_ids=(2, 3))


def rest(
    params: SamplingParams, tokens: list[int], info: ModelInfo = EOS, prompt: list[int] = PROMPT
) -> Done | EngineRequest:
    return continuation("a", prompt, params, info, tokens)


def test_a_fresh_request_goes_out_as_it_was_asked_without_its_stop_strings() -> None:
    params = SamplingParams(max_tokens=64, min_tokens=3, seed=9, stop=("x",), stop_token_ids=(4,), top_p=0.5)
    request = rest(params, [])
    assert isinstance(request, EngineRequest)
    assert (request.request_id, list(request.token_ids), request.position) == ("a", PROMPT, 0)
    assert request.params == SamplingParams(
        max_tokens=64, min_tokens=3, seed=9, stop_token_ids=(4,), top_p=0.5
    )


@pytest.mark.parametrize(
    ("made", "max_tokens", "min_tokens"), [(40, 24, 10), (50, 14, 0), (60, 4, 0), (63, 1, 0)]
)
def test_budgets_shrink(made: int, max_tokens: int, min_tokens: int) -> None:
    request = rest(SamplingParams(max_tokens=64, min_tokens=50), [9] * made)
    assert isinstance(request, EngineRequest)
    assert (request.params.max_tokens, request.params.min_tokens) == (max_tokens, min_tokens)
    assert (request.position, list(request.token_ids)) == (made, [*PROMPT, *[9] * made])


def test_a_length_that_is_reached_needs_no_request() -> None:
    assert rest(SamplingParams(max_tokens=4), [9] * 4) == Done("length")
    full = ModelInfo(max_model_len=len(PROMPT) + 4)
    assert rest(SamplingParams(max_tokens=99), [9] * 4, full) == Done("length")
    last = rest(SamplingParams(max_tokens=99, min_tokens=50), [9] * 3, full)
    assert isinstance(last, EngineRequest)
    assert (last.params.max_tokens, last.params.min_tokens) == (1, 1)


def test_a_prompt_without_room_is_for_the_engine_to_refuse() -> None:
    request = rest(SamplingParams(max_tokens=9), [], ModelInfo(max_model_len=len(PROMPT)))
    assert isinstance(request, EngineRequest)
    assert request.params.max_tokens == 9


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        (SamplingParams(max_tokens=9), [9, 2], Done("stop")),
        (SamplingParams(max_tokens=9), [9, 3], Done("stop")),
        (SamplingParams(max_tokens=9, ignore_eos=True), [9, 2], None),
        (SamplingParams(max_tokens=9, min_tokens=2), [9, 2], None),
        (SamplingParams(max_tokens=9, min_tokens=1), [9, 2], Done("stop")),
        (SamplingParams(max_tokens=9), [2, 9], None),
        (SamplingParams(max_tokens=9, stop_token_ids=(8,)), [9, 8], Done("stop", 8)),
        (SamplingParams(max_tokens=9, stop_token_ids=(8,), min_tokens=2), [9, 8], None),
        (SamplingParams(max_tokens=9, stop_token_ids=(2,)), [9, 2], Done("stop")),
        (SamplingParams(max_tokens=9, stop_token_ids=(2,), ignore_eos=True), [9, 2], Done("stop", 2)),
        (SamplingParams(max_tokens=2), [9, 2], Done("stop")),
        (SamplingParams(max_tokens=2, stop_token_ids=(8,)), [9, 8], Done("stop", 8)),
    ],
)
def test_the_last_token_may_have_ended_it(
    params: SamplingParams, tokens: list[int], expected: Done | None
) -> None:
    found = rest(params, tokens)
    assert found == expected if expected else isinstance(found, EngineRequest)


@given(
    max_tokens=st.integers(1, 50),
    min_tokens=st.integers(0, 50),
    tokens=st.lists(st.integers(0, 9), max_size=60),
    room=st.none() | st.integers(1, 70),
)
def test_no_request_for_nothing_and_never_more_than_is_left(
    max_tokens: int, min_tokens: int, tokens: list[int], room: int | None
) -> None:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    found = rest(params, tokens, ModelInfo(max_model_len=room, eos_token_ids=(2,)))
    if isinstance(found, EngineRequest):
        assert 1 <= found.params.max_tokens <= max_tokens - len(tokens)
        assert found.params.min_tokens == min(
            max(0, params.min_tokens - len(tokens)), found.params.max_tokens
        )
        if room is not None and (tokens or room > len(PROMPT)):
            assert len(found.token_ids) + found.params.max_tokens <= room


def test_an_exact_resume_keeps_its_seed_and_another_gets_one_for_each_position() -> None:
    exact = rest(SamplingParams(max_tokens=9, seed=7, exact_resume=True), [9])
    assert isinstance(exact, EngineRequest)
    assert exact.params.seed == 7
    seeds = [seed_at(7, position) for position in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [seed_at(7, position) for position in range(100)]
    assert all(seed is not None and 0 <= seed <= MOST_SEED for seed in seeds)
    assert seed_at(None, 3) is None
