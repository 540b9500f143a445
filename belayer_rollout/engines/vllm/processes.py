"""The processes of an engine: their environment, who they are, when one dies, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import active_children, resource_tracker
from typing import NamedTuple

import psutil

from belayer_rollout.memory.orphans import USER, is_engines
from belayer_rollout.shared_memory import shared_memory_of

__all__ = [
    "END_S",
    "DeathWatch",
    "EngineProcesses",
    "end_marked",
    "engine_environment",
    "marked",
]

MARK = "BELAYER_ENGINE"
"""Environment variable by which every process of an engine is found, also when its parent is gone."""

CORE = "EngineCore"
"""How the names begin of the processes that vLLM starts as children of its user's."""

END_S = 10.0
"""A SIGKILL takes milliseconds; a process that is in the kernel (a page-in, a driver) may take longer."""

_environment = threading.Lock()


class EngineProcesses(NamedTuple):
    """Process ids. Where EngineCore runs the model itself (one rank, "uni" executor), it is in both."""

    cores: tuple[int, ...]
    workers: tuple[int, ...]

    @classmethod
    def of(cls, pids: Iterable[tuple[int, int]]) -> EngineProcesses:
        """From each worker's own and parent's pid: who is EngineCore (a child of this process), who not."""
        pairs = list(pids)
        me = os.getpid()
        cores = {own if parent == me else parent for own, parent in pairs}
        return cls(tuple(sorted(cores)), tuple(sorted(own for own, _ in pairs)))

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.cores + self.workers))


@contextlib.contextmanager
def engine_environment(mark: str, variables: Mapping[str, str]) -> Iterator[None]:
    """These variables in os.environ, from which vLLM reads them and its children inherit them, for no longer
    than an engine's start takes. One engine of a process starts at a time."""
    wanted = dict(variables) | {MARK: mark, USER: str(os.getpid())}
    # This process's own tracker must not bear the mark and end with the engine.
    resource_tracker.ensure_running()
    with _environment:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def marked(mark: str) -> list[psutil.Process]:
    """Every process of the engine with this mark, wherever its parents are gone to.

    What another thread of this process starts while an engine starts inherits the mark, too, and is none of
    it: of this process's own children only those count that vLLM made, and what descends from them."""
    bearers: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                bearers[process.pid] = process
    made = {child.pid for child in active_children() if child.name.startswith(CORE)}
    return [process for process in bearers.values() if _is_of_engine(process, bearers, made)]


def _is_of_engine(
    process: psutil.Process, bearers: Mapping[int, psutil.Process], made: set[int | None]
) -> bool:
    try:
        parent = process.ppid()
        if process.pid in made or parent in bearers:
            return process.pid in made or _is_of_engine(bearers[parent], bearers, made)
        # An orphan.
        return parent != os.getpid() and is_engines(" ".join(process.cmdline()))
    except psutil.Error:
        return False


def end_marked(
    mark: str,
    known: Iterable[psutil.Process] = (),
    *,
    shared: set[str] | None = None,
    deadline_s: float = END_S,
) -> bool:
    """Kill every process with this mark and wait until they are gone, those that they still start too.

    SIGKILL also ends a stopped process. ``known`` are those of which one may be on its way out, when its mark
    cannot be read any more; ``shared`` is given the names of the shared memory that they map. Blocks. False
    if one is still there after the deadline."""
    deadline = time.monotonic() + deadline_s
    known = list(known)
    while left := [process for process in {*marked(mark), *known} if _is_running(process)]:
        if time.monotonic() > deadline:
            return False
        if shared is not None:
            shared |= shared_memory_of(process.pid for process in left)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=0.2)
    return True


class DeathWatch:
    """Calls back, in the running event loop, when the first of some processes dies."""

    def __init__(self, pids: tuple[int, ...], on_death: Callable[[int], None]) -> None:
        """Raises:
        ProcessLookupError: one is gone already."""
        self._loop = asyncio.get_running_loop()
        self._fds: dict[int, int] = {}
        try:
            for pid in pids:
                self._fds[os.pidfd_open(pid)] = pid
        except BaseException:
            self.close()
            raise
        for fd, pid in self._fds.items():
            self._loop.add_reader(fd, self._died, pid, on_death)

    def _died(self, pid: int, on_death: Callable[[int], None]) -> None:
        self.close()
        on_death(pid)

    def first_dead(self) -> int | None:
        """The pid of a dead one at this instant, whether the event loop has come to it or not."""
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(0)
        return self._fds[ready[0][0]] if ready else None

    def close(self) -> None:
        """Stop watching. Idempotent."""
        for fd in self._fds:
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
