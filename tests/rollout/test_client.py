"""The client over scripted workers: what it gives, what it refuses, what it survives."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.drive import Budget
from belayer_rollout.errors import (
    ClientClosed,
    InvalidRequest,
    JournalFault,
    RequestCancelled,
    RequestFailed,
    RequestRejected,
    SetupError,
    UnknownRequest,
    WorkerGone,
)
from belayer_rollout.journal_base import MemoryJournal
from belayer_rollout.types import Generation, ModelInfo, SamplingParams, TokenChunk
from tests.rollout.scripted import EOS, Fault, ScriptedWorker, bits, undisturbed
from tests.rollout.virtual import run_virtual, until

PROMPT = (11, 12, 13)
P64 = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)


def assert_undisturbed(generation: Generation, params: SamplingParams, **model: Any) -> None:
    expected = undisturbed(generation.prompt_token_ids, params, **model)
    assert generation.token_ids == expected.token_ids
    assert bits(generation.logprobs) == bits(expected.logprobs)
    assert (generation.finish_reason, generation.stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )
    spans = [(segment.start, segment.stop) for segment in generation.segments]
    assert [start for start, _ in spans] == [0, *[stop for _, stop in spans]][: len(spans)]
    assert spans[-1][1] == len(generation.token_ids)


async def generate(*workers: ScriptedWorker, params: SamplingParams = P64, **options: Any) -> Generation:
    async with RolloutClient(workers, **options) as client:
        return await client.generate(PROMPT, params, session="s")


def test_a_generation_is_what_the_engine_gave() -> None:
    generation = run_virtual(generate(ScriptedWorker()))
    assert_undisturbed(generation, P64)
    assert generation.segments == ((0, 64, "w0", 3),)
    assert generation.failovers == 0


def test_an_end_of_sequence_and_a_stop_token_end_it() -> None:
    free = SamplingParams(max_tokens=4000, seed=1)
    assert_undisturbed(run_virtual(generate(ScriptedWorker(), params=free)), free)
    tokens = undisturbed(PROMPT, P64).token_ids
    stopped = SamplingParams(
        max_tokens=64, seed=1, ignore_eos=True, min_tokens=5, stop_token_ids=(tokens[20],)
    )
    generation = run_virtual(generate(ScriptedWorker(), params=stopped))
    assert_undisturbed(generation, stopped)
    assert generation.stop_reason == tokens[20]


@pytest.mark.parametrize(
    "kind",
    [
        "die",
        "end early",
        "hang",
        "stuck stream",
        "no logprobs",
        "no ids",
        "duplicate",
        "skip",
        "too many",
        "abort",
    ],
)
@pytest.mark.parametrize("chunk", [1, 7])
def test_a_broken_worker_is_left_and_its_tokens_are_kept(kind: Any, chunk: int) -> None:
    broken = ScriptedWorker("w0", deque([Fault(kind, 21)]), chunk=chunk)
    peer = ScriptedWorker("w1", chunk=chunk)
    generation = run_virtual(generate(broken, peer))
    assert_undisturbed(generation, P64)
    assert generation.failovers == 1
    assert generation.segments == ((0, 21, "w0", 3), (21, 64, "w1", 3))
    (rest,) = peer.requests
    assert rest.token_ids == [*PROMPT, *generation.token_ids[:21]]
    assert (rest.position, rest.params.max_tokens) == (21, 43)


def test_a_fault_before_any_token_and_many_faults_in_a_row_are_survived() -> None:
    faults: deque[Fault | None] = deque(
        [Fault("die", 0), *[Fault("die", 2)] * 20, Fault("die", 0), Fault("duplicate", 1)]
    )
    only = ScriptedWorker("w0", faults)
    generation = run_virtual(generate(only))
    assert_undisturbed(generation, P64)
    assert generation.failovers == 23
    assert generation.segments == ((0, 64, "w0", 3),)


def test_a_dead_worker_gets_nothing_until_its_trial_passes() -> None:
    async def story() -> None:
        first, second = ScriptedWorker("w0"), ScriptedWorker("w1")
        async with RolloutClient([first, second]) as client:
            await client.generate(PROMPT, P64, session="a")
            home = first if first.requests else second
            other = second if home is first else first
            home.kill()
            generation = await client.generate(PROMPT, P64, session="a")
            assert generation.segments[0].worker == other.name
            sent = len(home.requests)
            for _ in range(5):
                await client.generate(PROMPT, P64, session="b")
                await client.generate(PROMPT, P64, session="c")
            assert len(home.requests) == sent
            home.revive()
            await until(lambda: all(worker.breaker == "closed" for worker in client.status().workers))
            assert home.probes >= 1
            await asyncio.gather(*(client.generate(PROMPT, P64, session=f"n{i}") for i in range(4)))
            assert len(home.requests) > sent

    run_virtual(story())


def test_a_session_stays_with_its_worker_and_load_is_spread() -> None:
    async def story() -> None:
        workers = [ScriptedWorker(f"w{i}") for i in range(3)]
        async with RolloutClient(workers) as client:
            for _ in range(4):
                await asyncio.gather(
                    *(client.generate([i + 1], P64, session=f"s{i}") for i in range(9)),
                )
        assert [len(worker.requests) for worker in workers] == [12, 12, 12]
        for worker in workers:
            homes = Counter(request.token_ids[0] for request in worker.requests)
            assert set(homes.values()) == {4}

    run_virtual(story())


def test_a_pair_that_recovers_itself_keeps_its_requests() -> None:
    pair = ScriptedWorker("pair", deque([Fault("die", 10)]), recovers_itself=True)
    peer = ScriptedWorker("peer")

    async def story() -> Generation:
        async with RolloutClient([pair, peer]) as client:
            generation = await client.generate(PROMPT, P64)
            assert client.status().workers[0].breaker == "closed"
            assert client.status().workers[0].faults == {"WorkerGone": 1}
            return generation

    generation = run_virtual(story())
    assert_undisturbed(generation, P64)
    assert (len(pair.requests), len(peer.requests), generation.failovers) == (2, 0, 1)


def test_a_pair_that_does_not_recover_is_left_to_a_peer() -> None:
    pair = ScriptedWorker("pair", deque([Fault("die", 10), *[Fault("die", 0)] * 5]), recovers_itself=True)
    peer = ScriptedWorker("peer")
    generation = run_virtual(generate(pair, peer))
    assert_undisturbed(generation, P64)
    assert (len(pair.requests), len(peer.requests)) == (3, 1)


def test_a_busy_worker_is_asked_again_and_that_is_no_failover() -> None:
    async def story() -> None:
        worker = ScriptedWorker("w0", deque([Fault("busy", retry_after_s=40.0), Fault("busy"), None]))
        async with RolloutClient([worker]) as client:
            before = asyncio.get_running_loop().time()
            generation = await client.generate(PROMPT, P64)
            assert asyncio.get_running_loop().time() - before >= 40.0
            assert client.status().workers[0].breaker == "closed"
        assert_undisturbed(generation, P64)
        assert (generation.failovers, len(worker.requests)) == (0, 3)

    run_virtual(story())


def test_a_busy_worker_is_passed_over_for_one_that_is_not() -> None:
    busy = ScriptedWorker("w0", deque([Fault("busy", retry_after_s=1000.0)] * 9))
    peer = ScriptedWorker("w1")
    generation = run_virtual(generate(busy, peer))
    assert (len(busy.requests), len(peer.requests), generation.failovers) == (1, 1, 0)


def test_what_an_engine_rejects_is_never_sent_again() -> None:
    worker, peer = ScriptedWorker("w0", deque([Fault("reject")])), ScriptedWorker("w1")
    with pytest.raises(RequestRejected):
        run_virtual(generate(worker, peer))
    assert len(worker.requests) + len(peer.requests) == 1


def test_a_budget_of_attempts_ends_and_the_request_can_be_resumed() -> None:
    async def story() -> None:
        worker = ScriptedWorker("w0", deque([Fault("die", 9), *[Fault("die", 0)] * 3]))
        async with RolloutClient([worker], journal=MemoryJournal(), budget=Budget(attempts=3)) as client:
            with pytest.raises(RequestFailed) as failure:
                await client.generate(PROMPT, P64, request_id="r")
            assert failure.value.request_id == "r"
            assert failure.value.tried == ("w0",) * 4
            assert isinstance(failure.value.__cause__, WorkerGone)
            generation = await client.resume("r")
        assert_undisturbed(generation, P64)
        assert worker.requests[-1].position == 9

    run_virtual(story())


def test_a_budget_of_seconds_ends_when_no_worker_comes_back() -> None:
    async def story() -> None:
        worker = ScriptedWorker("w0")
        async with RolloutClient([worker], budget=Budget(seconds=50)) as client:
            worker.kill()
            with pytest.raises(RequestFailed, match="no worker is fit"):
                await client.generate(PROMPT, P64)

    run_virtual(story())


def test_misuse_is_refused_before_anything_is_sent() -> None:
    async def story() -> None:
        worker = ScriptedWorker("w0", supports_exact_resume=False)
        async with RolloutClient([worker]) as client:
            for prompt, params in [
                ((), P64),
                ((-1,), P64),
                (("a",), P64),
                (PROMPT, SamplingParams(stop=("x",))),
                (PROMPT, SamplingParams(exact_resume=True)),
            ]:
                with pytest.raises(InvalidRequest):
                    await client.generate(prompt, params)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest):
                await client.generate(PROMPT, P64, on_version_change="ignore")  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest):
                client.stream(PROMPT, P64, on_version_change="restart")
            with pytest.raises(UnknownRequest):
                await client.resume("never seen")
        assert worker.requests == []

    run_virtual(story())
    for workers in ([], [ScriptedWorker("a"), ScriptedWorker("a")]):
        with pytest.raises(InvalidRequest):
            RolloutClient(workers)


def test_an_id_in_flight_is_refused_and_a_finished_one_forgotten_without_a_journal() -> None:
    async def story() -> None:
        async with RolloutClient([ScriptedWorker()]) as client:
            first = asyncio.create_task(client.generate(PROMPT, P64, request_id="r"))
            await asyncio.sleep(0.1)
            with pytest.raises(InvalidRequest, match="in flight"):
                await client.generate(PROMPT, P64, request_id="r")
            assert await client.resume("r") is await first
            with pytest.raises(UnknownRequest):
                await client.resume("r")

    run_virtual(story())


def test_cancel_reaches_the_worker() -> None:
    async def story() -> None:
        worker, journal = ScriptedWorker(), MemoryJournal(keep_finished=True)
        async with RolloutClient([worker], journal=journal) as client:
            waiting = asyncio.create_task(client.generate(PROMPT, P64, request_id="r"))
            await asyncio.sleep(0.2)
            assert await client.cancel("r")
            with pytest.raises(RequestCancelled):
                await waiting
            assert worker.aborted == worker.put_down == [worker.requests[0].request_id]
            assert 0 < worker.given < 64
            assert (await client.resume("r")).finish_reason == "abort"
            assert not await client.cancel("r")
            assert client.status().in_flight == client.status().workers[0].load == 0

    run_virtual(story())


def test_cancelling_the_awaiting_task_reaches_the_worker_and_keeps_the_tokens() -> None:
    async def story() -> None:
        worker = ScriptedWorker()
        async with RolloutClient([worker], journal=MemoryJournal()) as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.generate(PROMPT, P64, request_id="r")
            await until(lambda: worker.aborted != [])
            assert worker.put_down == worker.aborted
            assert_undisturbed(await client.resume("r"), P64)
            assert worker.requests[1].position > 0

    run_virtual(story())


def test_a_cancelled_request_whose_id_nobody_knows_is_not_kept() -> None:
    class Telling(MemoryJournal):
        """Tells how each request ended."""

        def __init__(self) -> None:
            super().__init__()
            self.ended: list[tuple[str, int]] = []

        async def finish(self, request_id: str, finish_reason: Any, stop_reason: Any, length: int) -> None:
            self.ended.append((finish_reason, length))
            await super().finish(request_id, finish_reason, stop_reason, length)

    async def story() -> None:
        journal = Telling()
        async with RolloutClient([ScriptedWorker()], journal=journal) as client:
            for request_id in (None, "known"):
                task = asyncio.create_task(client.generate(PROMPT, P64, request_id=request_id))
                await asyncio.sleep(0.2)
                task.cancel()
                await asyncio.wait([task])
            await until(lambda: journal.ended != [])
            ((reason, length),) = journal.ended
            assert reason == "abort"
            assert 0 < length < 64
            assert_undisturbed(await client.resume("known"), P64)

    run_virtual(story())


def test_whoever_joins_a_request_hears_that_it_was_cancelled() -> None:
    async def story() -> None:
        async with RolloutClient([ScriptedWorker()]) as client:
            first = asyncio.create_task(client.generate(PROMPT, P64, request_id="r"))
            await asyncio.sleep(0.1)
            joined = asyncio.create_task(client.resume("r"))
            impatient = asyncio.create_task(client.resume("r"))
            await asyncio.sleep(0.1)
            impatient.cancel()
            await asyncio.wait([impatient])
            assert impatient.cancelled()
            assert not first.done()
            first.cancel()
            with pytest.raises(RequestCancelled):
                await joined

    run_virtual(story())


def test_a_request_cancelled_while_it_waits_for_a_place_is_never_sent() -> None:
    async def story() -> None:
        worker = ScriptedWorker()
        async with RolloutClient([worker], max_in_flight=1) as client:
            first = asyncio.create_task(client.generate(PROMPT, P64))
            second = asyncio.create_task(client.generate(PROMPT, P64, request_id="second"))
            await asyncio.sleep(0.1)
            assert (client.status().in_flight, client.status().waiting) == (1, 1)
            assert await client.cancel("second")
            with pytest.raises(RequestCancelled):
                await second
            await first
            assert len(worker.requests) == 1

    run_virtual(story())


def test_max_in_flight_is_never_exceeded() -> None:
    async def story() -> None:
        worker = ScriptedWorker()
        most = 0
        async with RolloutClient([worker], max_in_flight=5) as client:
            tasks = [asyncio.create_task(client.generate([i + 1], P64)) for i in range(40)]
            while not all(task.done() for task in tasks):
                most = max(most, client.status().in_flight, client.status().workers[0].load)
                await asyncio.sleep(0.01)
        assert most == 5

    run_virtual(story())


def test_close_ends_what_runs_and_everything_it_owns() -> None:
    async def story() -> None:
        worker, shared = ScriptedWorker(), ScriptedWorker("shared")
        client = RolloutClient([worker])
        waiting = asyncio.create_task(client.generate(PROMPT, P64))
        await asyncio.sleep(0.1)
        await client.aclose()
        await client.close()
        with pytest.raises(ClientClosed):
            await waiting
        with pytest.raises(ClientClosed):
            await client.generate(PROMPT, P64)
        assert worker.is_closed
        async with RolloutClient([shared], owns_workers=False) as other:
            await other.generate(PROMPT, P64)
        assert not shared.is_closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(story())


def test_a_worker_that_does_not_start_is_tried_again_while_others_work() -> None:
    async def story() -> None:
        late = ScriptedWorker("w0", start_fault=WorkerGone("not yet", worker="w0"))
        async with RolloutClient([late, ScriptedWorker("w1")]) as client:
            await client.generate(PROMPT, P64)
            assert late.requests == []
            late.start_fault = None
            await until(lambda: client.status().workers[0].is_fit)
            assert late.starts >= 2

    run_virtual(story())


@pytest.mark.parametrize("fault", [WorkerGone("no"), SetupError("no GPU: get one")])
def test_a_client_without_a_worker_says_so_at_once(fault: Exception) -> None:
    async def story() -> None:
        client = RolloutClient([ScriptedWorker(start_fault=fault)])
        try:
            with pytest.raises(type(fault)):
                await client.generate(PROMPT, P64)
        finally:
            await client.aclose()

    run_virtual(story())


def test_the_seed_is_drawn_once_and_each_attempt_has_one_of_its_own() -> None:
    async def story() -> None:
        unseeded = SamplingParams(max_tokens=64, ignore_eos=True)
        worker = ScriptedWorker("w0", deque([Fault("die", 5)]))
        async with RolloutClient([worker]) as client:
            await client.generate(PROMPT, unseeded)
            await client.generate(PROMPT, SamplingParams(max_tokens=64, seed=5, exact_resume=True))
        seeds = [request.params.seed for request in worker.requests]
        assert None not in seeds
        assert seeds[0] != seeds[1]
        assert seeds[2] == 5

    run_virtual(story())


def test_a_journal_that_fails_ends_the_streams_and_nothing_more_is_handed_on() -> None:
    class Full(MemoryJournal):
        def append(self, request_id: str, start: int, chunk: Any) -> None:
            if start >= 10:
                raise JournalFault("no space left")
            super().append(request_id, start, chunk)

    async def read(chunks: AsyncIterator[TokenChunk], got: list[int]) -> None:
        async for chunk in chunks:
            got += chunk.token_ids

    async def story() -> None:
        worker = ScriptedWorker()
        got: list[int] = []
        async with RolloutClient([worker], journal=Full()) as client:
            with pytest.raises(JournalFault):
                await client.generate(PROMPT, P64)
            with pytest.raises(JournalFault):
                await read(client.stream(PROMPT, P64), got)
        assert tuple(got) == undisturbed(PROMPT, P64).token_ids[:10]
        assert len(worker.aborted) == 2

    run_virtual(story())


def test_metrics_and_status_tell_what_happened() -> None:
    async def story() -> None:
        workers = [ScriptedWorker("w0", deque([Fault("die", 9)])), ScriptedWorker("w1")]
        async with RolloutClient(workers) as client, RolloutClient([ScriptedWorker()]) as other:
            await client.generate(PROMPT, P64)
            await asyncio.sleep(1)
            value = client.metrics.registry.get_sample_value
            assert value("belayer_rollout_requests_total", {"outcome": "length"}) == 1
            assert value("belayer_rollout_failovers_total", {"cause": "WorkerGone"}) == 1
            assert value("belayer_rollout_tokens_total") == 64
            assert value("belayer_rollout_first_token_seconds_count") == 2
            assert value("belayer_rollout_failover_gap_seconds_count") == 1
            assert (value("belayer_rollout_token_gap_seconds_count") or 0) > 0
            assert value("belayer_rollout_in_flight") == 0
            assert value("belayer_rollout_breaker", {"worker": "w0"}) is not None
            assert other.metrics.registry.get_sample_value("belayer_rollout_tokens_total") == 0
            first, second = client.status().workers
            assert (first.sent, second.sent, first.faults) == (1, 1, {"WorkerGone": 1})
            assert second.gap_s == pytest.approx(0.01)

    run_virtual(story())


def test_a_bubble_is_predicted_from_pace_and_earlier_lengths() -> None:
    async def story() -> None:
        async with RolloutClient([ScriptedWorker(gap_s=0.5)]) as client:
            for _ in range(5):
                await client.generate(PROMPT, P64, session="s")
            assert client.hint_bubble("s") is None
            running = asyncio.create_task(
                client.generate(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True), session="s")
            )
            await asyncio.sleep(10.1)
            hint = client.hint_bubble("s")
            assert hint == pytest.approx(0.5 * (64 - 20), abs=0.6)
            running.cancel()
            await asyncio.wait([running])

    run_virtual(story())


def test_a_bubble_holds_what_is_left_of_the_queue() -> None:
    async def story() -> None:
        async with RolloutClient([ScriptedWorker(gap_s=0.5, first_s=20.0)]) as client:
            for _ in range(5):
                await client.generate(PROMPT, P64, session="s")
            longer = SamplingParams(max_tokens=70, ignore_eos=True)
            running = asyncio.create_task(client.generate(PROMPT, longer, session="s", request_id="r2"))
            await asyncio.sleep(5)
            assert client.hint_bubble("r2") == pytest.approx(15 + 0.5 * 64, abs=1.0)
            await running

    run_virtual(story())


def test_the_model_may_tell_nothing_of_itself() -> None:
    params = SamplingParams(max_tokens=4000, seed=1)
    workers = [
        ScriptedWorker("w0", deque([Fault("die", 3)]), info=ModelInfo()),
        ScriptedWorker("w1", info=ModelInfo()),
    ]
    generation = run_virtual(generate(*workers, params=params))
    assert_undisturbed(generation, params, eos=EOS)
