"""Fencing real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from belayer_rollout.fence import Fenced, is_exiting, is_stopped

MANY_THREADS = (
    "import threading, mmap\n"
    "m = mmap.mmap(-1, 1 << 27); m.write(b'x' * (1 << 27))\n"
    "def spin():\n"
    "    while True: pass\n"
    "for _ in range(8): threading.Thread(target=spin, daemon=True).start()\n"
    "print('up', flush=True); threading.Event().wait()\n"
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", MANY_THREADS], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "up\n"
        try:
            yield started
        finally:
            started.kill()


def test_a_running_process_is_neither_harmless_nor_stopped(process: subprocess.Popen[str]) -> None:
    fenced = Fenced.of([process.pid])
    try:
        assert not fenced.are_harmless()
        assert not is_stopped(process.pid)
    finally:
        fenced.close()


@pytest.mark.parametrize("stop_first", [False, True])
def test_after_a_fence_no_thread_can_act(process: subprocess.Popen[str], stop_first: bool) -> None:
    if stop_first:
        os.kill(process.pid, signal.SIGSTOP)
        while not is_stopped(process.pid):
            os.sched_yield()
    fenced = Fenced.of([process.pid])
    try:
        asyncio.run(fenced.fence(20.0))
        assert fenced.are_harmless()
        assert is_exiting(process.pid)
    finally:
        fenced.close()
    assert process.wait(20.0) == -signal.SIGKILL


def test_the_dead_and_reaped_are_harmless_and_never_mistaken_for_others(
    process: subprocess.Popen[str],
) -> None:
    fenced = Fenced.of([process.pid])
    try:
        process.kill()
        process.wait()
        assert fenced.are_harmless()
        asyncio.run(fenced.fence(20.0))
        assert Fenced.of([process.pid]).pids == ()
        with pytest.raises(ProcessLookupError):
            Fenced([process.pid])
    finally:
        fenced.close()
