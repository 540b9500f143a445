"""The whole of it on real vLLM: a client with its journal, over a shadow pair and over a server with the pair
as its peer. For every fault the tokens are those of an undisturbed run, each once, with its logprob."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.engines.http import HttpWorker
from belayer_rollout.models import ensure_model
from belayer_rollout.pair_state import PairState
from belayer_rollout.shadow import ShadowPair
from belayer_rollout.types import Generation, SamplingParams
from tests.rollout.loop_thread import LoopThread
from tests.rollout.vllm_server import VllmServer, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(40 + 9 * i)] for i in range(8)]
NUM_TOKENS = 96
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=0)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True, seed=11, exact_resume=True)
ENGINE_ARGS = {
    # In bfloat16 a prefill and a decode of the same tokens may round two near candidates apart.
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 27,
}
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as thread:
        yield thread


@pytest.fixture(scope="module")
def pair(loop: LoopThread) -> Iterator[ShadowPair]:
    made = ShadowPair(ensure_model("tiny"), name="p", engine_args=ENGINE_ARGS, weight_version=3, stall_s=3.0)
    try:
        loop.run(made.start())
        yield made
    finally:
        loop.run(made.close())


@pytest.fixture(scope="module")
def reference(loop: LoopThread, pair: ShadowPair) -> dict[str, list[Generation]]:
    async def go() -> dict[str, list[Generation]]:
        async with RolloutClient([pair], owns_workers=False) as client:
            return {name: await play(client, params) for name, params in PARAMS.items()}

    found: dict[str, list[Generation]] = loop.run(go())
    return found


async def play(
    client: RolloutClient, params: SamplingParams, fault: Callable[[], None] | None = None
) -> list[Generation]:
    """All prompts at once by streams, and what the journal has of them after; the fault comes half-way."""
    total = 0
    left = [fault] if fault is not None else []

    async def one(index: int, prompt: Sequence[int]) -> tuple[str, list[int], list[float]]:
        nonlocal total
        tokens: list[int] = []
        logprobs: list[float] = []
        name = f"{id(client)}-{params.temperature}-{index}"
        async for chunk in client.stream(prompt, params, session=name, request_id=name):
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            total += len(chunk.token_ids)
            if left and total >= len(PROMPTS) * NUM_TOKENS // 2:
                left.pop()()
        return name, tokens, logprobs

    made = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(PROMPTS)))
    assert not left, "the fault did not come"
    found = []
    for name, tokens, logprobs in made:
        generation = await client.resume(name)
        assert (generation.token_ids, generation.logprobs) == (tuple(tokens), tuple(logprobs))
        found.append(generation)
    return found


def equal(found: Sequence[Generation], wanted: Sequence[Generation]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def send(pids: Sequence[int], signum: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, signum)


@pytest.mark.parametrize("way", PARAMS)
@pytest.mark.parametrize(
    ("victim", "signum"),
    [
        ("core", signal.SIGKILL),
        ("worker", signal.SIGKILL),
        ("core", signal.SIGSTOP),
        ("worker", signal.SIGSTOP),
    ],
)
def test_a_pairs_primary_killed_or_stopped_costs_no_token(
    loop: LoopThread, pair: ShadowPair, reference: dict[str, list[Generation]], tmp_path: Path,
    way: str, victim: str, signum: signal.Signals,
) -> None:  # fmt: skip
    async def go() -> list[Generation]:
        await pair.wait_for(PairState.GUARDED)
        processes = pair.primary_processes()
        pids = processes[:1] if victim == "core" else processes[1:]
        assert pids
        async with RolloutClient([pair], journal=tmp_path / "tokens.db", owns_workers=False) as client:
            return await play(client, PARAMS[way], lambda: send(pids, signum))

    found = loop.run(go())
    equal(found, reference[way])
    assert all(one.failovers >= 1 for one in found)
    assert pair.history[-1].path == "shadow"
    for one in found:
        assert [segment.stop for segment in one.segments][-1] == NUM_TOKENS
        assert len({segment.worker for segment in one.segments}) == 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VllmServer]:
    with vllm_server(ensure_model("tiny"), tmp_path / "log", dtype="float32") as running:
        yield running


@pytest.mark.parametrize(
    ("victim", "signum"),
    [
        ("server", signal.SIGKILL),
        ("server", signal.SIGSTOP),
        ("core", signal.SIGKILL),
        ("core", signal.SIGSTOP),
    ],
)
def test_a_servers_requests_go_on_at_its_peer(
    loop: LoopThread, pair: ShadowPair, reference: dict[str, list[Generation]], tmp_path: Path,
    server: VllmServer, victim: str, signum: signal.Signals,
) -> None:  # fmt: skip
    pid = server.process.pid
    below = psutil.Process(pid).children(recursive=True)
    pids = [pid] if victim == "server" else [one.pid for one in below if "EngineCore" in one.name()]
    assert pids, [one.name() for one in below]

    async def go() -> list[Generation]:
        await pair.wait_for(PairState.GUARDED)
        http = HttpWorker(server.url, name="h", weight_version=3)
        client = RolloutClient([http, pair], journal=tmp_path / "t.db", owns_workers=False)
        try:
            async with client:
                return await play(client, GREEDY, lambda: send(pids, signum))
        finally:
            await http.close()

    found = loop.run(go())
    equal(found, reference["greedy"])
    moved = [one for one in found if one.failovers]
    assert moved, "no request was at the server"
    assert all({segment.worker[0] for segment in one.segments} == {"h", "p"} for one in moved)
