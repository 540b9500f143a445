"""The default store's own file system: btrfs in a sparse file, mounted by a loop device. Bytes.

Snapshots of a writable layer are O(1) on btrfs. Where the disk under the store has neither btrfs nor
reflinks, `belayer setup` makes this one; after a reboot, `ensure_mounted` brings it back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from belayer_env import paths
from belayer_env.errors import SetupError
from belayer_env.host.command import run, which
from belayer_env.spec import GIB

__all__ = ["StoreDisk", "ensure_mounted", "has_reflink", "make_store", "read_store_disk", "store_size"]

SMALLEST_BYTES = 4 * GIB
LARGEST_BYTES = 64 * GIB

FICLONE = 0x40049409
MOUNT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreDisk:
    """What a store lies on: its ``file_system``, whether that can ``reflink`` files, and its free bytes."""

    directory: Path
    file_system: str
    reflink: bool
    free_bytes: int


def store_size(free_bytes: int, wanted_bytes: int | None = None) -> int:
    """Bytes of the store's file: half of what is free, 64 GiB at most; 0 where that is below 4 GiB.

    A sparse file: it takes from the disk only what is written into it."""
    size = wanted_bytes if wanted_bytes is not None else min(free_bytes // 2, LARGEST_BYTES)
    return size if SMALLEST_BYTES <= size <= free_bytes else 0


def read_store_disk(store: Path) -> StoreDisk:
    """Of the store's directory, or of the nearest one above it that exists."""
    directory = store
    while not directory.is_dir():
        directory = directory.parent
    mounts = Path("/proc/self/mountinfo").read_text()
    return StoreDisk(
        directory,
        file_system_of(directory.resolve(), mounts),
        has_reflink(directory),
        shutil.disk_usage(directory).free,
    )


def file_system_of(directory: Path, mountinfo: str) -> str:
    """The file system type of the last mount at or above ``directory``, by the text of
    /proc/self/mountinfo."""
    best, found = -1, "unknown"
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")
        if directory.is_relative_to(point) and len(point) >= best:
            best, found = len(point), rest.split()[0]
    return found


def has_reflink(directory: Path) -> bool:
    """Whether files there can share blocks, tried with two files that no name leads to."""
    try:
        with contextlib.ExitStack() as stack:
            descriptors = []
            for _ in range(2):
                descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
                stack.callback(os.close, descriptor)
                descriptors.append(descriptor)
            source, target = descriptors
            os.write(source, b"\0" * 4096)
            fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True


def ensure_mounted(store: Path | None = None) -> bool:
    """Mount the store's file system where `make_store` once put it, if that is not done. True when it is
    there now.

    Two stats when there is nothing to do. A ``store`` other than the one it was made for is left alone.

    Raises:
        SetupError: it exists, and does not mount."""
    point = store if store is not None else paths.default_store()
    if not paths.store_image().exists() or _recorded_point() != point:
        return False
    if os.path.ismount(point):
        return True
    if os.geteuid() != 0:
        raise SetupError(f"The store {point} is not mounted, and only root mounts it: sudo belayer setup")
    with _lock():
        if not os.path.ismount(point):
            _mount(paths.store_image(), point)
    return True


def make_store(*, wanted_bytes: int | None = None) -> str:
    """Make and mount the default store's file system where that is of use; says in a sentence what came of
    it.

    Raises:
        SetupError: mkfs or mount failed for another reason than absent loop devices."""
    point = paths.default_store()
    image = paths.store_image()
    if ensure_mounted(point):
        return f"btrfs on {point}"
    disk = read_store_disk(point)
    if disk.file_system == "btrfs" or disk.reflink:
        return f"{disk.file_system} at {disk.directory} has snapshots or reflinks: nothing to make"
    copies = f"checkpoints of files will be copies ({disk.file_system} at {disk.directory})"
    if image.exists():
        return f"{image} was made for a store elsewhere ({_recorded_point()}): {copies}"
    if os.geteuid() != 0:
        return f"only root mounts a btrfs store: {copies}"
    if which("mkfs.btrfs") is None or not Path("/dev/loop-control").exists():
        return f"no mkfs.btrfs or no loop devices here: {copies}"
    if point.is_dir() and any(point.iterdir()):
        return f"{point} already holds a store, which a mount would hide: {copies}; move it away to get btrfs"
    size = store_size(disk.free_bytes, wanted_bytes)
    if not size:
        return (
            f"{disk.free_bytes / GIB:.1f} GiB free are too few for a btrfs store of 4 GiB and more: {copies}"
        )
    with _lock():
        fresh = image.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                file.truncate(size)
            fresh.chmod(0o600)
            run(["mkfs.btrfs", "--quiet", "--force", fresh], timeout_s=120).require(
                "Making the store's file system"
            )
            # Named before it is mounted: killed in between, the next call finds it and mounts it.
            _record_path().write_text(f"{point}\n")
            fresh.rename(image)
        finally:
            fresh.unlink(missing_ok=True)
        try:
            _mount(image, point)
        except SetupError as error:
            image.unlink()
            return f"no loop mount here ({str(error).splitlines()[-1]}): {copies}"
    return f"btrfs of up to {size / GIB:.0f} GiB on {point}"


def _mount(image: Path, point: Path) -> None:
    point.mkdir(parents=True, exist_ok=True, mode=0o700)
    # noatime: reading a snapshot must not write to it. discard gives freed blocks back to the disk below.
    argv: list[str | Path] = ["mount", "-t", "btrfs", "-o", "loop,noatime,discard=async", image, point]
    run(argv, timeout_s=MOUNT_TIMEOUT_S).require(f"Mounting the store {point}")
    # Checkpoints hold the memory of processes.
    point.chmod(0o700)


def _record_path() -> Path:
    """Says whose store the image is: under another XDG_STATE_HOME it must not be mounted again."""
    return paths.store_image().with_suffix(".mountpoint")


def _recorded_point() -> Path | None:
    try:
        return Path(_record_path().read_text().strip())
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One mounter at a time: a second loop device over the same btrfs would corrupt it."""
    paths.data_dir().mkdir(parents=True, exist_ok=True)
    with (paths.data_dir() / "store.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
