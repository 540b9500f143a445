"""A shadow pair on real vLLM engines. One pair for all tests, as a start costs 20 s; each leaves it guarded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from belayer_rollout.errors import WorkerGone
from belayer_rollout.models import ensure_model
from belayer_rollout.pair_state import PairState
from belayer_rollout.shadow import ShadowPair
from belayer_rollout.types import EngineRequest, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(40 + 9 * i)] for i in range(8)]
NUM_TOKENS = 64
ENGINE_ARGS = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 27,
}


class Stream:
    """One request, continued by hand from prompt and tokens so far, as a client does from its journal."""

    def __init__(self, pair: ShadowPair, name: str, prompt: list[int]) -> None:
        self.pair, self.name, self.prompt = pair, name, prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.workers: list[str] = []
        self.versions: list[int] = []
        self.failovers = 0

    async def run(self, on_token: Callable[[], None] = lambda: None) -> None:
        while len(self.tokens) < NUM_TOKENS:
            left = NUM_TOKENS - len(self.tokens)
            params = SamplingParams(max_tokens=left, temperature=0.0, seed=0, ignore_eos=True)
            request = EngineRequest(
                f"{self.name}-{self.failovers}", self.prompt + self.tokens, params, len(self.tokens)
            )
            try:
                async for chunk in self.pair.generate(request):
                    self.tokens += chunk.token_ids
                    self.logprobs += chunk.logprobs
                    self.workers += [chunk.worker] * len(chunk.token_ids)
                    self.versions += [chunk.weight_version] * len(chunk.token_ids)
                    on_token()
            except WorkerGone:
                self.failovers += 1


async def undisturbed(pair: ShadowPair, name: str) -> list[list[int]]:
    streams = [Stream(pair, f"{name}-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    await asyncio.gather(*(stream.run() for stream in streams))
    assert all(stream.failovers == 0 for stream in streams)
    return [stream.tokens for stream in streams]


async def disturbed(pair: ShadowPair, name: str, *faults: Callable[[], None]) -> list[Stream]:
    """Each fault comes when the requests have got a share further."""
    streams = [Stream(pair, f"{name}-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    total = len(PROMPTS) * NUM_TOKENS
    left = [(total * (n + 1) // (len(faults) + 1), fault) for n, fault in enumerate(faults)]

    def on_token() -> None:
        if left and sum(len(stream.tokens) for stream in streams) >= left[0][0]:
            left.pop(0)[1]()

    await asyncio.gather(*(stream.run(on_token) for stream in streams))
    assert not left, "a fault did not come"
    assert all(len(stream.tokens) == len(stream.logprobs) == NUM_TOKENS for stream in streams)
    return streams


def kill(pids: tuple[int, ...] | list[int], sign: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, sign)


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model("tiny")


@pytest.fixture(scope="module")
def shared(run: Run[Any], model: Path) -> Iterator[ShadowPair]:
    pair = ShadowPair(model, name="p", engine_args=ENGINE_ARGS, weight_version=3)
    try:
        run(pair.start())
        yield pair
    finally:
        run(pair.close())


@pytest.fixture
def pair(shared: ShadowPair, run: Run[Any]) -> ShadowPair:
    run(shared.wait_for(PairState.GUARDED))
    return shared


@pytest.fixture(scope="module")
def reference(shared: ShadowPair, run: Run[Any]) -> list[list[int]]:
    return run(undisturbed(shared, "reference"))


def pss_bytes(pid: int, address: int) -> tuple[int, int]:
    """Resident and proportional size of the mapping that begins at an address."""
    rss = pss = -1
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            inside = int(fields[0].split("-")[0], 16) == address
        elif inside and fields[0] == "Rss:":
            rss = int(fields[1]) * 1024
        elif inside and fields[0] == "Pss:":
            pss = int(fields[1]) * 1024
    return rss, pss


def test_a_killed_engine_core_costs_no_token(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]]
) -> None:
    before = pair.epoch
    streams = run(disturbed(pair, "core", lambda: kill(pair.primary_processes()[:1])))
    assert [stream.tokens for stream in streams] == reference
    assert [stream.failovers for stream in streams] == [1] * 8
    assert {w for stream in streams for w in stream.workers} == {f"p/{before}", f"p/{before + 1}"}
    last = pair.history[-1]
    print("TAKEOVER", last)
    assert (last.path, last.reason, last.epoch) == ("shadow", "", before + 1)
