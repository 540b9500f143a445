"""Cases that users of such systems reported: a budget asked for again, a busy worker declared dead, a version
stamped at the end, ids rebuilt from text."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.errors import RequestRejected, UpdateFailed, WorkerBusy
from belayer_rollout.types import ModelInfo, SamplingParams
from tests.rollout.byte_tokenizer import ByteTokenizer
from tests.rollout.scripted import EOS, UNTOLD, Fault, ScriptedWorker, bits, undisturbed
from tests.rollout.test_client import PROMPT, assert_undisturbed, generate
from tests.rollout.virtual import run_virtual

P64 = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)

# C01: a resumed request gets the whole budget again


def test_the_continuation_asks_for_the_rest_only() -> None:
    second = ScriptedWorker("w1")
    generation = run_virtual(generate(ScriptedWorker("w0", deque([Fault("die", 40)])), second))
    (request,) = second.requests
    assert request.params.max_tokens == 24
    assert len(request.token_ids) == len(PROMPT) + 40
    assert (len(generation.token_ids), generation.finish_reason) == (64, "length")


@pytest.mark.parametrize("max_model_len", [None, len(PROMPT) + 64])
def test_death_after_the_last_token_sends_no_request_for_nothing(max_model_len: int | None) -> None:
    info = ModelInfo(eos_token_ids=(EOS,), max_model_len=max_model_len)
    second = ScriptedWorker("w1", info=info)
    generation = run_virtual(generate(ScriptedWorker("w0", deque([Fault(UNTOLD)]), info=info), second))
    assert second.requests == []
    assert_undisturbed(generation, P64)
    assert generation.finish_reason == "length"


def test_a_full_context_ends_a_request_before_its_budget_does() -> None:
    info = ModelInfo(eos_token_ids=(EOS,), max_model_len=len(PROMPT) + 50)
    first, second = (
        ScriptedWorker("w0", deque([Fault("die", 30)]), info=info),
        ScriptedWorker("w1", info=info),
    )
    generation = run_virtual(generate(first, second))
    assert_undisturbed(generation, P64, limit=len(PROMPT) + 50)
    assert (len(generation.token_ids), second.requests[0].params.max_tokens) == (50, 20)


@pytest.mark.parametrize("stop_at", [45, 55])
def test_min_tokens_shrinks_and_a_stop_token_counts_only_beyond_it(stop_at: int) -> None:
    stop = undisturbed(PROMPT, P64).token_ids[stop_at]
    params = SamplingParams(max_tokens=64, min_tokens=50, seed=1, ignore_eos=True, stop_token_ids=(stop,))
    second = ScriptedWorker("w1")
    # Honest engines mask stop tokens by how many tokens *this attempt* has given: 10 more are left.
    generation = run_virtual(generate(ScriptedWorker("w0", deque([Fault("die", 40)])), second, params=params))
    assert second.requests[0].params.min_tokens == 10
    assert_undisturbed(generation, params)


@pytest.mark.parametrize("is_eos", [True, False])
def test_death_between_the_stop_and_its_event_ends_the_request(is_eos: bool) -> None:
    tokens = undisturbed(PROMPT, P64).token_ids
    params = (
        SamplingParams(max_tokens=4000, seed=1)
        if is_eos
        else SamplingParams(max_tokens=64, seed=1, ignore_eos=True, stop_token_ids=(tokens[44],))
    )
    second = ScriptedWorker("w1")
    generation = run_virtual(generate(ScriptedWorker("w0", deque([Fault(UNTOLD)])), second, params=params))
    assert second.requests == []
    assert_undisturbed(generation, params)
    assert generation.finish_reason == "stop"


def test_a_400_of_a_continuation_is_not_retried() -> None:
    first = ScriptedWorker("w0", deque([Fault("die", 40)]))
    second = ScriptedWorker("w1", deque([Fault("reject")]))
    with pytest.raises(RequestRejected):
        run_virtual(generate(first, second))
    assert (len(first.requests), len(second.requests)) == (1, 1)


# C04: busy, not dead


def queueing(name: str = "w0", **options: Any) -> ScriptedWorker:
    return ScriptedWorker(name, health_s=15.0, first_s=60.0, gap_s=2.0, **options)


def test_a_queue_is_no_stall_and_each_request_is_sent_once() -> None:
    async def story() -> None:
        worker, params = queueing(), SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        async with RolloutClient([worker]) as client:
            generations = await asyncio.gather(
                *(client.generate([i + 1], params, session=f"s{i}") for i in range(1000))
            )
            assert sum(generation.failovers for generation in generations) == 0
            assert len(worker.requests) == 1000
            assert worker.probes >= 1
            assert client.status().workers[0].breaker == "closed"
        for generation in generations:
            assert_undisturbed(generation, params)

    run_virtual(story())


def test_health_that_refuses_under_load_is_an_answer() -> None:
    class Refusing(ScriptedWorker):
        async def health(self) -> None:
            await super().health()
            raise WorkerBusy("429", worker=self.name)

    generation = run_virtual(generate(Refusing(first_s=90.0)))
    assert (generation.failovers, len(generation.token_ids)) == (0, 64)


@pytest.mark.parametrize("how", ["kill", "hang"])
@pytest.mark.parametrize("when", [50.0, 63.0])
def test_a_real_death_under_the_same_load_is_found(how: str, when: float) -> None:
    async def story() -> None:
        worker, peer = queueing("w0"), ScriptedWorker("w1")
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        async with RolloutClient([worker, peer]) as client:
            running = [
                asyncio.create_task(client.generate([i + 1], params, session=f"s{i}")) for i in range(200)
            ]
            await asyncio.sleep(when)
            if how == "kill":
                worker.kill()
            else:
                worker.hang(100_000.0)
            before = asyncio.get_running_loop().time()
            generations = await asyncio.gather(*running)
            assert asyncio.get_running_loop().time() - before < 120
        for generation in generations:
            assert_undisturbed(generation, params)
        assert sum(generation.failovers for generation in generations) == 100

    run_virtual(story())


def test_a_preempted_stream_is_no_hang_while_others_move() -> None:
    """The engine takes one request out of its batch for a long while."""

    async def story() -> None:
        worker = ScriptedWorker(gap_s=0.1)
        params = SamplingParams(max_tokens=2000, seed=1, ignore_eos=True)
        async with RolloutClient([worker]) as client:
            running = [asyncio.create_task(client.generate([i + 1], params)) for i in range(3)]
            await asyncio.sleep(5)
            worker.faults.append(Fault("stuck stream", 5))
            preempted = asyncio.create_task(client.generate([9], params))
            await asyncio.gather(*running)
            assert not preempted.done()
            assert client.status().workers[0].faults == {}
            assert worker.probes == 0
            # Nothing else moves any more and health is fine: only that stream is lost, after `lost_s`.
            generation = await preempted
            assert generation.failovers == 1
            assert_undisturbed(generation, params)

    run_virtual(story())


def test_a_request_that_was_dropped_before_its_first_token_is_sent_again_in_the_end() -> None:
    worker = ScriptedWorker("w", deque([Fault("stuck stream", 0)]))
    generation = run_virtual(generate(worker))
    assert_undisturbed(generation, P64)
    assert (generation.failovers, len(worker.requests)) == (1, 2)


# C06: version stamped at the end instead of the start


@pytest.mark.parametrize("chunk", [1, 20])
def test_each_token_has_the_version_that_it_was_drawn_under(chunk: int) -> None:
    worker = ScriptedWorker("w", chunk=chunk, version=3, version_after={20: 4})
    params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
    generation = run_virtual(generate(worker, params=params))
    assert generation.segments == ((0, 20, "w", 3), (20, 50, "w", 4))
    assert_undisturbed(generation, params)


def test_a_failed_update_changes_no_version() -> None:
    async def story() -> None:
        worker = ScriptedWorker("w", update_fault=UpdateFailed("checksum", version=3))
        params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
        async with RolloutClient([worker]) as client:
            running = asyncio.create_task(client.generate(PROMPT, params))
            await asyncio.sleep(0.2)
            with pytest.raises(UpdateFailed) as failure:
                await client.update_weights(4, Path("/weights"))
            assert failure.value.version == 3
            generation = await running
            assert generation.segments == ((0, 50, "w", 3),)
            assert (await client.generate(PROMPT, params)).segments == ((0, 50, "w", 3),)

    run_virtual(story())


# C07: decode and encode again

EMOJI = "🙂".encode()


def test_ids_are_what_was_emitted_and_go_out_as_ids() -> None:
    """Ids that no tokenizer would choose, and a death between two bytes of one character."""
    odd = [ord("w"), *b"or", ord("d"), *EMOJI, 258, 300, 300]
    made = [(token, -0.25 * index) for index, token in enumerate(odd)]
    made[2] = (made[2][0], -math.inf)
    made[9] = (made[9][0], math.nan)
    cut = 4 + 2
    first = ScriptedWorker("w0", deque([Fault("die", cut)]), tokens=made)
    second = ScriptedWorker("w1", tokens=made)
    params = SamplingParams(max_tokens=len(odd), seed=1, ignore_eos=True)
    generation = run_virtual(generate(first, second, params=params))
    assert generation.token_ids == tuple(odd)
    assert bits(generation.logprobs) == bits([logprob for _, logprob in made])
    assert second.requests[0].token_ids == [*PROMPT, *odd[:cut]]


def test_the_tokens_of_a_stop_string_stay_at_the_end() -> None:
    text = "say 🙂 END and on".encode()
    made = [(byte, -float(index)) for index, byte in enumerate(text)]
    cut = text.index(b"END") + 1
    first = ScriptedWorker("w0", deque([Fault("die", cut)]), tokens=made)
    second = ScriptedWorker("w1", tokens=made)
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True, stop=("END",))
    generation = run_virtual(generate(first, second, params=params, tokenizer=ByteTokenizer()))
    assert bytes(generation.token_ids) == text[: cut + 2]
    assert len(generation.logprobs) == len(generation.token_ids)
    assert (generation.finish_reason, generation.stop_reason) == ("stop", "END")
    assert second.aborted == [second.requests[0].request_id]
    assert all(request.params.stop == () for request in first.requests + second.requests)


def test_a_worker_without_logprobs_gives_a_fault_and_no_zeros() -> None:
    peer = ScriptedWorker("w1")
    generation = run_virtual(generate(ScriptedWorker("w0", deque([Fault("no logprobs", 0)])), peer))
    assert_undisturbed(generation, P64)
    assert generation.failovers == 1
