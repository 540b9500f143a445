"""Weight updates: the rule for a version that changes under a request; a fleet that is never a mixture."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.drive import Budget
from belayer_rollout.errors import (
    RequestFailed,
    UpdateFailed,
    WeightVersionChanged,
    WorkerGone,
)
from belayer_rollout.journal_base import MemoryJournal
from belayer_rollout.types import SamplingParams
from tests.rollout.scripted import Fault, ScriptedWorker
from tests.rollout.test_client import assert_undisturbed
from tests.rollout.virtual import run_virtual, until

PROMPT = (11, 12, 13)
P50 = SamplingParams(max_tokens=50, seed=1, ignore_eos=True)
WEIGHTS = Path("/weights")


def test_a_take_over_under_other_weights_goes_on_by_default_and_says_so() -> None:
    async def story() -> None:
        workers = [ScriptedWorker("w0", deque([Fault("die", 20)])), ScriptedWorker("w1", version=4)]
        async with RolloutClient(workers) as client:
            generation = await client.generate(PROMPT, P50)
        assert generation.segments == ((0, 20, "w0", 3), (20, 50, "w1", 4))

    run_virtual(story())


def test_restart_drops_the_tokens_and_begins_again_from_the_prompt() -> None:
    async def story() -> None:
        journal = MemoryJournal(keep_finished=True)
        worker = ScriptedWorker("w", version_after={20: 4})
        async with RolloutClient([worker], journal=journal, on_version_change="restart") as client:
            generation = await client.generate(PROMPT, P50, request_id="r")
            assert generation.segments == ((0, 50, "w", 4),)
            assert_undisturbed(generation, P50)
            assert (await client.resume("r")).segments == generation.segments
            assert [request.position for request in worker.requests] == [0, 0]
            assert generation.failovers == 0
            await until(lambda: worker.aborted == [worker.requests[0].request_id])

    run_virtual(story())


def test_restart_across_a_take_over_begins_again_too() -> None:
    async def story() -> None:
        workers = [ScriptedWorker("w0", deque([Fault("die", 20)])), ScriptedWorker("w1", version=4)]
        async with RolloutClient(workers) as client:
            generation = await client.generate(PROMPT, P50, on_version_change="restart")
        assert generation.segments == ((0, 50, "w1", 4),)
        assert_undisturbed(generation, P50)

    run_virtual(story())


def test_restarts_have_an_end() -> None:
    class Restless(ScriptedWorker):
        """Gets new weights before any generation ends."""

        def _version_at(self, request: object, at: int) -> int:
            self.version += at == 5
            return self.version

    async def story() -> None:
        async with RolloutClient([Restless("w")], budget=Budget(attempts=3)) as client:
            with pytest.raises(RequestFailed, match="weights changed"):
                await client.generate(PROMPT, P50, on_version_change="restart")

    run_virtual(story())


def test_fail_says_both_versions_and_keeps_the_tokens() -> None:
    async def story() -> None:
        worker, journal = ScriptedWorker("w", version_after={20: 4}), MemoryJournal()
        async with RolloutClient([worker], journal=journal) as client:
            with pytest.raises(WeightVersionChanged) as change:
                await client.generate(PROMPT, P50, request_id="r", on_version_change="fail")
            assert (change.value.before, change.value.after) == (3, 4)
            with pytest.raises(WeightVersionChanged):
                await client.resume("r", on_version_change="fail")
            generation = await client.resume("r")
            assert generation.segments == ((0, 20, "w", 3), (20, 50, "w", 4))

    run_virtual(story())


def test_an_update_reaches_every_worker_and_new_requests_wait_for_it() -> None:
    async def story() -> None:
        workers = [ScriptedWorker("w0", gap_s=1.0), ScriptedWorker("w1", gap_s=0.1)]
        async with RolloutClient(workers) as client:
            running = asyncio.create_task(client.generate([1], P50))
            await asyncio.sleep(5.5)
            update = asyncio.create_task(client.update_weights(4, WEIGHTS))
            await asyncio.sleep(0.05)
            fresh = [asyncio.create_task(client.generate([index], P50)) for index in range(10)]
            await asyncio.sleep(0.5)
            assert client.status().in_flight == 1
            await update
            generations = await asyncio.gather(*fresh)
            assert {segment.weight_version for one in generations for segment in one.segments} == {4}
            assert [segment.weight_version for segment in (await running).segments] == [3, 4]
            assert client.status().weight_version == 4

    run_virtual(story())


def test_workers_that_could_not_follow_are_out_of_rotation_until_they_can() -> None:
    async def story() -> None:
        refusing = ScriptedWorker("refusing", update_fault=UpdateFailed("checksum", version=3))
        dying = ScriptedWorker("dying", update_fault=WorkerGone("gone", worker="dying"))
        unheard = ScriptedWorker(
            "unheard",
            update_fault=WorkerGone("the answer is lost", worker="unheard"),
            applies_before_fault=True,
        )
        good = ScriptedWorker("good")
        async with RolloutClient([refusing, dying, unheard, good]) as client:
            with pytest.raises(UpdateFailed, match=r"refusing.*dying") as failure:
                await client.update_weights(4, WEIGHTS)
            assert failure.value.version == 4
            assert [worker.is_stale for worker in client.status().workers] == [True, True, False, False]
            generations = await asyncio.gather(*(client.generate([index], P50) for index in range(20)))
            assert {segment[2:] for one in generations for segment in one.segments} <= {
                ("good", 4),
                ("unheard", 4),
            }
            await until(lambda: all(worker.is_fit for worker in client.status().workers))
            assert {worker.version for worker in (refusing, dying)} == {4}

    run_virtual(story())


def test_an_update_that_reaches_nobody_leaves_the_version_before_in_force() -> None:
    async def story() -> None:
        workers = [ScriptedWorker(f"w{i}", update_fault=UpdateFailed("no", version=3)) for i in range(2)]
        async with RolloutClient(workers) as client:
            with pytest.raises(UpdateFailed) as failure:
                await client.update_weights(4, WEIGHTS)
            assert failure.value.version == 3
            assert all(worker.is_fit for worker in client.status().workers)
            await client.update_weights(5, WEIGHTS)
            assert client.status().weight_version == 5

    run_virtual(story())


def test_a_worker_that_comes_back_with_old_weights_gets_the_ones_in_force_first() -> None:
    async def story() -> None:
        first, second = ScriptedWorker("w0"), ScriptedWorker("w1")
        async with RolloutClient([first, second]) as client:
            await client.update_weights(7, WEIGHTS)
            first.kill()
            await asyncio.gather(*(client.generate([i], P50) for i in range(4)))
            first.revive(version=0)
            await until(lambda: client.status().workers[0].is_fit)
            assert (first.version, first.updates) == (7, [7, 7])

    run_virtual(story())


def test_tensors_are_not_kept_so_that_a_worker_with_old_weights_stays_out() -> None:
    async def story() -> None:
        first, second = ScriptedWorker("w0"), ScriptedWorker("w1")
        async with RolloutClient([first, second]) as client:
            await client.update_weights(7, {})
            first.kill()
            await asyncio.gather(*(client.generate([i], P50) for i in range(4)))
            first.revive(version=0)
            await asyncio.sleep(200)
            assert not client.status().workers[0].is_fit
            await client.update_weights(8, {})
            await until(lambda: client.status().workers[0].is_fit)
            assert client.status().workers[0].weight_version == 8

    run_virtual(story())


def test_an_update_whose_caller_is_cancelled_is_carried_through() -> None:
    async def story() -> None:
        workers = [ScriptedWorker("w0", gap_s=1.0), ScriptedWorker("w1", gap_s=2.0)]
        async with RolloutClient(workers) as client:
            await client.start()
            update = asyncio.create_task(client.update_weights(4, WEIGHTS))
            await asyncio.sleep(0.5)
            update.cancel()
            await asyncio.wait([update])
            generation = await client.generate(PROMPT, P50)
            assert {segment.weight_version for segment in generation.segments} == {4}
            assert {worker.version for worker in workers} == {4}

    run_virtual(story())
