"""The client over engine servers that are real processes, with real connections that break in every way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from belayer_rollout.bench.scripted_process import ScriptedServer
from belayer_rollout.bench.scripted_script import FaultKind
from belayer_rollout.client import RolloutClient
from belayer_rollout.engines.http import HttpWorker
from belayer_rollout.errors import RequestRejected
from belayer_rollout.pace import PaceLimits
from belayer_rollout.types import Generation, SamplingParams, TokenChunk
from tests.rollout.scripted import bits
from tests.rollout.virtual import until

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=60, temperature=0.0, seed=1, ignore_eos=True)
IMPATIENT = PaceLimits(
    floor_s=0.5,
    ceiling_s=1.0,
    unlearnt_s=1.0,
    first_token_s=1.0,
    probe_s=1.0,
    lost_s=10.0,
    queue_s=20.0,
    tick_s=0.05,
)
"""Tests need not wait as long as a fleet should."""
BREAKS = [
    (kind, after)
    for kind in get_args(FaultKind)
    for after in (0, 25, 60)
    # A refusal is no break, and at 0 there is no event yet that could come twice.
    if kind != "status" and (kind, after) != ("duplicate", 0)
]


@pytest.fixture(scope="module")
def peer() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture(scope="module")
def expected(peer: ScriptedServer) -> Generation:
    async def story() -> Generation:
        async with RolloutClient([HttpWorker(peer.url)]) as client:
            return await client.generate(PROMPT, PARAMS)

    return asyncio.run(story())


def assert_same(generation: Generation, expected: Generation) -> None:
    assert generation.token_ids == expected.token_ids
    assert bits(generation.logprobs) == bits(expected.logprobs)
    assert (generation.finish_reason, generation.stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )


@pytest.mark.parametrize(("kind", "after"), BREAKS)
def test_every_break_comes_to_the_undisturbed_tokens(
    kind: str, after: int, peer: ScriptedServer, expected: Generation
) -> None:
    async def story(url: str) -> tuple[Generation, list[TokenChunk]]:
        workers = [HttpWorker(url, name="a"), HttpWorker(peer.url, name="b")]
        async with RolloutClient(workers, pace=IMPATIENT) as client:
            generation = await client.generate(PROMPT, PARAMS)
            return generation, [chunk async for chunk in client.stream(PROMPT, PARAMS)]

    with ScriptedServer(faults=[{"kind": kind, "after": after}]) as broken:
        generation, chunks = asyncio.run(story(broken.url))
    assert_same(generation, expected)
    assert generation.failovers >= 1
    assert [token for chunk in chunks for token in chunk.token_ids] == list(expected.token_ids)


def test_a_server_that_is_killed_or_stopped_under_many_requests_loses_no_token(
    peer: ScriptedServer,
) -> None:
    async def story(killed: ScriptedServer, stopped: ScriptedServer) -> list[Generation]:
        workers = [HttpWorker(server.url) for server in (killed, stopped, peer)]
        async with RolloutClient(workers, pace=IMPATIENT) as client:
            running = [
                asyncio.create_task(client.generate([1, index], PARAMS, session=str(index)))
                for index in range(90)
            ]
            name = "belayer_rollout_first_token_seconds_count"
            await until(lambda: client.metrics.registry.get_sample_value(name) == 90)
            await asyncio.to_thread(killed.kill)
            stopped.hang()
            return await asyncio.gather(*running)

    async def undisturbed() -> list[Generation]:
        async with RolloutClient([HttpWorker(peer.url)]) as client:
            return await asyncio.gather(*(client.generate([1, index], PARAMS) for index in range(90)))

    with ScriptedServer(pace_s=0.05) as killed, ScriptedServer(pace_s=0.05) as stopped:
        generations = asyncio.run(story(killed, stopped))
    for generation, wanted in zip(generations, asyncio.run(undisturbed()), strict=True):
        assert_same(generation, wanted)
    assert sum(generation.failovers for generation in generations) >= 60


def test_a_5xx_goes_elsewhere_a_429_is_waited_for_and_a_400_is_final(
    peer: ScriptedServer, expected: Generation
) -> None:
    async def story(url: str, *others: str) -> Generation:
        async with RolloutClient([HttpWorker(url), *map(HttpWorker, others)]) as client:
            return await client.generate(PROMPT, PARAMS)

    with ScriptedServer(faults=[{"kind": "status", "status": 500}]) as broken:
        assert_same(asyncio.run(story(broken.url, peer.url)), expected)
    with ScriptedServer(faults=[{"kind": "status", "status": 429, "retry_after": "1"}]) as busy:
        generation = asyncio.run(story(busy.url))
        assert_same(generation, expected)
        assert (generation.failovers, len(busy.log()["requests"])) == (0, 2)
    with ScriptedServer(faults=[{"kind": "status", "status": 400, "times": -1}]) as refusing:
        with pytest.raises(RequestRejected):
            asyncio.run(story(refusing.url))
        assert len(refusing.log()["requests"]) == 1


def test_a_wall_clock_that_jumps_moves_nothing(
    peer: ScriptedServer, expected: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)
    asked = 0

    def jumping() -> float:
        nonlocal asked
        asked += 1
        return draw.choice((0.0, 1e9, 2e9, 4e9)) + draw.uniform(0, 1e6)

    async def story(url: str) -> list[Generation]:
        workers = [HttpWorker(url, name="a"), HttpWorker(peer.url, name="b")]
        async with RolloutClient(workers, journal=tmp_path / "tokens.db", pace=IMPATIENT) as client:
            made = [await client.generate(PROMPT, PARAMS, request_id=f"r{index}") for index in range(4)]
            return [*made, *[await client.resume(f"r{index}") for index in range(4)]]

    faults = [{"kind": "hang", "after": 10}]  # found by a deadline
    with ScriptedServer(faults=faults, pace_s=0.005) as broken:
        monkeypatch.setattr(time, "time", jumping)
        monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
        generations = asyncio.run(story(broken.url))
    for generation in generations:
        assert_same(generation, expected)
    assert sum(generation.failovers for generation in generations[:4]) >= 1
    time.time()
    assert asked, "the clock was not replaced"
