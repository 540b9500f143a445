"""A shadow pair's decisions, on engines that cost nothing: real processes, a real owner, no model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from belayer_rollout.engines.base import EngineWorker
from belayer_rollout.errors import InvalidRequest, SetupError, UpdateFailed, WorkerGone
from belayer_rollout.memory.client import OwnerClient
from belayer_rollout.pair_state import PairState
from belayer_rollout.shadow import ShadowPair
from belayer_rollout.types import EngineRequest, SamplingParams
from tests.rollout.fake_engine import FakeEngine, Fleet, next_token

pytest.importorskip("psutil")

NUM_TOKENS = 60
NEW_WEIGHTS = Path.cwd()
"""The fake engines make up what they load."""


@contextlib.asynccontextmanager
async def guarded(**options: Any) -> AsyncIterator[tuple[ShadowPair, Fleet]]:
    """A pair with a ready shadow; afterwards nothing of it may be left."""
    fleet = Fleet()
    pair = ShadowPair("no-model", name="p", make_engine=fleet, **options)
    try:
        await pair.start()
        await pair.wait_for(PairState.GUARDED, timeout_s=30)
        yield pair, fleet
    finally:
        directory, owner = pair._directory, pair.owner_process()
        await pair.close()
        await pair.close()
        assert directory is not None
        assert not directory.exists()
        assert not is_there(owner)
        assert not any(is_there(pid) for engine in fleet.engines for pid in engine.processes().all)


def is_there(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


async def stream(pair: ShadowPair, on_token: Callable[[int], None] = lambda n: None) -> list[Any]:
    """All chunks of a request that is continued by hand. Fails if it does not get on."""
    chunks: list[Any] = []
    async with asyncio.timeout(60):
        while len(chunks) < NUM_TOKENS:
            tokens = [5, 6, 7, *(chunk.token_ids[0] for chunk in chunks)]
            params = SamplingParams(max_tokens=NUM_TOKENS - len(chunks), temperature=0.0)
            request = EngineRequest(f"r-{len(chunks)}", tokens, params, len(chunks))
            with contextlib.suppress(WorkerGone):
                async for chunk in pair.generate(request):
                    chunks.append(chunk)
                    on_token(len(chunks))
    return chunks


def expected(versions: list[int]) -> list[int]:
    tokens = [5, 6, 7]
    for version in versions:
        tokens.append(next_token(tokens, version))
    return tokens[3:]


async def made(fleet: Fleet, num_engines: int) -> None:
    while len(fleet.engines) < num_engines:  # noqa: ASYNC110 - which sets no event
        await asyncio.sleep(0.01)


def check(chunks: list[Any]) -> None:
    versions = [chunk.weight_version for chunk in chunks]
    assert [chunk.token_ids[0] for chunk in chunks] == expected(versions)
    assert chunks[-1].finish_reason == "length"


def kill(*pids: int | None, sign: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        assert pid is not None
        os.kill(pid, sign)


def hang(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.is_hung = engine.is_live


def damage_weights(owner: int | None) -> None:
    """A stray write into the owner's pages, by one who may open them."""
    for fd in Path(f"/proc/{owner}/fd").iterdir():
        if "belayer-weights" in str(fd.readlink()):
            with fd.open("r+b", buffering=0) as file:
                file.write(b"\xee" * 64)


def at(n: int, act: Callable[[], None]) -> Callable[[int], None]:
    return lambda count: act() if count == n else None


def test_a_pair_is_a_worker_that_recovers_itself() -> None:
    pair = ShadowPair("no-model")
    assert isinstance(pair, EngineWorker)
    assert pair.recovers_itself
    with pytest.raises(InvalidRequest):
        ShadowPair("no-model", stall_s=0.0)


def test_a_killed_primary_is_followed_by_its_shadow() -> None:
    async def scenario() -> None:
        async with guarded(weight_version=3) as (pair, _):
            chunks = await stream(pair, at(20, lambda: kill(*pair.primary_processes())))
            check(chunks)
            assert [chunk.worker for chunk in chunks][::59] == ["p/1", "p/2"]
            (last,) = pair.history
            assert (last.path, last.epoch, last.weight_version, last.reason) == ("shadow", 2, 3, "")
            assert last.is_over
            assert last.detect_s is not None
            assert 0 < last.fence_s <= last.swap_s
            assert last.check_s > 0
            assert last.activate_s > 0
            await pair.wait_for(PairState.GUARDED)

    asyncio.run(scenario())


