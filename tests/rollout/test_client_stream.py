"""Streams of the client: each token once, in order, after its commit, and no faster than they are read."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.errors import ClientClosed, JournalFault, RequestCancelled, RequestRejected
from belayer_rollout.journal_base import MemoryJournal
from belayer_rollout.outlet import Outlet
from belayer_rollout.types import FinishReason, SamplingParams, TokenChunk
from tests.rollout.scripted import Fault, ScriptedWorker, bits, undisturbed
from tests.rollout.virtual import run_virtual, until

PROMPT = (11, 12, 13)
P64 = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)


class SlowJournal(MemoryJournal):
    """Commits when it is told to; all appends until then share one future."""

    def __init__(self) -> None:
        super().__init__(keep_finished=True)
        self._batch: asyncio.Future[None] | None = None
        self.durable = 0
        self.appended = 0

    def append(self, request_id: str, start: int, chunk: TokenChunk) -> asyncio.Future[None]:  # type: ignore[override]
        super().append(request_id, start, chunk)
        self.appended += len(chunk.token_ids)
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
        return self._batch

    def commit(self, error: Exception | None = None) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if error is not None:
            batch.set_exception(error)
            batch.exception()
            return
        self.durable = self.appended
        batch.set_result(None)

    async def finish(
        self, request_id: str, finish_reason: FinishReason, stop_reason: int | str | None, length: int
    ) -> None:
        self.commit()
        await super().finish(request_id, finish_reason, stop_reason, length)


def test_chunks_come_once_in_order_with_their_logprobs_across_a_fault() -> None:
    async def story() -> list[TokenChunk]:
        workers = [ScriptedWorker("w0", deque([Fault("die", 21)])), ScriptedWorker("w1", chunk=5)]
        async with RolloutClient(workers) as client:
            return [chunk async for chunk in client.stream(PROMPT, P64)]

    chunks = run_virtual(story())
    expected = undisturbed(PROMPT, P64)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected.token_ids
    assert bits([p for chunk in chunks for p in chunk.logprobs]) == bits(expected.logprobs)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [chunk.worker for chunk in chunks] == ["w0"] * 21 + ["w1"] * (len(chunks) - 21)
    starts = [sum(len(one.token_ids) for one in chunks[:index]) for index in range(len(chunks))]
    assert [chunk.start for chunk in chunks] == starts


def test_a_token_is_handed_on_only_once_it_is_durable() -> None:
    async def story() -> None:
        journal, worker = SlowJournal(), ScriptedWorker()
        got: list[int] = []

        async def consume(client: RolloutClient) -> None:
            async for chunk in client.stream(PROMPT, P64):
                got.extend(chunk.token_ids)
                assert len(got) <= journal.durable

        async with RolloutClient([worker], journal=journal) as client:
            consumer = asyncio.create_task(consume(client))
            await until(lambda: journal.appended >= 10)
            assert got == []
            journal.commit()
            await until(lambda: len(got) >= 10)
            seen = len(got)
            await until(lambda: journal.appended >= 30)
            assert len(got) == seen
            await consumer
        assert tuple(got) == undisturbed(PROMPT, P64).token_ids

    run_virtual(story())


def test_a_commit_that_fails_hands_nothing_on_and_other_streams_hear_of_it() -> None:
    async def story() -> None:
        journal = SlowJournal()
        got: list[int] = []

        async def consume(client: RolloutClient, prompt: int) -> None:
            async for chunk in client.stream([prompt], P64):
                got.extend(chunk.token_ids)

        async with RolloutClient([ScriptedWorker()], journal=journal) as client:
            consumers = [asyncio.create_task(consume(client, index)) for index in range(3)]
            await until(lambda: journal.appended >= 9)
            journal.commit(JournalFault("the disk is gone"))
            outcomes = await asyncio.gather(*consumers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [JournalFault] * 3
        assert got == []

    run_virtual(story())


def test_a_consumer_that_is_cancelled_does_not_cancel_the_commit_of_others() -> None:
    async def story() -> None:
        journal, worker = SlowJournal(), ScriptedWorker()
        async with RolloutClient([worker], journal=journal) as client:
            first, second = client.stream([1], P64, request_id="a"), client.stream([2], P64, request_id="b")
            waiting = asyncio.ensure_future(anext(first))
            other = asyncio.ensure_future(anext(second))
            await until(lambda: journal.appended >= 8)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert not other.done()
            journal.commit()
            assert (await other).token_ids == undisturbed([2], P64).token_ids[:1]
            await second.aclose()
            await until(lambda: len(worker.aborted) == 2)

    run_virtual(story())


def test_a_slow_consumer_slows_its_own_stream_only_and_is_no_stall() -> None:
    async def story() -> None:
        worker = ScriptedWorker()
        params = SamplingParams(max_tokens=500, seed=1, ignore_eos=True)
        async with RolloutClient([worker], max_buffered_chunks=8) as client:
            chunks = client.stream([1], params, request_id="slow")
            got = list((await anext(chunks)).token_ids)
            quick = await client.generate([2], params)
            assert len(quick.token_ids) == 500
            assert worker.given <= 500 + 12
            await asyncio.sleep(1000)
            assert worker.probes == 0
            async for chunk in chunks:
                got += chunk.token_ids
                await asyncio.sleep(3)
            assert tuple(got) == undisturbed([1], params).token_ids
            assert client.status().workers[0].faults == {}

    run_virtual(story())


def test_leaving_a_stream_ends_it_at_the_worker() -> None:
    async def story() -> None:
        worker = ScriptedWorker()
        async with RolloutClient([worker]) as client:
            chunks = client.stream(PROMPT, P64)
            async for chunk in chunks:
                assert chunk.token_ids
                break
            await chunks.aclose()
            await until(lambda: worker.aborted == [worker.requests[0].request_id])
            assert worker.given < 64
            assert client.status().in_flight == 0

    run_virtual(story())


def test_errors_reach_the_consumer_after_the_tokens_before_them() -> None:
    async def consume(client: RolloutClient, got: list[int], **options: str) -> None:
        async for chunk in client.stream(PROMPT, P64, **options):  # type: ignore[arg-type]
            got += chunk.token_ids

    async def story() -> None:
        workers = [
            ScriptedWorker("w0", deque([Fault("die", 9)])),
            ScriptedWorker("w1", deque([Fault("reject")])),
        ]
        got: list[int] = []
        async with RolloutClient(workers) as client:
            with pytest.raises(RequestRejected):
                await consume(client, got)
            assert len(got) == 9
            cancelled = asyncio.create_task(consume(client, [], request_id="r"))
            await asyncio.sleep(0.1)
            assert await client.cancel("r")
            with pytest.raises(RequestCancelled):
                await cancelled
            closed = asyncio.create_task(consume(client, []))
            await asyncio.sleep(0.1)
        with pytest.raises(ClientClosed):
            await closed

    run_virtual(story())


def test_a_stream_of_a_known_id_begins_with_what_the_journal_has() -> None:
    async def story() -> None:
        worker, journal = ScriptedWorker(), MemoryJournal(keep_finished=True)
        async with RolloutClient([worker], journal=journal) as client:
            waiting = asyncio.create_task(client.generate(PROMPT, P64, request_id="r"))
            await asyncio.sleep(0.2)
            waiting.cancel()
            await asyncio.wait([waiting])
            for _ in range(2):
                chunks = [chunk async for chunk in client.stream(PROMPT, P64, request_id="r")]
                ids = tuple(token for chunk in chunks for token in chunk.token_ids)
                assert ids == undisturbed(PROMPT, P64).token_ids
                assert chunks[-1].finish_reason == "length"
            assert len(worker.requests) == 2
            assert worker.requests[1].position > 0

    run_virtual(story())


def test_an_outlet_hands_on_what_it_holds_before_it_ends() -> None:
    async def story() -> None:
        outlet = Outlet(2)
        outlet.put(TokenChunk((1,), (0.0,), "w", 0), None)
        outlet.put(TokenChunk((2,), (0.0,), "w", 0), None)
        assert outlet.is_full
        waiting = asyncio.ensure_future(outlet.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        first = await outlet.get()
        await waiting
        outlet.close(ValueError("the end"))
        second = await outlet.get()
        assert first is not None
        assert second is not None
        assert (first.token_ids, second.token_ids) == ((1,), (2,))
        with pytest.raises(ValueError, match="the end"):
            await outlet.get()

    run_virtual(story())
