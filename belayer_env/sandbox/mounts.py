"""mount(2), umount2(2) and the overlay's options, without a fork."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from belayer_env.errors import RuntimeFailed

__all__ = ["TMPFS_MAGIC", "file_system_magic", "mount", "mount_overlay", "unmount", "unmount_below"]

# Source: include/uapi/linux/mount.h, include/uapi/linux/magic.h
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2
TMPFS_MAGIC = 0x01021994
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, fstype: str, *, flags: int = 0, options: str = "") -> None:
    """mount(2).

    Raises:
        OSError: what the kernel said."""
    done = _LIBC.mount(
        source.encode(), os.fsencode(target), fstype.encode(), ctypes.c_ulong(flags), options.encode()
    )
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))


def mount_overlay(lower: Path, layer: Path, target: Path, *, flags: int = 0) -> None:
    """The image (read-only) with the writable layer on top.

    ``index=on,nfs_export=on`` gives its files the handles that CRIU needs for inotify watches.

    Raises:
        RuntimeFailed: the kernel refuses; nothing is mounted."""
    for name in (lower, layer):
        if any(c in str(name) for c in ",:\\"):
            raise RuntimeFailed(f"overlayfs takes no path with a comma, colon or backslash: {name}")
    base = f"lowerdir={lower},upperdir={layer / 'upper'},workdir={layer / 'work'}"
    try:
        mount("overlay", target, "overlay", flags=flags, options=f"{base},index=on,nfs_export=on")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise RuntimeFailed(f"cannot mount the sandbox's root file system: {error}") from error
        try:
            mount(
                "overlay", target, "overlay", flags=flags, options=base
            )  # a lower file system without file handles
        except OSError as second:
            raise RuntimeFailed(f"cannot mount the sandbox's root file system: {second}") from second


def unmount(target: Path) -> None:
    """Detach what is mounted there, however often. Idempotent."""
    while _LIBC.umount2(os.fsencode(target), MNT_DETACH) == 0:
        pass


def unmount_below(directory: Path) -> None:
    """Detach everything that is mounted in this directory, deepest first."""
    prefix = f"{directory.resolve()}/"
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4].encode().decode("unicode_escape")
        if point.startswith(prefix):
            points.append(point)
    for point in sorted(points, key=len, reverse=True):
        unmount(Path(point))


def file_system_magic(path: Path) -> int:
    """The f_type of statfs(2), 0 where it cannot be had."""
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return ctypes.c_long.from_buffer(buffer).value
