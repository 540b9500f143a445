"""One command of the host, run to its end or its deadline. Seconds; output is stdout and stderr in order."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from belayer_env.errors import SetupError

__all__ = ["Done", "run", "search_path", "which"]

# What is kept of a command's output: enough for an error message, never a flood.
KEPT_BYTES = 256 * 1024
# A package manager stopped in mid-write should get to put its lock and state down before it is killed.
TERMINATE_GRACE_S = 5.0

TIMED_OUT = 124
NOT_FOUND = 127


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended. ``exit_code`` is 124 at the deadline, 127 where there is no such command."""

    argv: tuple[str, ...]
    exit_code: int
    output: str

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0

    def tail(self, lines: int = 12) -> str:
        """The last lines it wrote."""
        return "\n".join(self.output.strip().splitlines()[-lines:])

    def require(self, doing: str, *, remedy: str = "") -> Done:
        """Itself.

        Raises:
            SetupError: it failed; says what it was doing, the command, its own last words and the remedy."""
        if self.ok:
            return self
        how = "ran past its deadline" if self.exit_code == TIMED_OUT else f"exited with {self.exit_code}"
        message = f"{doing} failed: `{shlex.join(self.argv)}` {how}\n{self.tail()}"
        raise SetupError(f"{message}\n{remedy}".strip())


def search_path() -> str:
    """PATH with the system's sbin directories at its end: a login without them still has runc and losetup."""
    parts = [part for part in os.environ.get("PATH", "").split(":") if part]
    parts += [
        part for part in ("/usr/local/sbin", "/usr/sbin", "/usr/bin", "/sbin", "/bin") if part not in parts
    ]
    return ":".join(parts)


def which(name: str) -> str | None:
    """Where the command lies, by `search_path`."""
    return shutil.which(name, path=search_path())


def run(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stdin: bytes | IO[bytes] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Done:
    """Run ``argv`` in a process group of its own; ``env`` is added to the environment.

    ``stdin`` is at most 64 KiB of bytes, or an open file. ``on_line`` sees each line as it comes.
    Whatever interrupts it, the whole group is ended first. How the command ends is never raised."""
    words = tuple(str(word) for word in argv)
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if isinstance(stdin, bytes) else (stdin or subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PATH": search_path(), "LC_ALL": "C.UTF-8", **(env or {})},
        )
    except (FileNotFoundError, PermissionError) as error:
        return Done(words, NOT_FOUND, str(error))
    assert process.stdout is not None
    with process.stdout:
        try:
            if isinstance(stdin, bytes) and process.stdin is not None:
                # Fits the pipe: cannot block. A command that reads nothing of it says so by its exit code.
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(stdin)
            output, in_time = _read(process, time.monotonic() + timeout_s, on_line)
            exit_code = process.wait() if in_time else TIMED_OUT
        finally:
            _end(process)
    return Done(words, exit_code, output)


def _read(
    process: subprocess.Popen[bytes], deadline: float, on_line: Callable[[str], None] | None
) -> tuple[str, bool]:
    """Everything it wrote until it ended, and whether it ended in time."""
    assert process.stdout is not None
    kept = bytearray()
    line = bytearray()
    descriptor = process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            # A daemon that it left behind may hold the pipe open for ever: its own end counts as well.
            ready = selector.select(min(left_s, 0.2))
            if not ready and process.poll() is not None:
                break
            if not ready:
                continue
            piece = os.read(descriptor, 65536)
            if not piece:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0))
                break
            kept += piece
            del kept[:-KEPT_BYTES]
            if on_line is not None:
                line += piece
                *whole, rest = bytes(line).split(b"\n")
                line = bytearray(rest)
                for text in whole:
                    on_line(text.decode(errors="backslashreplace").strip())
    return kept.decode(errors="backslashreplace"), process.poll() is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
