"""A shadow pair on real vLLM engines. One for all tests, as a start costs 20 s; each leaves it guarded."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from belayer_rollout.errors import UpdateFailed, WorkerGone
from belayer_rollout.fence import is_exiting
from belayer_rollout.models import ensure_model
from belayer_rollout.pair_state import PairState
from belayer_rollout.shadow import ShadowPair
from belayer_rollout.types import EngineRequest, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

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
    # In a thread: a pair works on between two tests.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


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
        directory, owner = pair._directory, pair.owner_process()
        pids = [*pair.primary_processes(), *pair.shadow_processes()]
        run(pair.close())
        gc.collect()  # vLLM's own leftovers warn here, where warnings are no errors
        assert directory is not None
        assert not directory.exists()
        assert owner is not None
        assert all(is_exiting(pid) for pid in (owner, *pids))


@pytest.fixture
def pair(shared: ShadowPair, run: Run[Any]) -> ShadowPair:
    run(shared.wait_for(PairState.GUARDED))
    return shared


@pytest.fixture(scope="module")
def reference(shared: ShadowPair, run: Run[Any]) -> list[list[int]]:
    tokens: list[list[int]] = run(undisturbed(shared, "reference"))
    return tokens


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
    assert (last.path, last.reason, last.epoch) == ("shadow", "", before + 1)


def test_a_stopped_engine_core_is_found_and_replaced(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]]
) -> None:
    stopped = pair.primary_processes()
    streams = run(disturbed(pair, "stop", lambda: kill(stopped[:1], signal.SIGSTOP)))
    assert [stream.tokens for stream in streams] == reference
    assert (pair.history[-1].path, pair.history[-1].cause) == ("shadow", "a process of it is stopped")
    run(pair.wait_for(PairState.GUARDED))
    assert all(is_exiting(pid) for pid in stopped)


def test_weights_are_held_once_for_both_engines(pair: ShadowPair, run: Run[Any]) -> None:
    async def states() -> list[dict[str, Any]]:
        assert pair._primary is not None
        assert pair._shadow is not None
        return [await slot.engine.state() for slot in (pair._primary, pair._shadow)]  # type: ignore[attr-defined]

    run(undisturbed(pair, "memory"))
    primary, shadow = run(states())
    assert (primary["is_live"], shadow["is_live"]) == (True, False)
    for state in (primary, shadow):
        rss, pss = pss_bytes(state["pid"], state["weights_address"])
        # Every page is resident in both, and each counts for half of it.
        assert rss > 0.9 * state["weights_bytes"]
        assert pss <= 0.55 * rss


def test_a_killed_shadow_is_replaced_and_disturbs_nobody(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]]
) -> None:
    before, lost, faults = pair.epoch, pair.shadow_processes(), len(pair.history)
    streams = run(disturbed(pair, "shadow", lambda: kill(lost)))
    assert [stream.tokens for stream in streams] == reference
    assert [stream.failovers for stream in streams] == [0] * 8
    run(pair.wait_for(PairState.GUARDED))
    assert (pair.epoch, len(pair.history)) == (before, faults)
    assert not set(pair.shadow_processes()) & set(lost)


def test_a_killed_owner_is_replaced_under_the_running_primary(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]]
) -> None:
    before, owner = pair.epoch, pair.owner_process()
    assert owner is not None
    streams = run(disturbed(pair, "owner", lambda: kill([owner])))
    assert [stream.tokens for stream in streams] == reference
    assert [stream.failovers for stream in streams] == [0] * 8
    run(pair.wait_for(PairState.ALONE))
    run(pair.wait_for(PairState.GUARDED))
    assert pair.owner_process() != owner
    # And the new one is good for a take-over.
    streams = run(disturbed(pair, "owner-2", lambda: kill(pair.primary_processes())))
    assert [stream.tokens for stream in streams] == reference
    assert (pair.history[-1].path, pair.epoch) == ("shadow", before + 1)


def test_primary_and_shadow_killed_together_start_cold(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]]
) -> None:
    def fault() -> None:
        kill(pair.shadow_processes() + pair.primary_processes())

    streams = run(disturbed(pair, "both", fault))
    assert [stream.tokens for stream in streams] == reference
    last = pair.history[-1]
    assert last.path == "cold"
    assert "shadow" in last.reason


def test_a_shadow_killed_as_it_takes_over_and_two_faults_more(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]]
) -> None:
    killers: set[asyncio.Task[None]] = set()

    async def kill_successor() -> None:
        shadow = pair.shadow_processes()
        await pair.wait_for(PairState.PROMOTING)
        kill(shadow)

    def during_promotion() -> None:
        killers.add(asyncio.ensure_future(kill_successor()))
        kill(pair.primary_processes())

    faults = len(pair.history)
    streams = run(
        disturbed(pair, "thrice", during_promotion, *[lambda: kill(pair.primary_processes()[-1:])] * 2)
    )
    assert [stream.tokens for stream in streams] == reference
    assert len(pair.history) >= faults + 3
    assert all(killer.done() and killer.exception() is None for killer in killers)


def changed(model: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    noise = torch.Generator().manual_seed(5)
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
        for name, tensor in load_file(model / "model.safetensors").items()
    }


def test_an_update_reaches_both_engines_and_a_broken_one_neither(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]], model: Path, tmp_path: Path
) -> None:
    first = run(pair.weight_version())
    with pytest.raises(UpdateFailed) as failed:
        run(pair.update_weights(first + 1, tmp_path))
    assert failed.value.version == first

    run(pair.update_weights(first + 1, changed(model)))
    after = run(undisturbed(pair, "after"))
    assert after != reference
    streams = run(disturbed(pair, "after-fault", lambda: kill(pair.primary_processes()[:1])))
    assert [stream.tokens for stream in streams] == after
    assert {v for stream in streams for v in stream.versions} == {first + 1}
    assert pair.history[-1].path == "shadow"

    # Back, with the shadow still being built: the primary loads it itself.
    run(pair.update_weights(first + 2, model))
    assert run(undisturbed(pair, "back")) == reference
    run(pair.wait_for(PairState.GUARDED))
    streams = run(disturbed(pair, "back-fault", lambda: kill(pair.primary_processes()[:1])))
    assert [stream.tokens for stream in streams] == reference
    assert {v for stream in streams for v in stream.versions} == {first + 2}


@pytest.mark.parametrize("who", ["shadow", "primary"])
def test_a_fault_during_an_update_leaves_one_version_in_force(
    pair: ShadowPair, run: Run[Any], reference: list[list[int]], model: Path, who: str
) -> None:
    before = run(pair.weight_version())

    async def update_and_kill() -> None:
        update = asyncio.ensure_future(pair.update_weights(before + 1, model))
        owner = pair._seat.process
        while not update.done():
            # A call to the owner each time: no busy loop, and it is there for milliseconds only.
            if (await asyncio.to_thread(owner.client.health)).filling:
                break
        kill(pair.shadow_processes() if who == "shadow" else pair.primary_processes())
        try:
            await update
        except UpdateFailed as error:
            assert error.version == before  # noqa: PT017  either end is right

    run(update_and_kill())
    assert run(undisturbed_or_continued(pair)) == reference
    run(pair.wait_for(PairState.GUARDED))
    version = run(pair.weight_version())
    assert version in (before, before + 1)
    assert run(pair._seat.in_force()) == version


async def undisturbed_or_continued(pair: ShadowPair) -> list[list[int]]:
    streams = [Stream(pair, f"some-{pair.epoch}-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    await asyncio.gather(*(stream.run() for stream in streams))
    return [stream.tokens for stream in streams]
