"""A root file system as a tar stream, for engines that take images only so."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["packed"]


@contextmanager
def packed(root: Path) -> Iterator[IO[bytes]]:
    """The directory, made into a tar while it is read; nothing of it goes to a disk."""
    argv = ["tar", "--create", "--numeric-owner", "--one-file-system", "--directory", str(root), "."]
    null = subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()
