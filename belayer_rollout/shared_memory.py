"""What processes share through /dev/shm, and killed ones leave there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

__all__ = ["remove_shared_memory", "shared_memory_of"]

DIRECTORY = Path("/dev/shm")

KINDS = {"psm_": "shared_memory", "sem.mp-": "semaphore"}
"""How Python's multiprocessing names its files there, and what its resource tracker calls them."""


def shared_memory_of(pids: Iterable[int | str]) -> frozenset[str]:
    """Names of what these processes ("self": this one) map of that which multiprocessing made.

    Found by inode: glibc makes a semaphore under another name, by which the maps of its maker know it."""
    inodes = {inode for pid in pids for inode in _mapped_inodes(pid)}
    names = set()
    for kind in KINDS:
        for path in DIRECTORY.glob(f"{kind}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino in inodes:
                    names.add(path.name)
    return frozenset(names)


def _mapped_inodes(pid: int | str) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(f"{DIRECTORY}/"):
                yield int(inode)


def remove_shared_memory(names: Iterable[str]) -> None:
    """Remove what killed processes left, unless this process maps it, too."""
    for name in set(names) - shared_memory_of(("self",)):
        kind = next(kind for prefix, kind in KINDS.items() if name.startswith(prefix))
        with contextlib.suppress(FileNotFoundError):
            (DIRECTORY / name).unlink()
            # The tracker is this process's, shared by its children: it would complain of a leak at its end.
            resource_tracker.unregister(f"/{name.removeprefix('sem.')}", kind)
