"""How many checkpoints one host makes at once, over all its processes: slots as locked files. Seconds.

A slot is a file of a directory that all of a user's processes share; whoever holds its flock(2) holds the
slot. The kernel lets go of it when the holder dies, however. Files are only ever added, never removed: a file
that was unlinked and made anew could be held twice.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from belayer_env.disk import disk_errors
from belayer_env.errors import InvalidInput
from belayer_env.paths import data_dir

__all__ = ["CheckpointLimiter", "Slot", "default_slots"]

FIRST_POLL_S, LAST_POLL_S = 0.04, 0.01
"""Between two looks for a free slot, by those who have just come and by those who have waited long: so a slot
goes, more likely than not, to one of the latter. 32 waiters take about 2 % of a core."""

AGING_S = 1.0
"""Waited for so long, one looks twice as often as at first."""

_LUCK = random.SystemRandom()
"""Not the stream that programs seed: how many checkpoints were taken is not to change what they draw."""


def default_slots() -> Path:
    """Where the slots of this user are. Not below $XDG_RUNTIME_DIR, which a cron job or `su` lacks: then one
    host would have two limits."""
    return data_dir() / "slots"


class Slot:
    """One held slot; a context manager. `release` is owed, and done by the kernel if the process dies."""

    def __init__(self, number: int, file: _SlotFile) -> None:
        self.number = number
        self._file = file

    def release(self) -> None:
        """Let another have it. Idempotent."""
        self._file.unlock()

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class CheckpointLimiter:
    """At most ``num_slots`` holders at a time among all processes that share ``directory``. Safe to use from
    many threads, and in a forked child, which inherits none of its parent's slots.

    Processes may differ in ``num_slots``: each takes the first ones only, so the largest number holds."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        num_slots: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``num_slots`` None: one per CPU, as a checkpoint keeps one busy. Nothing is made yet.

        Raises:
            InvalidInput: num_slots is below 1."""
        if num_slots is not None and (isinstance(num_slots, bool) or num_slots < 1):
            raise InvalidInput(f"num_slots is 1 or more, not {num_slots!r}")
        self.directory = default_slots() if directory is None else directory
        self.num_slots = num_slots or os.cpu_count() or 1
        self._clock = clock
        self._sleep = sleep

    def acquire(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> Slot | None:
        """A slot; None when there was none for ``timeout_s`` or ``cancelled()`` has become true (asked
        every 60 ms or sooner). With ``timeout_s`` 0 it looks once.

        Raises:
            InvalidInput: timeout_s is negative or NaN.
            StoreFull, RuntimeFailed: the directory cannot be made or used. No slot is held."""
        if not timeout_s >= 0:
            raise InvalidInput(f"timeout_s is 0 or more, not {timeout_s!r}")
        started = self._clock()
        # From a random one on: else all would queue for the first.
        order = _LUCK.sample(range(self.num_slots), self.num_slots)
        with disk_errors(f"taking a checkpoint slot in {self.directory}"):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            while not cancelled():
                for number in order:
                    file = _SlotFile.try_lock(self.directory / f"slot-{number}")
                    if file is not None:
                        return Slot(number, file)
                waited_s = self._clock() - started
                if waited_s >= timeout_s:
                    return None
                poll_s = max(LAST_POLL_S, FIRST_POLL_S / (1 + waited_s / AGING_S))
                self._sleep(min(poll_s * _LUCK.uniform(0.5, 1.5), timeout_s - waited_s))
        return None


class _SlotFile:
    """A locked file. Opened anew for each slot: a flock belongs to the open file description, and two
    threads, or parent and child, with the same one would both hold the lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _OPEN.add(self)

    @classmethod
    def try_lock(cls, path: Path) -> _SlotFile | None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        file = cls(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        return file

    def unlock(self) -> None:
        if self._fd >= 0:
            # Closing would do, were it not for a child between its fork and its exec.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        _OPEN.discard(self)
        if fd >= 0:
            os.close(fd)


_OPEN: set[_SlotFile] = set()


def _close_inherited() -> None:
    for file in list(_OPEN):
        file.close()


# A child that lived on with its parent's descriptor would hold the slot after the parent's death.
os.register_at_fork(after_in_child=_close_inherited)
