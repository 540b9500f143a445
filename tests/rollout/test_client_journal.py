"""The client with the durable journal: a request outlives its client, too. In real time, with real files."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Literal

import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.errors import (
    InvalidRequest,
    JournalFault,
    JournalFull,
    UnknownRequest,
    WeightVersionChanged,
)
from belayer_rollout.journal import Journal
from belayer_rollout.types import SamplingParams, TokenChunk
from tests.rollout import client_child
from tests.rollout.byte_tokenizer import ByteTokenizer
from tests.rollout.scripted import Fault, ScriptedWorker, bits
from tests.rollout.test_client import PROMPT, assert_undisturbed

P64 = SamplingParams(max_tokens=64, seed=1, ignore_eos=True)
ROOT = Path(__file__).parents[2]


def quick(name: str = "w0", *faults: Fault | None) -> ScriptedWorker:
    return ScriptedWorker(name, deque(faults), gap_s=0.0)


@pytest.mark.parametrize("durability", ["strict", "relaxed"])
def test_faults_under_many_requests_come_to_the_undisturbed_results(
    tmp_path: Path, durability: Literal["strict", "relaxed"]
) -> None:
    async def story() -> None:
        workers = [quick("w0", *[Fault("die", 9)] * 20), quick("w1", *[Fault("no ids", 5)] * 20)]
        path = tmp_path / "tokens.db"
        async with RolloutClient(workers, journal=path, durability=durability) as client:
            generations = await asyncio.gather(
                *(client.generate([i], P64, session="s", request_id=f"r{i}") for i in range(40))
            )
            for generation in generations:
                assert_undisturbed(generation, P64)
        silent = quick("later")
        async with RolloutClient([silent], journal=path) as client:
            for before in generations:
                after = await client.resume(before.request_id)
                assert after.token_ids == before.token_ids
                assert bits(after.logprobs) == bits(before.logprobs)
                assert (after.segments, after.failovers) == (before.segments, before.failovers)
                assert (after.finish_reason, after.stop_reason) == ("length", None)
            with pytest.raises(UnknownRequest):
                await client.resume("r40")
        assert silent.requests == []

    asyncio.run(story())


def test_a_client_that_is_killed_loses_no_token_that_it_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "tokens.db"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.rollout.client_child", str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        handed_on = [int(child.stdout.readline()) for _ in range(37)]
        child.kill()
        handed_on += [int(line) for line in child.stdout.read().split("\n")[:-1]]

    async def story() -> None:
        worker = quick("w9")
        async with RolloutClient([worker], journal=path) as client:
            generation = await client.resume("r")
            assert_undisturbed(generation, client_child.PARAMS)
            assert list(generation.token_ids[: len(handed_on)]) == handed_on
            (request,) = worker.requests
            assert request.position >= len(handed_on)
            assert request.params.max_tokens == 400 - request.position
            assert generation.segments[0][2] == "w0"
            assert generation.segments[-1] == (request.position, 400, "w9", 3)

    asyncio.run(story())


def test_an_id_of_other_content_is_refused_and_the_same_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        worker = quick()
        async with RolloutClient([worker], journal=tmp_path / "tokens.db") as client:
            unseeded = SamplingParams(max_tokens=64, ignore_eos=True)
            first = await client.generate(PROMPT, unseeded, request_id="r")
            assert (await client.generate(PROMPT, unseeded, request_id="r")).token_ids == first.token_ids
            assert len(worker.requests) == 1
            with pytest.raises(InvalidRequest, match="another request"):
                await client.generate([1], unseeded, request_id="r")

    asyncio.run(story())


def test_a_restart_is_a_cut_in_the_journal(tmp_path: Path) -> None:
    async def story() -> None:
        path = tmp_path / "tokens.db"
        worker = ScriptedWorker("w", gap_s=0.0, version_after={20: 4})
        async with RolloutClient([worker], journal=path) as client:
            with pytest.raises(WeightVersionChanged):
                await client.generate(PROMPT, P64, request_id="r", on_version_change="fail")
        async with RolloutClient([worker], journal=path) as client:
            generation = await client.resume("r", on_version_change="restart")
            assert generation.segments == ((0, 64, "w", 4),)
            assert (await client.resume("r")).segments == ((0, 64, "w", 4),)

    asyncio.run(story())


def test_a_stop_string_half_of_which_is_journalled_is_found_on_resume(tmp_path: Path) -> None:
    text = "a 🙂END b".encode()
    made = [(byte, -1.0) for byte in text]
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, stop=("🙂END",))

    async def story() -> None:
        path = tmp_path / "tokens.db"
        dying = ScriptedWorker("w0", deque([Fault("stuck stream", 4)]), gap_s=0.0, tokens=made)
        async with RolloutClient([dying], journal=path, tokenizer=ByteTokenizer()) as client:
            waiting = asyncio.create_task(client.generate(PROMPT, params, request_id="r"))
            async with asyncio.timeout(30):
                while dying.given < 4:  # noqa: ASYNC110 - a scripted worker tells of nothing
                    await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        worker = ScriptedWorker("w1", gap_s=0.0, tokens=made)
        async with RolloutClient([worker], journal=path) as client:
            with pytest.raises(InvalidRequest, match="tokenizer"):
                await client.resume("r")
        async with RolloutClient([worker], journal=path, tokenizer=ByteTokenizer()) as client:
            generation = await client.resume("r")
            assert bytes(generation.token_ids) == "a 🙂END".encode()
            assert generation.stop_reason == "🙂END"

    asyncio.run(story())


def test_a_full_journal_stops_the_streams_and_has_all_that_was_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "tokens.db"
    long = SamplingParams(max_tokens=500_000, seed=1, ignore_eos=True)

    async def story() -> None:
        journal = Journal(path, max_bytes=256 * 1024)
        worker = ScriptedWorker(gap_s=0.0, tokens=[(5, -0.5)] * 400_000, chunk=200)
        got: list[TokenChunk] = []

        async def consume(client: RolloutClient) -> None:
            async for chunk in client.stream(PROMPT, long, request_id="r"):
                got.append(chunk)

        async with RolloutClient([worker], journal=journal) as client:
            with pytest.raises(JournalFull):
                await consume(client)
        await journal.close()
        handed_on = sum(len(chunk.token_ids) for chunk in got)
        assert handed_on > 0
        again = Journal(path)
        (logged,) = await again.requests()
        assert logged.tokens >= handed_on
        assert logged.finish_reason is None
        await again.close()

    asyncio.run(story())


def test_a_journal_that_is_no_journal_is_a_fault_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tokens.db"
    path.write_bytes(b"no database at all" * 1000)

    async def story() -> None:
        worker = quick()
        client = RolloutClient([worker], journal=path)
        try:
            with pytest.raises(JournalFault):
                await client.generate(PROMPT, P64)
        finally:
            await client.aclose()
        assert worker.requests == []

    asyncio.run(story())
