"""Whose processes an engine's are: found by a mark that what others start meanwhile inherits, too."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from belayer_rollout.engines.vllm.processes import end_marked, engine_environment, marked

MARK = "a-mark-of-its-own"
SPAWN = multiprocessing.get_context("spawn")


def be_a_core(say: Connection) -> None:
    """An EngineCore, as far as its processes go: it has two workers, one under vLLM's title, and a helper."""
    worker = SPAWN.Process(target=time.sleep, args=(600,))
    worker.start()
    titled = subprocess.Popen(["VLLM::Worker", "600"], executable=shutil.which("sleep"))
    helper = subprocess.Popen(["sleep", "600"])
    say.send((worker.pid, titled.pid, helper.pid))
    signal.pause()


@pytest.fixture
def core() -> Iterator[tuple[Any, tuple[int, int, int], list[int]]]:
    hear, say = SPAWN.Pipe(duplex=False)
    core = SPAWN.Process(target=be_a_core, args=(say,), name="EngineCore_DP0")
    with engine_environment(MARK, {}):
        core.start()
        nested = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=2).pid, flush=True); input()"
        bystanders = [
            subprocess.Popen(["sleep", "600"]),
            subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE),
        ]
        children = hear.recv()
    assert bystanders[1].stdout is not None
    grandchild = int(bystanders[1].stdout.readline())
    hear.close()
    say.close()
    try:
        yield core, children, [*(bystander.pid for bystander in bystanders), grandchild]
    finally:
        core.kill()
        core.join()
        for pid in (*children, grandchild):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for bystander in bystanders:
            bystander.kill()
            bystander.communicate()


def test_what_others_start_meanwhile_is_none_of_the_engine(core: Any) -> None:
    engine, children, bystanders = core
    assert {process.pid for process in marked(MARK)} == {engine.pid, *children}
    assert end_marked(MARK)
    assert not any(is_there(pid) for pid in (engine.pid, *children))
    assert all(is_there(pid) for pid in bystanders)


def test_workers_are_found_when_their_core_is_gone(core: Any) -> None:
    engine, (*workers, _), _ = core
    engine.kill()
    engine.join()
    assert set(workers) <= {process.pid for process in marked(MARK)}
    assert end_marked(MARK)
    wait_until(lambda: not any(map(is_there, workers)))


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)
