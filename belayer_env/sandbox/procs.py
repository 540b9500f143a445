"""Processes as /proc shows them: parents, start times, ignored signals. Host pids unless said otherwise."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcStat", "below", "foreground", "locked_mapping", "pids_naming", "read_procs"]

_QUIT_BIT = 1 << (signal.SIGQUIT - 1)
_INT_BIT = 1 << (signal.SIGINT - 1)


@dataclass(frozen=True, slots=True)
class ProcStat:
    """One process. ``pid`` and ``ppid`` are the host's, ``ns_pid`` is the innermost namespace's.

    ``start_ticks``: clock ticks since boot (sysconf SC_CLK_TCK a second). ``state``: the letter of
    /proc/PID/stat."""

    pid: int
    ppid: int
    ns_pid: int
    state: str
    start_ticks: int
    ignored_signals: int
    argv: tuple[str, ...]

    @property
    def ignores_interrupt(self) -> bool:
        """Whether it was started as a background job of a non-interactive shell (POSIX: SIGINT and SIGQUIT
        ignored), or behaves as one."""
        return bool(self.ignored_signals & _QUIT_BIT and self.ignored_signals & _INT_BIT)


def pids_naming(text: str, *, programs: Container[str]) -> list[int]:
    """Host pids of these programs' processes (by the name of the executable) whose command line holds the
    text."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                argv = os.fsdecode((process / "cmdline").read_bytes())
                if text in argv and Path(argv.partition("\0")[0]).name in programs:
                    found.append(int(process.name))
    return found


def locked_mapping(pids: Container[int]) -> tuple[int, str] | None:
    """One of these processes that holds a POSIX lock on a file that it has mapped too, and the file.

    Source: proc(5), /proc/locks and /proc/PID/maps; files are told by their inode numbers."""
    for line in Path("/proc/locks").read_text().splitlines():
        # "3: POSIX  ADVISORY  READ 1554 00:2d:373137 128 128"; one that waits has "->" after its number.
        words = line.split()
        if len(words) < 6 or words[1] != "POSIX" or not words[4].isdecimal() or int(words[4]) not in pids:
            continue
        pid, inode = int(words[4]), words[5].rpartition(":")[2]
        with contextlib.suppress(OSError):
            for mapping in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = mapping.split(maxsplit=5)
                if fields[4] == inode and len(fields) == 6:
                    return pid, fields[5]
    return None


def read_procs(pids: Iterable[int]) -> list[ProcStat]:
    """What /proc says of these pids, those that are gone left out."""
    found = []
    for pid in pids:
        try:
            # The command name is in parentheses and may hold anything, ")" too.
            stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            status = Path(f"/proc/{pid}/status").read_bytes()
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        fields = dict(line.split(b":", 1) for line in status.splitlines() if b":" in line)
        found.append(
            ProcStat(
                pid=pid,
                ppid=int(stat[1]),
                ns_pid=int(fields.get(b"NSpid", b"0").split()[-1]),
                state=stat[0].decode(),
                start_ticks=int(stat[19]),
                ignored_signals=int(fields.get(b"SigIgn", b"0"), 16),
                argv=tuple(os.fsdecode(a) for a in argv.rstrip(b"\0").split(b"\0")) if argv else (),
            )
        )
    return found


def foreground(procs: Iterable[ProcStat], shell_pid: int, since_ticks: int) -> list[ProcStat]:
    """What the shell is waiting for: its descendants, less its background jobs.

    A child of the shell counts as a background job when it was there before the command began, or when
    SIGINT and SIGQUIT are ignored in it, as POSIX has a non-interactive shell start `job &`. Daemons that
    re-parented themselves to init are nobody's descendants here. Zombies are left out."""
    procs = list(procs)
    jobs = [proc for proc in procs if proc.ppid == shell_pid]
    waited_for = [job for job in jobs if job.start_ticks >= since_ticks and not job.ignores_interrupt]
    return below(procs, {(job.pid, job.start_ticks) for job in waited_for})


def below(procs: Iterable[ProcStat], roots: Container[tuple[int, int]]) -> list[ProcStat]:
    """These processes and their descendants, zombies left out. ``roots``: pairs of pid and start_ticks, as a
    pid alone may have been given to another process meanwhile."""
    procs = list(procs)
    children: dict[int, list[ProcStat]] = {}
    for proc in procs:
        children.setdefault(proc.ppid, []).append(proc)
    wave = [proc for proc in procs if (proc.pid, proc.start_ticks) in roots]
    found = []
    while wave:
        found += wave
        wave = [child for proc in wave for child in children.get(proc.pid, [])]
    return [proc for proc in found if proc.state not in "ZX"]
