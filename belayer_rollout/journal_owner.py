"""Which process runs a request: identity of a process, and whether it is alive. No clock is asked.

A process is its pid and its start in ticks since boot, within one boot and one pid namespace: a pid that was
used again, or a reboot, is never taken for the old owner. A process of another pid namespace (another
container on the same volume) cannot be looked up by pid; there the lock alone decides that each owner holds
on a file of its own, which the kernel drops when the owner ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

__all__ = ["OwnerLock", "is_alive", "process_mark"]


def process_mark(pid: int) -> str | None:
    """Boot, pid namespace and start of a process, as one text; None when there is no such process."""
    try:
        # The name of the program may hold spaces and brackets: count from its closing one.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, start_ticks = stat[0], stat[19]
    return None if state in "ZX" else f"{_place()}:{start_ticks}"


def is_alive(pid: int, mark: str, lock: Path) -> bool:
    """Whether the owner of that pid and mark still lives and has its journal open. ``lock`` is the file of
    its `OwnerLock`: a process that closed its journal may live on, and a full disk may have kept it from
    saying in the journal that it let its requests go."""
    boot, namespace, _ = mark.split(":")
    here_boot, here_namespace = _place().split(":")
    if boot != here_boot:
        return False
    if namespace == here_namespace and process_mark(pid) != mark:
        return False
    return _is_locked(lock)


class OwnerLock:
    """An exclusive lock on a file, held until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Remove the file and let it go. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
