"""The counter of a pid namespace, from which the kernel gives the next process its pid.

A restore brings every process back with its pid, but not the counter: it would begin anew, and a replayed
`sleep 9 & echo $!` print another number than was told."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import subprocess
import threading
from collections.abc import Iterator

from belayer_env.disk import libc
from belayer_env.sandbox.criu import run_deadlined

__all__ = ["counting_on"]

_LOG = logging.getLogger("belayer")
_DEADLINE_S = 5.0
_CLONE_NEWPID = 0x20000000  # include/uapi/linux/sched.h
_SCRIPT = 'echo "$0" >/proc/sys/kernel/ns_last_pid'


@contextlib.contextmanager
def counting_on(init_pid: int, last_pid: int) -> Iterator[None]:
    """Set the counter of the namespace that this init (by its host pid) has made, beside what is done in the
    block: once that has ended, the next process gets the pid after ``last_pid``. 0: it is not known.

    Where the kernel does not let us, pids begin anew, and nothing else is lost."""
    if last_pid <= 0:
        yield
        return
    # A namespace is entered by one thread, for good, or rather by what it starts from then on.
    thread = threading.Thread(target=_set, args=(init_pid, last_pid), name="belayer-pids")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _set(init_pid: int, last_pid: int) -> None:
    try:
        namespace = os.open(f"/proc/{init_pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc().setns(namespace, _CLONE_NEWPID) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        finally:
            os.close(namespace)
        # The file is that of the namespace of who writes, who has a pid in there for a moment.
        if code := run_deadlined(["sh", "-c", _SCRIPT, str(last_pid)], timeout_s=_DEADLINE_S):
            raise OSError(f"exit status {code}")
    except (OSError, TimeoutError, subprocess.SubprocessError) as error:
        _LOG.info("the pids of a restored sandbox begin anew: %s", error)
