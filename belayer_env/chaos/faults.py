"""The faults themselves, done to a sandbox from the host as accidents there would. Seconds, bytes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil

from belayer_env.errors import BelayerError
from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.cgroup import UNIFIED, Cgroup
from belayer_env.sandbox.procs import ProcStat, below, read_procs
from belayer_env.spec import MIB

__all__ = ["FAULTS", "HasInit", "damage", "kill_restored", "kill_runtime_command", "wait_dead"]

_SHELL_SCRIPTS = ("/belayer/loop.bash", "/belayer/loop.sh")
_HOG_ROOM = 4 * MIB
_HOG_SIZE = 128 * MIB
_HOG_DEADLINE_S = 10.0
_DEATH_S = 1.0


@runtime_checkable
class HasInit(Protocol):
    """A sandbox whose init can be found on the host."""

    @property
    def init_pid(self) -> int:
        """Its host pid."""


def kill(sandbox: Sandbox, cgroup: Cgroup) -> bool:
    """SIGKILL init."""
    was_alive = sandbox.is_alive()
    sandbox.kill()
    return was_alive


def run_out_of_memory(sandbox: Sandbox, cgroup: Cgroup) -> bool:
    """Take the memory that the sandbox's limit leaves, until the kernel's OOM killer takes its init; and not
    first what the agent has running, whose end the agent would be shown, and then go on to init."""
    directory = cgroup.paths.get("memory") or cgroup.paths.get(UNIFIED)
    if directory is None or not isinstance(sandbox, HasInit) or not sandbox.is_alive():
        return False
    v1 = "memory" in cgroup.paths
    limit, usage = ("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current")
    try:
        # The kernel's own choice would be whoever has most pages resident. 1000 adds the limit to what init
        # has; but of another's pages, those of files may be charged elsewhere, and come to more than that.
        kills = cgroup.oom_kills()
        Path(f"/proc/{sandbox.init_pid}/oom_score_adj").write_text("1000")
        used = int((directory / f"memory.{usage}").read_text())
        room = max(used, max(map(_resident_bytes, cgroup.pids()), default=0)) - used + _HOG_ROOM
        (directory / f"memory.{limit}").write_text(str(used + room))
    except OSError:
        return False
    # tail keeps the last line, and there is but one.
    script = f'echo 0 >"$1" && exec 2>/dev/null && head -c {room + _HOG_SIZE} /dev/zero | tail >/dev/null'
    hog = subprocess.Popen(
        ["sh", "-c", script, "belayer-hog", str(directory / "cgroup.procs")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            hog.wait(_HOG_DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(hog.pid, signal.SIGKILL)
        hog.wait()
    if cgroup.is_frozen() and cgroup.oom_kills() > kills:
        return True  # it dies as it thaws
    wait_dead(sandbox)
    if not sandbox.is_alive():
        return True
    # The killer took somebody else instead: what is left is not what it was, and no such fault either.
    sandbox.kill()
    return False


def freeze(sandbox: Sandbox, cgroup: Cgroup) -> bool:
    """Freeze its cgroup, as an administrator or another tool might, and leave it so."""
    if not sandbox.is_alive():
        return False
    try:
        cgroup.freeze()
    except BelayerError:
        return False
    return True


def hang(sandbox: Sandbox, cgroup: Cgroup) -> bool:
    """Stop its shell with SIGSTOP, and then all that the shell has started."""
    if not isinstance(sandbox, HasInit):
        return False
    procs = read_procs(cgroup.pids())
    shells = [
        proc
        for proc in procs
        if proc.ppid == sandbox.init_pid and any(script in proc.argv for script in _SHELL_SCRIPTS)
    ]
    if not shells:
        return False
    # The shell first: what is stopped besides must never outlive it into a checkpoint.
    has_stopped = [_stop(shell, cgroup) for shell in shells]
    for proc in below(procs, {(shell.pid, shell.start_ticks) for shell in shells}):
        _stop(proc, cgroup)
    return all(has_stopped)


FAULTS: Mapping[str, Callable[[Sandbox, Cgroup], bool]] = {
    "kill": kill,
    "oom": run_out_of_memory,
    "freeze": freeze,
    "hang": hang,
}
"""Those that are done to a running sandbox; each says whether it could be."""


def kill_restored(cgroup: Cgroup) -> bool:
    """SIGKILL the processes that a restore has brought back so far."""
    pids = cgroup.pids()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def kill_runtime_command(word: str) -> bool:
    """SIGKILL a command that this process runs for a sandbox; ``word`` is in its arguments."""
    struck = False
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            argv = child.cmdline()
            if any(word in argument for argument in argv) and "belayer-hog" not in argv:
                child.kill()
                struck = True
    return struck


def damage(checkpoint: Path, rng: random.Random) -> bool:
    """Flip a byte of one of a checkpoint's files, cut it, or remove it."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and not path.is_symlink()]
    # The layer is a read-only snapshot where the store is btrfs.
    files = sorted(path for path in files if "layer" not in path.relative_to(checkpoint).parts)
    if not files:
        return False
    path, how = rng.choice(files), rng.choice(("flip", "cut", "remove"))
    try:
        data = bytearray(path.read_bytes())
        if how == "remove" or not data:
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
    except OSError:
        return False
    return True


def wait_dead(sandbox: Sandbox) -> None:
    """Until init is dead, or some seconds."""
    until = time.monotonic() + _DEATH_S
    while sandbox.is_alive() and time.monotonic() < until:
        time.sleep(0.005)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _stop(proc: ProcStat, cgroup: Cgroup) -> bool:
    try:
        pidfd = os.pidfd_open(proc.pid)
    except ProcessLookupError:
        return False
    try:
        # The pid may be somebody else's by now; held by its pidfd, it can be looked at once more.
        if proc.pid not in cgroup.pids():
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True
