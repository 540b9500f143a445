"""What CRIU's logs say, as typed faults. Pure: text in, exception out."""

from __future__ import annotations

import re

from belayer_env.errors import CheckpointRefused, RestoreFailed, StoreFull

__all__ = ["refusal", "restore_failure"]

# It cannot raise its own limit where root lacks CAP_SYS_RESOURCE, says so as an error, and goes on.
_NOISE = ("rlimit: Can't setup RLIMIT_NOFILE",)

_CAUSES: tuple[tuple[str, str, str], ...] = (
    # (stable word, what CRIU says, what it means)
    ("disk-full", r"No space left|Disk quota", "the disk is full"),
    ("ghost-too-big", r"[Gg]host file.* (?:size|big|limit)", "a deleted file that is still open is too big"),
    ("io_uring", r"io_uring", "a process uses io_uring"),
    ("inotify", r"fsnotify|inotify|fanotify", "a process watches a file by inotify that has no file handle"),
    ("traced", r"ptrace|[Ss]eize|traced|Unable to (?:freeze|interrupt)", "a debugger holds a process"),
    (
        "tcp-connection",
        r"Connected TCP socket",
        "a TCP connection is open, and the Engine's runc restores none; echo tcp-established "
        ">>/etc/criu/runc.conf allows it",
    ),
    (
        "file-lock",
        r"file locks are hold",
        "a process holds a file lock, and the Engine's runc restores none; echo file-locks "
        ">>/etc/criu/runc.conf allows it",
    ),
    (
        "foreign-user",
        r"Can't get rlimit",
        "a process of another user, whose limits root cannot read here without CAP_SYS_RESOURCE",
    ),
    ("deadline", r"[Tt]imeout", "its processes could not be stopped in time"),
    ("outside-file", r"Can't lookup mount", "a process holds a file from outside the container"),
    ("terminal", r"tty: ", "a terminal is shared in a way that CRIU cannot rebuild"),
    ("unix-socket", r"unix: ", "a unix socket that leads outside the container, or is half open"),
    ("unsupported-file", r"[Uu]nsupported|anon_inode|Can't dump", "an open file of a kind CRIU cannot dump"),
)


def refusal(log: str, *, ghost_bytes: int) -> CheckpointRefused | StoreFull:
    """What a failed dump's log says. ``ghost_bytes``: the limit that was in force, for the message."""
    errors = _error_lines(log)
    pid = _pid_of("\n".join(errors))
    for cause, pattern, meaning in _CAUSES:
        found = next((line for line in errors if re.search(pattern, line)), None)
        if found is None:
            continue
        if cause == "disk-full":
            return StoreFull(f"no room for the checkpoint: {found}")
        message = f"the sandbox cannot be checkpointed: {meaning} ({found})"
        if cause == "ghost-too-big":
            message += f"; Limits.ghost_bytes is {ghost_bytes}: raise it to carry such files"
        return CheckpointRefused(message, cause=cause, culprit=found, pid=pid)
    first = errors[0] if errors else "CRIU left no word"
    return CheckpointRefused(f"the sandbox cannot be checkpointed: {first}", culprit=first, pid=pid)


def restore_failure(log: str, exit_code: int) -> RestoreFailed:
    """What a failed restore's log says."""
    errors = _error_lines(log)
    words = " | ".join(errors[:3]) or f"criu restore exited with {exit_code} and left no word"
    return RestoreFailed(f"the checkpoint did not restore: {words}")


def _error_lines(log: str) -> list[str]:
    return [
        re.sub(r"^\([\d.]+\)\s*", "", re.sub(r"Error \([^)]*\):\s*", "", line)).strip()
        for line in log.splitlines()
        if "Error (" in line and not any(noise in line for noise in _NOISE)
    ]


def _pid_of(text: str) -> int | None:
    found = re.search(r"\(pid: (\d+)", text)
    return int(found[1]) if found else None
