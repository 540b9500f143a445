"""Engines that do not let go, a process that stands still, and who may cancel what."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.errors import RequestCancelled, WorkerBusy, WorkerGone
from belayer_rollout.journal_base import MemoryJournal
from belayer_rollout.types import EngineRequest, SamplingParams, TokenChunk
from tests.rollout.scripted import Fault, ScriptedWorker
from tests.rollout.test_client import assert_undisturbed, generate
from tests.rollout.virtual import run_virtual, skip_time, until

PROMPT = (11, 12, 13)
P64 = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)


class Clinging(ScriptedWorker):
    """Its clean-up waits for an engine that never answers, and so does its abort."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            await asyncio.Event().wait()

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        await asyncio.Event().wait()


class Translating(ScriptedWorker):
    """Makes a fault of its own out of a cancellation."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        try:
            async for chunk in super().generate(request):
                yield chunk
        except asyncio.CancelledError:
            raise WorkerGone("the connection was closed", worker=self.name) from None


@pytest.mark.parametrize("kind", [Clinging, Translating])
def test_a_hung_engine_is_left_however_it_takes_that(kind: type[ScriptedWorker]) -> None:
    async def story() -> None:
        workers = [kind("w0", deque([Fault("hang", 9)]), hang_s=15_000.0), ScriptedWorker("w1")]
        async with RolloutClient(workers) as client:
            generation = await client.generate(PROMPT, P64)
        assert_undisturbed(generation, P64)
        assert generation.segments == ((0, 9, "w0", 3), (9, 64, "w1", 3))
        assert generation.failovers == 1

    run_virtual(story())


@pytest.mark.parametrize("kind", [Clinging, Translating])
@pytest.mark.parametrize("how", ["task", "client", "close"])
def test_a_cancelled_request_ends_however_its_engine_takes_that(kind: type[ScriptedWorker], how: str) -> None:
    async def story() -> None:
        worker, peer = kind("w0"), ScriptedWorker("w1")
        client = RolloutClient([worker, peer], journal=MemoryJournal())
        await client.start()
        waiting = asyncio.create_task(client.generate(PROMPT, P64, request_id="r"))
        await until(lambda: worker.given >= 9)
        if how == "task":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        elif how == "client":
            assert await client.cancel("r")
            with pytest.raises(RequestCancelled):
                await waiting
        await client.aclose()
        await asyncio.wait([waiting])
        assert waiting.cancelled() or waiting.exception() is not None
        assert peer.requests == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(story())


def test_a_pause_that_ends_while_the_probe_waits_is_no_hang() -> None:
    async def story() -> None:
        worker = ScriptedWorker(health_s=1000.0)
        async with RolloutClient([worker]) as client:
            running = asyncio.create_task(client.generate(PROMPT, P64))
            await until(lambda: worker.given >= 20)
            worker.hang(5.0)
            generation = await running
            assert worker.probes == 1
            # Over the end of the probe's deadline.
            await asyncio.sleep(60)
            assert client.status().workers[0].faults == {}
        assert generation.failovers == 0
        assert_undisturbed(generation, P64)

    run_virtual(story())


def test_a_trial_that_is_refused_for_load_is_passed() -> None:
    class Refusing(ScriptedWorker):
        async def health(self) -> None:
            await super().health()
            raise WorkerBusy("429", worker=self.name)

    generation = run_virtual(generate(Refusing(faults=deque([Fault("die", 9)]))))
    assert_undisturbed(generation, P64)
    assert generation.failovers == 1


def test_a_client_that_stood_still_suspects_nobody() -> None:
    async def story() -> None:
        worker = ScriptedWorker(gap_s=0.5)
        async with RolloutClient([worker]) as client:
            running = asyncio.create_task(client.generate(PROMPT, P64))
            for _ in range(5):
                await asyncio.sleep(3.1)
                skip_time(1000.0)
            assert_undisturbed(await running, P64)
            assert worker.probes == 0

    run_virtual(story())


def test_a_caller_that_is_cancelled_while_the_worker_hangs_is_cancelled() -> None:
    """Both the watch and the caller cancel the same task; neither swallows the other's."""

    async def story() -> None:
        for wait_s in [step / 10 for step in range(60, 130)]:
            worker = ScriptedWorker("w0", deque([Fault("hang", 9)]), hang_s=15_000.0)
            async with RolloutClient([worker, ScriptedWorker("w1")]) as client:
                task = asyncio.create_task(client.generate(PROMPT, P64))
                await asyncio.sleep(wait_s)
                if not task.done():
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                assert client.status().in_flight == 0

    run_virtual(story())
