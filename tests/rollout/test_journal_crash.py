"""The journal among processes that are killed: what was promised is there, and who runs a request is
known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from belayer_rollout.errors import InvalidRequest
from belayer_rollout.journal import Journal, JournalledRequest
from belayer_rollout.journal_owner import OwnerLock, is_alive, process_mark
from belayer_rollout.types import SamplingParams
from tests.rollout.journal_child import PROMPT, token

SLACK_S = 1.0
"""Relaxed mode promises 50 ms where a commit needs 30 ms; a host that runs other tests may need longer."""


@contextlib.contextmanager
def child(path: Path, durability: str, first: int, num: int) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.rollout.journal_child", str(path), durability, str(first), str(num)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_of(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def run_and_kill(path: Path, durability: str, num: int, after_lines: int) -> list[list[str]]:
    """The lines of a child that is killed while it goes on, after it said at least so many."""
    with child(path, durability, 0, num) as process:
        out = lines_of(process)
        seen = [out.readline() for _ in range(after_lines)]
        process.kill()
        seen += out.readlines()
    return [line.split() for line in seen]


async def load_all(path: Path, num: int) -> list[JournalledRequest]:
    journal = Journal(path)
    try:
        return [await journal.load(f"r{n}") for n in range(num)]
    finally:
        await journal.close()


def check_tokens(found: JournalledRequest) -> None:
    ids = tuple(i for _, chunk in found.chunks for i in chunk.token_ids)
    logprobs = tuple(p for _, chunk in found.chunks for p in chunk.logprobs)
    sources = [(c.worker, c.weight_version) for _, c in found.chunks for _ in c.token_ids]
    expected = [token(found.request_id, n) for n in range(len(ids))]
    assert found.prompt_token_ids == PROMPT
    assert ids == tuple(c.token_ids[0] for c in expected)
    assert logprobs == tuple(c.logprobs[0] for c in expected)
    assert sources == [(c.worker, c.weight_version) for c in expected]


@pytest.mark.parametrize("seed", range(5))
def test_every_token_whose_future_was_done_survives_a_kill(tmp_path: Path, seed: int) -> None:
    path, num = tmp_path / "tokens.db", 12
    lines = run_and_kill(path, "strict", num, random.Random(seed).randrange(num, 1500))
    promised = {request: int(length) for request, length in lines}
    requests = asyncio.run(load_all(path, num))
    for found in requests:
        check_tokens(found)
        assert found.length >= promised.get(found.request_id, 0)
    # A resumed request is one token further at most: the one that was on its way.
    assert sum(found.length for found in requests) <= sum(promised.values()) + num


def test_relaxed_mode_loses_the_last_moments_and_nothing_before(tmp_path: Path) -> None:
    path, num = tmp_path / "tokens.db", 4
    lines = run_and_kill(path, "relaxed", num, 4000)
    last = max(float(clock) for _, _, clock in lines)
    old = {request: int(length) for request, length, clock in lines if float(clock) < last - SLACK_S}
    assert old, "the child was killed before anything was old enough"
    for found in asyncio.run(load_all(path, num)):
        check_tokens(found)
        assert found.length >= old[found.request_id]


def test_many_processes_share_a_file_and_a_request_has_one_owner(tmp_path: Path) -> None:
    path, num = tmp_path / "tokens.db", 3

    async def take_over(processes: list[subprocess.Popen[str]]) -> None:
        journal = Journal(path)
        try:
            for n in range(3 * num):
                with pytest.raises(
                    InvalidRequest, match=f"process {processes[n // num].pid}, which is alive"
                ):
                    await journal.load(f"r{n}")
            processes[1].kill()
            processes[1].wait()
            for n in range(num, 2 * num):
                found = await journal.load(f"r{n}")
                check_tokens(found)
                pending = journal.append(f"r{n}", found.length, token(f"r{n}", found.length))
                assert pending is not None
                await pending
            owners = {r.request_id: r.owner_pid for r in await journal.requests()}
            assert owners == {
                f"r{n}": os.getpid() if n // num == 1 else processes[n // num].pid for n in range(3 * num)
            }
        finally:
            await journal.close()

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(child(path, "strict", i * num, num)) for i in range(3)]
        for process in processes:
            for _ in range(20 * num):
                lines_of(process).readline()
        asyncio.run(take_over(processes))
        # The others never noticed.
        for survivor in (processes[0], processes[2]):
            before = survivor.poll()
            assert before is None
            assert lines_of(survivor).readline()
    for found in asyncio.run(load_all(path, 3 * num)):
        check_tokens(found)
        assert found.length >= 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokens.db"]


def test_a_second_journal_in_one_process_does_not_take_a_running_request(tmp_path: Path) -> None:
    async def go() -> None:
        first, second = Journal(tmp_path / "tokens.db"), Journal(tmp_path / "tokens.db")
        try:
            found = token("r", 0)
            await first.open_request("r", "s", PROMPT, SamplingParams())
            pending = first.append("r", 0, found)
            assert pending is not None
            await pending
            with pytest.raises(InvalidRequest, match="is alive"):
                await second.open_request("r", "s", PROMPT, SamplingParams())
            await first.close()
            assert (await second.load("r")).chunks == ((0, found),)
        finally:
            await first.close()
            await second.close()

    asyncio.run(go())


def test_an_owner_is_known_by_its_start_its_boot_and_its_lock(tmp_path: Path) -> None:
    lock, pid = tmp_path / "owner", os.getpid()
    mark = process_mark(pid)
    assert mark is not None
    boot, namespace, start = mark.split(":")
    elsewhere = f"{boot}:1:{start}"
    held = OwnerLock(lock)
    assert is_alive(pid, mark, lock)
    assert is_alive(pid, elsewhere, lock), "of another container, where a pid says nothing"
    assert not is_alive(pid, f"{boot}:{namespace}:{int(start) + 1}", lock), "the pid was used again"
    assert not is_alive(pid, f"other-boot:{namespace}:{start}", lock)
    held.release()
    held.release()
    assert not is_alive(pid, mark, lock), "it lives, and has closed its journal"
    assert not is_alive(pid, elsewhere, lock)


def test_a_zombie_is_no_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_mark(process.pid) is None
