"""The processes that a dead actor has left: an engine that nobody talks to any more, and that still has its
device's memory. Seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from belayer_env.ownership import process_start_time

__all__ = ["end_group", "lead_group"]

_DEADLINE_S = 10.0
_POLL_S = 0.02


def lead_group() -> int:
    """Put this process at the head of a process group, for those that it will start; the group's id."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    return os.getpid()


def end_group(group: int) -> int:
    """Kill what is left of a group whose head has died; how many processes that was.

    A group that has a head, alive, is another one: the number has been used again. (It is not, as long as
    there is anybody in the group. Source: Linux, kernel/pid.c: a number is free once no pid, group or session
    has it.)

    Raises:
        TimeoutError: one outlives its SIGKILL: it hangs in the kernel."""
    if group <= 1 or process_start_time(group) is not None:
        return 0
    members = _members(group)
    if members:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + _DEADLINE_S
    while left := _members(group):
        if time.monotonic() > until:
            raise TimeoutError(f"processes {left} of a dead actor outlive their SIGKILL by {_DEADLINE_S:g} s")
        time.sleep(_POLL_S)
    return len(members)


def _members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                stat = (entry / "stat").read_bytes()
                fields = stat[stat.rindex(b")") + 2 :].split()
                if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                    found.append(int(entry.name))
    return found
