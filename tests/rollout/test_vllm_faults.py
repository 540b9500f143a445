"""Real vLLM processes killed, stopped, and failing to start: what a stream says, and that nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from belayer_rollout.engines.vllm import VllmWorker, worker
from belayer_rollout.engines.vllm.processes import marked
from belayer_rollout.errors import EngineMissing, SetupError, WorkerFault, WorkerGone, WorkerHung
from belayer_rollout.models import ensure_model
from belayer_rollout.types import SamplingParams
from tests.rollout.streams import prompts, stream
from tests.rollout.test_vllm_worker import TINY

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

# More tokens than a test waits for: whatever ends these streams is the fault.
LONG = SamplingParams(max_tokens=480, temperature=0.0, seed=0, ignore_eos=True)
PROMPTS = prompts(3)

WATCHDOG_S = 60.0
"""What a stream without tokens would be given up after; the tests wait no longer than this for a fault."""

OURS = [
    *worker.ENVIRONMENT,
    "HF_HUB_OFFLINE",
    "VLLM_USE_V2_MODEL_RUNNER",
    "OMP_NUM_THREADS",
    "BELAYER_ENGINE",
]


@contextmanager
def nothing_left_of(engine: VllmWorker) -> Iterator[None]:
    environment = {name: os.environ.get(name) for name in OURS}
    yield
    # What vLLM leaves for the collector warns when it goes: here, where that is ignored.
    gc.collect()
    assert marked(engine._mark) == []
    # A worker's zombie is init's to reap, not ours, once its EngineCore is gone.
    assert not [process for process in engine._known if process.is_running() and not is_zombie(process)]
    # Other engines of this host come and go: only what was this one's counts.
    assert not [name for name in engine._shared_memory if Path("/dev/shm", name).exists()]
    assert not [path for path in (*engine._files, engine._scratch) if path is not None and path.exists()]
    # vLLM itself sets some more when it is imported, and reads them later.
    assert {name: os.environ.get(name) for name in OURS} == environment


def is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def tiny(**options: Any) -> VllmWorker:
    arguments = TINY | options.pop("engine_args", {})
    return VllmWorker(ensure_model("tiny"), engine_args=arguments, env={"OMP_NUM_THREADS": "1"}, **options)


async def running(engine: VllmWorker) -> list[asyncio.Task[Any]]:
    """Streams of which each has had a token."""

    def begun(prompt: tuple[int, ...]) -> tuple[asyncio.Task[Any], asyncio.Event]:
        started = asyncio.Event()
        return asyncio.create_task(stream(engine, prompt, LONG, on_token=lambda got: started.set())), started

    both = [begun(prompt) for prompt in PROMPTS]
    await asyncio.gather(*[started.wait() for _, started in both])
    return [task for task, _ in both]


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_kill_in_mid_stream_is_told_to_every_stream(victim: str) -> None:
    engine = tiny()

    async def killed() -> list[Any]:
        try:
            await engine.start()
            processes = engine.processes()
            assert not set(processes.cores) & set(processes.workers)  # "mp": its worker is another process
            tasks = await running(engine)
            os.kill((processes.cores if victim == "core" else processes.workers)[0], signal.SIGKILL)
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WATCHDOG_S)
            for call in (engine.health, engine.weight_version, engine.model_info, engine.start):
                with pytest.raises(WorkerGone):
                    await call()
            with pytest.raises(WorkerGone):
                await engine.update_weights(1, ensure_model("tiny"))
            await engine.abort("any")  # never raises
            return ends
        finally:
            await engine.close()
            await engine.close()

    with nothing_left_of(engine):
        ends = asyncio.run(killed())
    assert [type(end) for end in ends] == [WorkerGone] * 3
    assert all(end.worker == engine.name for end in ends)


def test_stopped_engine_is_silent_and_can_still_be_closed() -> None:
    engine = tiny()

    async def stopped() -> tuple[set[Any], list[Any]]:
        try:
            await engine.start()
            tasks = await running(engine)
            for pid in engine.processes().all:
                os.kill(pid, signal.SIGSTOP)
            with pytest.raises(WorkerHung, match="belayer_pids"):
                await engine.rpc("belayer_pids", deadline_s=1.0)
            silent = {task for task in tasks if not task.done()}
        finally:
            await asyncio.wait_for(engine.close(), WATCHDOG_S)
        return silent, await asyncio.gather(*tasks, return_exceptions=True)

    with nothing_left_of(engine):
        silent, ends = asyncio.run(stopped())
    assert len(silent) == 3
    assert [type(end) for end in ends] == [WorkerGone] * 3


def test_start_that_is_cancelled_or_closed_leaves_nothing() -> None:
    engine = tiny()

    async def cancelled() -> None:
        starting = asyncio.create_task(engine.start())
        while not marked(engine._mark):  # noqa: ASYNC110 - another process, which sets no event of ours
            await asyncio.sleep(0.05)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        with pytest.raises(WorkerGone):
            await engine.start()
        await engine.close()

    with nothing_left_of(engine):
        asyncio.run(cancelled())


@pytest.mark.parametrize(
    "options",
    [{"engine_args": {"no_such_option": 1}}, {"engine_args": {"max_model_len": 10**9}}],
    ids=["unknown option", "impossible length"],
)
def test_wrong_set_up_is_named_and_leaves_nothing(options: dict[str, Any]) -> None:
    engine = tiny(**options)
    with nothing_left_of(engine), pytest.raises(SetupError, match="engine_args"):
        asyncio.run(engine.start())


def test_engine_that_dies_on_its_way_up_is_gone_and_leaves_nothing() -> None:
    # Far more KV than the host has memory: EngineCore itself fails, after it was started.
    engine = tiny(engine_args={"kv_cache_memory_bytes": 1 << 50})
    with nothing_left_of(engine), pytest.raises(WorkerFault, match="did not start"):
        asyncio.run(engine.start())


def test_missing_vllm_is_answered_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match="scripts/install-vllm"):
        asyncio.run(tiny().start())


def test_engine_ends_with_the_process_that_uses_it(tmp_path: Path) -> None:
    script, told = tmp_path / "user.py", tmp_path / "pids"
    script.write_text(
        "import asyncio, os, sys\n"
        "from tests.rollout.test_vllm_faults import tiny\n"
        "async def main():\n"
        "    engine = tiny()\n"
        "    await engine.start()\n"
        f"    with open({str(told)!r}, 'w') as file:\n"
        "        print(*engine.processes().all, file=file)\n"
        "    await asyncio.Event().wait()\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[2])
    user = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": root})
    try:
        while not (told.exists() and told.read_text().endswith("\n")):
            assert user.poll() is None
            time.sleep(0.1)
        processes = [psutil.Process(int(pid)) for pid in told.read_text().split()]
    finally:
        user.kill()
        user.wait()
    assert len(processes) == 2
    assert psutil.wait_procs(processes, timeout=WATCHDOG_S)[1] == []


def test_parameters_of_a_request_are_checked_before_the_engine_is_asked() -> None:
    engine = tiny(exact_resume=False)
    assert not engine.supports_exact_resume
    with pytest.raises(WorkerGone, match="not started"):
        asyncio.run(stream(engine, (1,), replace(LONG, max_tokens=1)))
