"""A peer's command line, run and timed. Seconds."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from belayer_env.sandbox.criu import await_exit

__all__ = ["PeerFailed", "timed", "words_of"]

DEADLINE_S = 300.0


class PeerFailed(Exception):
    """A peer's command failed; the message holds its last words."""


def timed(argv: Sequence[str | Path], *, env: Mapping[str, str], stdin: IO[bytes] | None = None) -> float:
    """Wall time of a command that must succeed.

    Raises:
        PeerFailed: it did not, or ran past the deadline."""
    return _run(argv, env, stdin)[0]


def words_of(argv: Sequence[str | Path], *, env: Mapping[str, str]) -> str:
    """What a command that must succeed wrote.

    Raises:
        PeerFailed: see `timed`."""
    return _run(argv, env, None)[1].strip()


def _run(argv: Sequence[str | Path], env: Mapping[str, str], stdin: IO[bytes] | None) -> tuple[float, str]:
    # A file, no pipe: conmon and its like keep what they inherit open, and the clock would wait for them.
    with tempfile.TemporaryFile() as sink:
        started = time.monotonic()
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=stdin or subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
        code, ended = await_exit(process, timeout_s=DEADLINE_S)
        took_s = time.monotonic() - started
        sink.seek(0)
        output = sink.read().decode(errors="backslashreplace")
    if code != 0:
        last = " / ".join(output.strip().splitlines()[-3:])
        how = f"exited with {code}" if ended else f"ran past {DEADLINE_S:g} s"
        raise PeerFailed(f"`{' '.join(map(str, argv))[:200]}` {how}: {last}")
    return took_s, output
