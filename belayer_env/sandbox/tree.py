"""Copying a directory tree with all that an overlay's upper directory can hold. Bytes and nanoseconds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from belayer_env.disk import opened_dir
from belayer_env.errors import CheckpointRefused

__all__ = ["FICLONE", "MAX_DEPTH", "EarlierCopy", "SourceState", "copy_tree"]

FICLONE = 0x40049409
"""Share all data blocks of another file. Source: include/uapi/linux/fs.h, ioctl_ficlone(2)."""

MAX_DEPTH = 256
"""Directories below one another that we copy or record: two open descriptors each. A tree of node_modules or
of nested build outputs stays below 40."""


SourceState = tuple[int, int, int, int]
"""What a regular file looked like when it was copied: size, mtime_ns, ctime_ns, inode."""


@dataclass(frozen=True, slots=True)
class EarlierCopy:
    """A copy made before of the same tree, and what the source files looked like then, by path. Files that
    look the same still are linked to it: list only those that cannot change and look the same."""

    root: Path
    files: Mapping[str, SourceState]


def copy_tree(
    source: Path, target: Path, *, reflink: bool = False, earlier: EarlierCopy | None = None
) -> dict[str, SourceState]:
    """Copy a directory with all that an overlay's upper directory can hold: extended attributes, whiteouts
    and other special files, hard links within it, holes, owners, modes, modification times. Returns what each
    regular file looked like. ``target`` must not exist; after an error it is partly there.

    Raises:
        CheckpointRefused: directories are nested deeper than MAX_DEPTH ("too-deep").
        OSError: as the file system says."""
    target.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        source_fd = stack.enter_context(opened_dir(source))
        target_fd = stack.enter_context(opened_dir(target))
        copy = _TreeCopy(target_fd, _clone_data if reflink else _copy_data)
        if earlier:
            copy.earlier = earlier.files
            copy.earlier_fd = stack.enter_context(opened_dir(earlier.root))
        copy.copy_entries(source_fd, target_fd, "", 0)
        _copy_attributes(f"/proc/self/fd/{source_fd}/.", f"/proc/self/fd/{target_fd}/.", os.fstat(source_fd))
        return copy.states


@dataclass(slots=True)
class _TreeCopy:
    """Works on directory descriptors, as paths in the tree may be longer than PATH_MAX."""

    root_fd: int
    copy_data: Callable[[int, int, os.stat_result], None]
    earlier: Mapping[str, SourceState] = field(default_factory=dict)
    earlier_fd: int = -1
    states: dict[str, SourceState] = field(default_factory=dict)
    linked: dict[int, str] = field(default_factory=dict)

    def copy_entries(self, source_fd: int, target_fd: int, prefix: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise CheckpointRefused(
                f"directories nested more than {MAX_DEPTH} deep: {prefix[:200]}...",
                cause="too-deep",
                culprit=prefix,
            )
        with os.scandir(source_fd) as entries:
            for entry in entries:
                self._copy_entry(entry, source_fd, target_fd, prefix, depth)

    def _copy_entry(
        self, entry: os.DirEntry[str], source_fd: int, target_fd: int, prefix: str, depth: int
    ) -> None:
        name, path = entry.name, prefix + entry.name
        found = entry.stat(follow_symlinks=False)
        kind = stat.S_IFMT(found.st_mode)
        if found.st_nlink > 1 and kind != stat.S_IFDIR:
            first = self.linked.get(found.st_ino)
            if first is not None and _try_link(first, self.root_fd, name, target_fd):
                self._note(path, found)
                return
            self.linked[found.st_ino] = path
        if kind == stat.S_IFREG:
            self._copy_file(name, path, source_fd, target_fd, found)
            return
        if kind == stat.S_IFDIR:
            os.mkdir(name, mode=0o700, dir_fd=target_fd)
            with opened_dir(name, source_fd) as from_fd, opened_dir(name, target_fd) as to_fd:
                self.copy_entries(from_fd, to_fd, path + "/", depth + 1)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source_fd), name, dir_fd=target_fd)
        else:
            os.mknod(name, mode=found.st_mode, device=found.st_rdev, dir_fd=target_fd)
        _copy_attributes(f"/proc/self/fd/{source_fd}/{name}", f"/proc/self/fd/{target_fd}/{name}", found)

    def _copy_file(self, name: str, path: str, source_fd: int, target_fd: int, found: os.stat_result) -> None:
        self._note(path, found)
        is_unchanged = self.earlier.get(path) == self.states[path]
        if is_unchanged and _try_link(path, self.earlier_fd, name, target_fd):
            return
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        from_fd = os.open(name, flags | os.O_RDONLY | os.O_NONBLOCK, dir_fd=source_fd)
        try:
            to_fd = os.open(name, flags | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target_fd)
            try:
                self.copy_data(from_fd, to_fd, found)
                _copy_attributes(from_fd, to_fd, found)
            finally:
                os.close(to_fd)
        finally:
            os.close(from_fd)

    def _note(self, path: str, found: os.stat_result) -> None:
        if stat.S_ISREG(found.st_mode):
            self.states[path] = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _try_link(path: str, from_fd: int, name: str, to_fd: int) -> bool:
    try:
        os.link(path, name, src_dir_fd=from_fd, dst_dir_fd=to_fd, follow_symlinks=False)
    except OSError as error:
        # Gone from the previous snapshot, or linked as often as the file system allows: copy it instead.
        if error.errno not in (errno.ENOENT, errno.EMLINK, errno.EXDEV, errno.ENAMETOOLONG):
            raise
        return False
    return True


def _copy_attributes(source: int | str, target: int | str, found: os.stat_result) -> None:
    is_link = stat.S_ISLNK(found.st_mode)
    follow = isinstance(target, int)
    os.chown(target, found.st_uid, found.st_gid, follow_symlinks=follow)
    if not is_link:
        # After chown, which clears set-uid; Path cannot take a descriptor.
        os.chmod(target, stat.S_IMODE(found.st_mode))  # noqa: PTH101
    for name in os.listxattr(source, follow_symlinks=follow):
        value = os.getxattr(source, name, follow_symlinks=follow)
        os.setxattr(target, name, value, follow_symlinks=follow)  # after chown, which clears capabilities
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=follow)


def _clone_data(source_fd: int, target_fd: int, found: os.stat_result) -> None:
    try:
        fcntl.ioctl(target_fd, FICLONE, source_fd)
    except OSError as error:
        # Another file system, or a file whose blocks cannot be shared.
        if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ETXTBSY):
            raise
        _copy_data(source_fd, target_fd, found)


def _copy_data(source_fd: int, target_fd: int, found: os.stat_result) -> None:
    os.ftruncate(target_fd, found.st_size)
    offset = 0
    while offset < found.st_size:
        start, stop = offset, found.st_size
        if found.st_blocks * 512 < found.st_size:
            try:
                start = os.lseek(source_fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # nothing but a hole is left
            stop = os.lseek(source_fd, start, os.SEEK_HOLE)
        while start < stop:
            block = os.pread(source_fd, min(stop - start, 1 << 20), start)
            if not block:
                raise OSError(errno.EIO, "a file became shorter while it was copied")
            start += os.pwrite(target_fd, block, start)
        offset = stop
