"""Fencing processes: killing them and proving that they can act no more, sooner than they are gone.

A process that maps gigabytes takes 50 to 90 ms from SIGKILL until its pidfd fires, as the kernel first frees
its memory. It is harmless long before that: a thread that has the kernel's PF_EXITING flag never runs user
code again. Source: kernel/exit.c, do_exit() -> exit_signals(), which sets the flag in the dying thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from belayer_rollout.errors import WorkerHung

__all__ = ["Fenced", "is_exiting", "is_stopped"]

PF_EXITING = 0x4
"""include/linux/sched.h; field 9 of /proc/PID/task/TID/stat."""

POLL_S = 0.0005


class Fenced:
    """Some processes, held by pidfds: a number that is used again is never mistaken for one of them.

    Raises:
        ProcessLookupError: one has already been reaped (`of` leaves those out)."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}
        try:
            for pid in pids:
                self._fds[pid] = os.pidfd_open(pid)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, pids: Iterable[int]) -> Fenced:
        """Those that are still there."""
        held = cls(())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                held._fds[pid] = os.pidfd_open(pid)
        return held

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._fds)

    def kill(self) -> None:
        """SIGKILL to all at once; it ends stopped processes, too."""
        for fd in self._fds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def are_harmless(self) -> bool:
        """Whether none of them can run user code again."""
        return all(self._is_gone(fd) or is_exiting(pid) or self._is_gone(fd) for pid, fd in self._fds.items())

    async def fence(self, deadline_s: float) -> None:
        """Kill them, and return once they are harmless.

        Raises:
            WorkerHung: one still can act: it hangs in the kernel."""
        self.kill()
        ends = time.monotonic() + deadline_s
        while not self.are_harmless():
            if time.monotonic() > ends:
                raise WorkerHung(f"one of {self.pids} can still act {deadline_s:g} s after its SIGKILL")
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Let go of them. Idempotent."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    @staticmethod
    def _is_gone(fd: int) -> bool:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))


def is_exiting(pid: int) -> bool:
    """Whether every thread of it is past the point of no return."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    # One that a thread starts meanwhile is missed by this list, but then its maker is not exiting.
    return all(_flags(thread) & PF_EXITING for thread in threads)


def is_stopped(pid: int) -> bool:
    """Whether it is stopped (SIGSTOP, a debugger): it is there, and does nothing."""
    try:
        fields = _stat(Path(f"/proc/{pid}"))
    except OSError:
        return False
    return fields[0] in ("T", "t")


def _flags(thread: Path) -> int:
    try:
        return int(_stat(thread)[6])
    except OSError:
        # No such thread any more.
        return PF_EXITING


def _stat(directory: Path) -> list[str]:
    """Fields of stat from the state (field 3) on; the name before it may hold spaces and brackets."""
    return (directory / "stat").read_text().rpartition(")")[2].split()
