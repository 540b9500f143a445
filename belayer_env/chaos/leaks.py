"""What a chaos run has left on the host: by the names and pids of all that it made. One line a thing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

from belayer_env.chaos.inject import ChaosRuntime, ChaosStore
from belayer_env.ownership import Owner, is_process

__all__ = ["Ours", "find_leaks"]

_CGROUPS = Path("/sys/fs/cgroup")
_OF_THE_PROCESS = ("belayer-late-output", "belayer-timelines")
"""Threads that serve all episodes of a process, and come and go with the work there is."""


class Ours:
    """Descriptors and threads of this process, once it has run a first sandbox."""

    def __init__(self) -> None:
        self.descriptors = _descriptors()
        self.threads = _num_threads()


def find_leaks(runtime: ChaosRuntime, store: ChaosStore, before: Ours | None) -> list[str]:
    """Mounts, cgroups, processes, loop devices, files, descriptors and threads that are still there."""
    ids = [home.name for home in runtime.made.homes]
    found = [f"mount {line.split()[4]}" for line in _mounts() if _names(ids, line)]
    found += [
        f"cgroup {path}"
        for sandbox_id in ids
        for pattern in (f"*{sandbox_id}*", f"*/*{sandbox_id}*")
        for path in _CGROUPS.glob(pattern)
    ]
    found += [f"process {pid}" for pid, start in runtime.made.inits if start and is_process(pid, start)]
    found += [f"process {line}" for line in _commands() if _names(ids, line)]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if _names(ids, text := backing.read_text()):
                found.append(f"loop device of {text.strip()}")
    found += [f"home {home}" for home in runtime.made.homes if home.exists()]
    checkpoints = store.root / "checkpoints"
    for name in store.staged:
        final = checkpoints / name.removeprefix(".partial-").partition(".")[0]
        found += [f"checkpoint {path}" for path in (checkpoints / name, final) if path.exists()]
    found += [f"file {path}" for path in (store.root / "tmp").glob(f"*.{Owner.here().token}")]
    if before is None:
        return found
    if (grown := _descriptors() - before.descriptors) > 0:
        found.append(f"{grown} descriptors")
    if (grown := _num_threads() - before.threads) > 0:
        found.append(f"{grown} threads: {[thread.name for thread in threading.enumerate()]}")
    return found


def _names(ids: Iterable[str], text: str) -> bool:
    return any(sandbox_id in text for sandbox_id in ids)


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _commands() -> Iterable[str]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield f"{process.pid} {' '.join(process.cmdline())}"


def _num_threads() -> int:
    return sum(thread.name not in _OF_THE_PROCESS for thread in threading.enumerate())


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