def test_twenty_faults_in_a_row_cost_no_token() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, _):
            for n in range(20):
                check(await stream(pair, at(3 + n, lambda: kill(*pair.primary_processes()))))
                await pair.wait_for(PairState.GUARDED)
            assert [record.path for record in pair.history] == ["shadow"] * 20
            assert pair.epoch == 21

    asyncio.run(scenario())


def test_a_fault_without_a_shadow_starts_cold_on_the_owners_memory() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, fleet):
            owner = pair.owner_process()
            fleet.may_start.clear()
            kill(*pair.shadow_processes())
            await pair.wait_for(PairState.ALONE)
            pid = pair.primary_processes()
            waiting = asyncio.ensure_future(stream(pair, at(9, lambda: kill(*pid))))
            await pair.wait_for(PairState.COLD)
            fleet.may_start.set()
            check(await waiting)
            assert (pair.history[-1].path, pair.history[-1].reason) == ("cold", "no shadow was ready")
            assert pair.owner_process() == owner

    asyncio.run(scenario())


def test_a_fault_while_a_shadow_is_built_makes_a_primary_of_it() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, fleet):
            fleet.may_start.clear()
            kill(*pair.primary_processes())
            await pair.wait_for(PairState.ALONE)
            await made(fleet, 3)
            pid = pair.primary_processes()
            waiting = asyncio.ensure_future(stream(pair, at(9, lambda: kill(*pid))))
            await pair.wait_for(PairState.COLD)
            fleet.may_start.set()
            check(await waiting)
            assert pair.history[-1].notes == ["the shadow that was being built serves"]
            await pair.wait_for(PairState.GUARDED)
            assert len(fleet.engines) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [True, False])
def test_a_shadow_that_comes_to_nothing_is_not_waited_for(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belayer_rollout.shadow.MIN_BUILD_S", 0.3)

    async def scenario() -> None:
        async with guarded() as (pair, fleet):
            fleet.may_start.clear()
            kill(*pair.primary_processes())
            await pair.wait_for(PairState.ALONE)
            await made(fleet, 3)
            kill(*pair.primary_processes())
            await pair.wait_for(PairState.COLD)
            if fails:
                fleet.engines[-1]._fleet = doomed = Fleet()
                doomed.start_error = WorkerGone("it was killed, too", worker="p")
            else:
                await made(fleet, 4)
            fleet.may_start.set()
            await pair.wait_for(PairState.GUARDED)
            check(await stream(pair))
            # One that fails before it is looked for leaves no word.
            why = "it was killed" if fails else "late by"
            assert all(why in note for note in pair.history[-1].notes)
            assert fails or pair.history[-1].notes

    asyncio.run(scenario())


def test_a_stopped_primary_is_found_and_fenced() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, fleet):

            def stop() -> None:
                hang(fleet)
                kill(*pair.primary_processes(), sign=signal.SIGSTOP)

            check(await stream(pair, at(9, stop)))
            (last,) = pair.history
            assert (last.path, last.cause) == ("shadow", "a process of it is stopped")

    asyncio.run(scenario())


def test_a_primary_that_gives_no_token_is_found() -> None:
    async def scenario() -> None:
        async with guarded(stall_s=0.5) as (pair, fleet):
            check(await stream(pair, at(9, lambda: hang(fleet))))
            (last,) = pair.history
            assert last.path == "shadow"
            assert "no token of 1 streams" in last.cause

    asyncio.run(scenario())


def test_an_idle_pair_is_never_taken_for_hung() -> None:
    async def scenario() -> None:
        async with guarded(stall_s=0.05) as (pair, _):
            for _ in range(5):
                assert all(slot.why_hung(0.001) is None for slot in (pair._primary, pair._shadow) if slot)
                await asyncio.sleep(0.02)
            assert pair.history == []

    asyncio.run(scenario())


def test_a_second_kill_during_the_take_over_starts_cold() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, fleet):

            async def die(engine: FakeEngine) -> None:
                fleet.on_activate = None
                kill(*engine.processes().all)
                await engine.wait_gone()

            fleet.on_activate = die
            check(await stream(pair, at(20, lambda: kill(*pair.primary_processes()))))
            (last,) = pair.history
            assert last.path == "cold"
            assert "died" in last.reason

    asyncio.run(scenario())


