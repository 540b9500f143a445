from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from belayer_env.errors import InvalidInput, RuntimeFailed
from belayer_env.limiter import CheckpointLimiter, Slot, default_slots

HOLDER = """
import sys, time
from pathlib import Path
from belayer_env.limiter import CheckpointLimiter
slot = CheckpointLimiter(Path(sys.argv[1]), num_slots=1).acquire(10)
print(slot is not None, flush=True)
time.sleep(60)
"""

CONTENDER = """
import fcntl, os, sys, time
from pathlib import Path
from belayer_env.limiter import CheckpointLimiter
limiter = CheckpointLimiter(Path(sys.argv[1]), num_slots=3)
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
for _ in range(4):
    with limiter.acquire(60) as slot:
        os.write(log, b"+\\n")
        time.sleep(0.01)
        os.write(log, b"-\\n")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data" / "slots"


@pytest.fixture
def one(directory: Path) -> CheckpointLimiter:
    return CheckpointLimiter(directory, num_slots=1)


@pytest.fixture(autouse=True)
def nothing_stays_open(directory: Path) -> Iterator[None]:
    yield
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            assert not str(link.readlink()).startswith(str(directory))


def taken(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def start(script: str, *args: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def test_there_are_as_many_slots_as_were_asked_for(directory: Path) -> None:
    limiter = CheckpointLimiter(directory, num_slots=3)
    slots = [taken(limiter.acquire(0)) for _ in range(3)]
    assert sorted(slot.number for slot in slots) == [0, 1, 2]
    assert limiter.acquire(0) is None
    slots[1].release()
    slots[1].release()
    again = taken(limiter.acquire(0))
    assert again.number == slots[1].number
    for slot in (*slots, again):
        slot.release()


def test_a_block_ends_with_its_slot_free(one: CheckpointLimiter) -> None:
    with pytest.raises(KeyError), taken(one.acquire(0)):
        raise KeyError
    with taken(one.acquire(0)):
        assert one.acquire(0) is None


def test_the_directory_is_the_users_own(one: CheckpointLimiter, directory: Path) -> None:
    taken(one.acquire(0)).release()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in directory.iterdir()] == [0o600]


def test_by_default_there_is_one_per_cpu_beside_the_users_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    limiter = CheckpointLimiter()
    assert limiter.directory == default_slots() == Path("/somewhere/belayer/slots")
    assert limiter.num_slots == os.cpu_count()


@pytest.mark.parametrize("num_slots", [0, -1, True])
def test_fewer_than_one_slot_is_refused(num_slots: int) -> None:
    with pytest.raises(InvalidInput):
        CheckpointLimiter(num_slots=num_slots)


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan])
def test_a_time_out_is_no_negative_time(one: CheckpointLimiter, timeout_s: float) -> None:
    with pytest.raises(InvalidInput):
        one.acquire(timeout_s)


def test_a_directory_that_cannot_be_made_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeFailed, match="slot"):
        CheckpointLimiter(tmp_path / "file" / "slots").acquire(0)


def test_waiting_ends_at_the_time_out_and_sleeps_in_between(directory: Path) -> None:
    now, naps = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        naps.append(seconds)
        now += seconds

    with taken(CheckpointLimiter(directory, num_slots=1).acquire(0)):
        waiter = CheckpointLimiter(directory, num_slots=1, clock=lambda: now, sleep=sleep)
        assert waiter.acquire(5.0) is None
    assert now == pytest.approx(5.0)
    assert all(0.004 <= nap <= 0.061 for nap in naps[:-1])
    assert sum(naps[:20]) > sum(naps[-21:-1])  # who has waited long looks oftener


def test_a_cancelled_wait_ends_soon(one: CheckpointLimiter) -> None:
    stop = threading.Event()
    with taken(one.acquire(0)):
        threading.Timer(0.05, stop.set).start()
        started = time.monotonic()
        assert one.acquire(60, stop.is_set) is None
    assert time.monotonic() - started < 5
    assert one.acquire(60, stop.is_set) is None  # cancelled before: not even a free one is taken


def test_threads_of_one_process_share_the_limit(directory: Path) -> None:
    limiter = CheckpointLimiter(directory, num_slots=2)
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with taken(limiter.acquire(60)):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.01)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


def test_32_processes_never_exceed_it_and_all_get_through(directory: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    contenders = [start(CONTENDER, directory, log) for _ in range(32)]
    for contender in contenders:
        contender.communicate(timeout=100)
    assert [contender.returncode for contender in contenders] == [0] * 32
    inside = most = 0
    for mark in log.read_text().split():
        inside += 1 if mark == "+" else -1
        most = max(most, inside)
    assert inside == 0
    assert most == 3
    assert log.read_text().count("+") == 32 * 4


def test_a_killed_holder_frees_its_slot(one: CheckpointLimiter, directory: Path) -> None:
    holder = start(HOLDER, directory)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert one.acquire(0.1) is None
    holder.send_signal(signal.SIGKILL)
    taken(one.acquire(10)).release()
    holder.communicate()


def in_child(act: Callable[[], bool]) -> int:
    """Exit code of a forked child: 0 if ``act`` was true."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if act() else 1))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def test_a_forked_child_holds_nothing_and_frees_nothing(one: CheckpointLimiter) -> None:
    with taken(one.acquire(0)) as slot:

        def child() -> bool:
            slot.release()  # the parent's: nothing happens
            return one.acquire(0) is None

        assert in_child(child) == 0
        assert one.acquire(0) is None
    assert in_child(lambda: one.acquire(0) is not None) == 0
    taken(one.acquire(0)).release()


def test_a_child_that_outlives_its_parent_does_not_keep_the_slot(one: CheckpointLimiter) -> None:
    slot = taken(one.acquire(0))
    started, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        os.read(started, 1)  # until the parent has closed its end
        os._exit(0)
    os.close(started)
    slot.release()
    taken(one.acquire(0)).release()
    os.close(release)
    os.waitpid(pid, 0)


def test_a_program_that_the_holder_starts_does_not_keep_the_slot(one: CheckpointLimiter) -> None:
    slot = taken(one.acquire(0))
    sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    slot.release()
    taken(one.acquire(0)).release()
    sleeper.kill()
    sleeper.wait()


def test_the_stream_that_programs_seed_is_left_alone(one: CheckpointLimiter) -> None:
    """A training seeds it: faults are not to change what it draws."""
    before = random.getstate()
    with taken(one.acquire(1)):
        assert one.acquire(0.02) is None
    assert random.getstate() == before
