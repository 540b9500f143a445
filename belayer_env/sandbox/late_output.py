"""What background jobs print after their command has ended: read, so that they never block, and dropped.

One thread a process serves all sandboxes. Nothing is kept, so 60 MB of late output cost no memory."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path

__all__ = ["LATE_OUTPUT", "LateOutput"]

_CHUNK = 1 << 16


class LateOutput:
    """Reads FIFOs to their end, closes and unlinks them. Thread-safe; starts over in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._epoll: select.epoll | None = None
        self._pid = 0

    def adopt(self, fd: int, path: Path) -> None:
        """Take over a FIFO's reading end. Where nobody holds the other end any more, it is gone on return."""
        if self._finish_if_ended(fd, path):
            return
        with self._lock:
            self._ensure_thread()
            self._paths[fd] = path
            assert self._epoll is not None
            self._epoll.register(fd, select.EPOLLIN)

    def forget(self, directory: Path) -> None:
        """Close every FIFO of this directory: its sandbox is no more."""
        with self._lock:
            for fd in [fd for fd, path in self._paths.items() if path.parent == directory]:
                self._drop(fd)

    def _ensure_thread(self) -> None:
        if (
            self._pid != os.getpid()
        ):  # the first use in this process, or in a forked child of one that used it
            self._paths = {}
            self._epoll = select.epoll()
            self._pid = os.getpid()
            threading.Thread(
                target=self._serve, args=(self._epoll,), name="belayer-late-output", daemon=True
            ).start()

    def _serve(self, epoll: select.epoll) -> None:
        while True:
            for fd, _ in epoll.poll():
                with self._lock:
                    path = self._paths.get(fd)
                    if path is not None and self._read_some(fd) is False:
                        self._drop(fd)
                        with contextlib.suppress(OSError):
                            path.unlink()

    def _drop(self, fd: int) -> None:
        del self._paths[fd]
        assert self._epoll is not None
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        os.close(fd)

    def _finish_if_ended(self, fd: int, path: Path) -> bool:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        for _, events in poll.poll(0):
            if events & select.POLLHUP and not events & select.POLLIN:
                os.close(fd)
                with contextlib.suppress(OSError):
                    path.unlink()
                return True
        return False

    @staticmethod
    def _read_some(fd: int) -> bool:
        """False at the end of the stream."""
        try:
            return bool(os.read(fd, _CHUNK))
        except BlockingIOError:
            return True


LATE_OUTPUT = LateOutput()
"""The process's one."""