def test_primary_and_shadow_killed_together_start_cold() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, _):
            both = pair.primary_processes() + pair.shadow_processes()
            check(await stream(pair, at(20, lambda: kill(*both))))
            assert [record.path for record in pair.history] == ["cold"]

    asyncio.run(scenario())


def test_a_killed_owner_is_replaced_while_the_primary_serves_on() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, _):
            await pair.update_weights(8, NEW_WEIGHTS)
            owner = pair.owner_process()
            chunks = await stream(pair, at(5, lambda: kill(owner)))
            check(chunks)
            assert {chunk.worker for chunk in chunks} == {"p/1"}
            if pair.owner_process() in (owner, None):
                await pair.wait_for(PairState.ALONE)
            await pair.wait_for(PairState.GUARDED)
            check(await stream(pair, at(5, lambda: kill(*pair.primary_processes()))))
            assert [(record.path, record.weight_version) for record in pair.history] == [("shadow", 8)]

    asyncio.run(scenario())


def test_owner_and_primary_killed_together_keep_the_weights_of_the_shadow() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, _):
            await pair.update_weights(8, NEW_WEIGHTS)
            check(await stream(pair, at(5, lambda: kill(pair.owner_process(), *pair.primary_processes()))))
            (last,) = pair.history
            assert last.weight_version == 8
            # Which of the two deaths is seen first is chance: the shadow can take over only on a new owner.
            assert last.path == "shadow" or "OwnerGone" in last.reason

    asyncio.run(scenario())


def test_an_owner_that_another_client_fenced_is_refused() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, _):
            with OwnerClient(pair._seat.process.path) as intruder:
                intruder.fence(intruder.health().epoch)
            check(await stream(pair, at(5, lambda: kill(*pair.primary_processes()))))
            (last,) = pair.history
            assert last.path == "cold"
            assert "OwnerDamaged" in last.reason

    asyncio.run(scenario())


@pytest.mark.parametrize("num_updates", [0, 1, 2])
def test_damaged_weights_are_refused_and_those_in_force_are_loaded_anew(num_updates: int) -> None:
    async def scenario() -> None:
        async with guarded(memory="host-unsealed", weight_version=2) as (pair, fleet):
            for version in range(3, 3 + num_updates):
                await pair.update_weights(version, NEW_WEIGHTS)
            damage_weights(pair.owner_process())
            check(await stream(pair, at(5, lambda: kill(*pair.primary_processes()))))
            (last,) = pair.history
            assert last.path == "cold"
            assert "not what was published" in last.reason
            assert last.weight_version == await pair.weight_version() == 2 + num_updates
            assert fleet.weights[-1] == (NEW_WEIGHTS if num_updates else None)

    asyncio.run(scenario())


@pytest.mark.vllm  # whose environment has torch, and safetensors
@pytest.mark.parametrize("is_damaged", [True, False])
def test_weights_that_nobody_has_any_more_break_the_pair_and_nothing_older_serves(is_damaged: bool) -> None:
    async def scenario() -> None:
        async with guarded(memory="host-unsealed", weight_version=2) as (pair, _):
            await pair.update_weights(5, {})  # tensors, which are in no files once they are in force
            if is_damaged:
                damage_weights(pair.owner_process())
                kill(*pair.primary_processes())
            else:
                kill(pair.owner_process(), *pair.primary_processes(), *pair.shadow_processes())
            await pair.wait_for(PairState.BROKEN)
            with pytest.raises(WorkerGone, match="weights 5 were lost with their owner; 2 is in files"):
                await pair.weight_version()
            # To start it again is to consent to what there is.
            await pair.start()
            chunks = await stream(pair)
            check(chunks)
            assert {chunk.weight_version for chunk in chunks} == {await pair.weight_version()} == {2}
            await pair.update_weights(6, NEW_WEIGHTS)
            assert {chunk.weight_version for chunk in await stream(pair)} == {6}

    asyncio.run(scenario())


