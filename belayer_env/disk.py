"""What the disk is asked below the level of pathlib, and how its refusals become faults."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from belayer_env.errors import RuntimeFailed, StoreFull

__all__ = ["disk_errors", "libc", "opened_dir", "remove_tree", "sync_filesystem", "sync_path"]

REMOVE_TIMEOUT_S = 600.0
"""For a tree of millions of files. A removal that hangs is a broken disk."""


def remove_tree(path: Path) -> None:
    """Remove a file or directory with all below it, however deep; a missing one is fine, and mounts are not
    entered.

    Raises:
        RuntimeFailed: something is still there, with what rm said."""
    if not os.path.lexists(path):
        return
    command = ["rm", "-rf", "--one-file-system", "--", os.fspath(path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=REMOVE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeFailed(f"removing {path} took more than {REMOVE_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise RuntimeFailed(f"removing {path}: {done.stderr.decode(errors='replace').strip()}")


def sync_path(path: Path) -> None:
    """Write out a file's data, or a directory's list of names (fsync)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_filesystem(path: Path) -> None:
    """Write out all that is dirty on the file system of ``path`` (syncfs)."""
    with opened_dir(path) as fd:
        if libc().syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(path))


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn errors of the file system into faults: no room into StoreFull, all else into RuntimeFailed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{doing}: {error.strerror}") from error
        raise RuntimeFailed(f"{doing}: {error}") from error


@contextlib.contextmanager
def opened_dir(path: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    """The directory, open for the time of the block. ``path`` is relative to ``dir_fd``, if given."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, for calls that Python does not have; a failed one leaves ``ctypes.get_errno()``."""
    library = ctypes.CDLL(None, use_errno=True)
    library.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
    return library
