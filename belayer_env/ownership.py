"""Who owns what is left on a host: a process, told from a later one with the same pid. Only reads /proc."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Owner", "boot_id", "is_process", "process_start_time"]


def process_start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none, or only its zombie.

    Source: proc(5), /proc/PID/stat, fields 3 and 22."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_process(pid: int, start: int) -> bool:
    """Whether the process with this pid and start time (see `process_start_time`) still lives."""
    return process_start_time(pid) == start


@functools.cache
def boot_id() -> str:
    """The kernel's random name of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class Owner:
    """One process of one boot. ``pid_namespace`` is the inode of the namespace in which ``pid`` counts."""

    pid: int
    start: int
    boot: str
    pid_namespace: int

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        start = process_start_time(pid)
        if start is None:
            raise RuntimeError("/proc does not show this process: is it mounted for another pid namespace?")
        return cls(pid=pid, start=start, boot=boot_id(), pid_namespace=_pid_namespace())

    @property
    def token(self) -> str:
        """It as one word that can be part of a file name; `parse` is the inverse."""
        return f"{self.pid}.{self.start}.{self.pid_namespace}.{self.boot}"

    @classmethod
    def parse(cls, token: str) -> Owner | None:
        """The owner a `token` names; None if it is none."""
        pid, _, rest = token.partition(".")
        start, _, rest = rest.partition(".")
        namespace, _, boot = rest.partition(".")
        if not (pid.isdecimal() and start.isdecimal() and namespace.isdecimal() and boot):
            return None
        return cls(pid=int(pid), start=int(start), boot=boot, pid_namespace=int(namespace))

    def is_alive(self) -> bool:
        """Whether it lives. One in another pid namespace of this boot cannot be seen, and counts as alive."""
        if self.boot != boot_id():
            return False
        if self.pid_namespace != _pid_namespace():
            return True
        return is_process(self.pid, self.start)


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