def test_a_pause_outlasts_updates_and_primaries() -> None:
    async def scenario() -> None:
        async with guarded(stall_s=1.0) as (pair, _):
            got: list[int] = []
            has_begun = asyncio.Event()

            def on_token(count: int) -> None:
                got.append(count)
                has_begun.set()

            streaming = asyncio.ensure_future(stream(pair, on_token))
            await has_begun.wait()
            await pair.pause()
            before = len(got)
            await pair.update_weights(1, NEW_WEIGHTS)
            kill(*pair.primary_processes())
            await pair.wait_for(PairState.PROMOTING, PairState.ALONE)
            await pair.wait_for(PairState.GUARDED)
            kill(*pair.primary_processes(), *pair.shadow_processes())
            await pair.wait_for(PairState.COLD)
            await pair.wait_for(PairState.GUARDED)
            await pair.health()
            await asyncio.sleep(1.5)  # no stall either
            assert len(got) == before
            assert [record.path for record in pair.history] == ["shadow", "cold"]
            await pair.resume()
            chunks = await streaming
            check(chunks)
            assert [chunk.weight_version for chunk in chunks] == [0] * before + [1] * (NUM_TOKENS - before)

    asyncio.run(scenario())


def test_an_update_in_mid_stream_stamps_each_token_with_its_weights() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, fleet):
            updates: list[asyncio.Future[None]] = []
            chunks = await stream(
                pair,
                at(20, lambda: updates.append(asyncio.ensure_future(pair.update_weights(1, NEW_WEIGHTS)))),
            )
            await updates[0]
            check(chunks)
            versions = [chunk.weight_version for chunk in chunks]
            assert versions == sorted(versions)
            assert set(versions) == {0, 1}
            assert {engine.version for engine in fleet.engines} == {1}

    asyncio.run(scenario())


@pytest.mark.parametrize("who", ["filler", "primary", "owner"])
def test_a_fault_in_mid_update_leaves_one_version_everywhere(who: str) -> None:
    async def scenario() -> None:
        async with guarded(weight_version=4) as (pair, fleet):

            async def fault(engine: FakeEngine) -> None:
                fleet.on_fill = None
                if who == "owner":
                    kill(pair.owner_process())
                    return
                kill(*(engine.processes().all if who == "filler" else pair.primary_processes()))
                if who == "filler":
                    await engine.wait_gone()

            fleet.on_fill = fault
            try:
                await pair.update_weights(5, NEW_WEIGHTS)
            except UpdateFailed as error:
                assert error.version == 4  # noqa: PT017  only the filler's and the owner's faults fail it
                assert who != "primary"
            else:
                assert who == "primary"
            check(await stream(pair))
            await pair.wait_for(PairState.GUARDED)
            version = await pair.weight_version()
            assert version == (5 if who == "primary" else 4)
            check(await stream(pair, at(5, lambda: kill(*pair.primary_processes()))))
            assert await pair.weight_version() == version == await pair._seat.in_force()

    asyncio.run(scenario())


def test_a_version_that_is_not_later_is_refused() -> None:
    async def scenario() -> None:
        async with guarded(weight_version=4) as (pair, _):
            with pytest.raises(UpdateFailed) as failed:
                await pair.update_weights(4, NEW_WEIGHTS)
            assert failed.value.version == 4
            check(await stream(pair))

    asyncio.run(scenario())


def test_an_engine_that_can_never_start_breaks_the_pair_and_a_new_start_mends_it() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        pair = ShadowPair("no-model", make_engine=fleet)
        try:
            fleet.start_error = SetupError("no such model")
            with pytest.raises(WorkerGone, match="no such model"):
                await pair.start()
            assert pair.state is PairState.BROKEN
            assert len(fleet.engines) == 1
            fleet.start_error = WorkerGone("out of memory")
            with pytest.raises(WorkerGone, match="out of memory"):
                await pair.start()
            assert len(fleet.engines) == 4
            fleet.start_error = None
            await pair.start()
            check(await stream(pair))
        finally:
            await pair.close()

    asyncio.run(scenario())


def test_a_request_waits_for_the_next_primary_only_so_long() -> None:
    async def scenario() -> None:
        async with guarded(wait_s=0.3) as (pair, fleet):
            fleet.may_start.clear()
            kill(*pair.primary_processes(), *pair.shadow_processes())
            await pair.wait_for(PairState.COLD)
            with pytest.raises(WorkerGone, match=r"within 0\.3 s"):
                await pair.health()
            fleet.may_start.set()

    asyncio.run(scenario())


def test_a_closed_pair_serves_nobody() -> None:
    async def scenario() -> None:
        async with guarded() as (pair, _):
            running = asyncio.ensure_future(anext(pair.generate(EngineRequest("r", (1,), SamplingParams()))))
            await running
            await pair.close()
            with pytest.raises(WorkerGone, match="closed"):
                await pair.health()

    asyncio.run(scenario())
