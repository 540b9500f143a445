"""The end of engines whose user was killed: their owner, which outlives it by a moment, sees to it.

An engine ends with its user by itself once its worker is there. One that is still being started waits in a
handshake, for minutes, before any code of ours runs in it (vLLM's HANDSHAKE_TIMEOUT_MINS)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["USER", "end_orphans", "is_engines"]

USER = "BELAYER_ENGINE_USER"
"""Environment variable of an engine's processes: the process id of its user."""

TITLE = "VLLM::"
"""How vLLM's processes begin their command lines, once they have written over them."""

EXIT_S = 1.0
"""From a connection's end until its process is gone."""

GRACE_S = 1.0
"""For those that end by themselves, and take what they share with them."""

END_S = 10.0
POLL_S = 0.05


def end_orphans(user: int, *, is_stopped: Callable[[], bool] = lambda: False) -> int:
    """Kill the processes of that user's engines, if the user is gone; how many. Blocks for some seconds.
    ``is_stopped``: whether to give it up, as the user lives and closes down in order."""
    deadline = time.monotonic() + EXIT_S
    while _is_running(user):
        if is_stopped() or time.monotonic() > deadline:
            return 0
        time.sleep(POLL_S)
    killed: set[int] = set()
    kill_at = time.monotonic() + GRACE_S
    while (left := _processes_of(user)) and time.monotonic() < kill_at + END_S:
        if time.monotonic() >= kill_at:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        time.sleep(POLL_S)
    return len(killed)


def _processes_of(user: int) -> list[int]:
    """What the user's other threads started while an engine was being started has inherited the variable,
    and is none of it."""
    mark = f"{USER}={user}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (
                    mark in (entry / "environ").read_bytes().split(b"\0")
                    and is_engines((entry / "cmdline").read_bytes().decode(errors="replace"))
                    and _is_running(int(entry.name))
                ):
                    found.append(int(entry.name))
    return found


def is_engines(command_line: str) -> bool:
    """Whether it is that of a process of vLLM's: started by Python's multiprocessing, until it gives itself a
    title, which it does before its handshake."""
    return "multiprocessing" in command_line or command_line.startswith(TITLE)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
