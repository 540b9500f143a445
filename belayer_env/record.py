"""The files of a checkpoint as its manifest records them: found, digested, compared. Bytes, nanoseconds."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from belayer_env.disk import opened_dir
from belayer_env.errors import CheckpointRefused
from belayer_env.sandbox.tree import MAX_DEPTH

__all__ = ["FileRecord", "FoundFile", "find_files"]

BLOCK_BYTES = 1 << 20
"""What is read at once; large enough for blake3 to use several threads, small beside an image."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, by its path in there.

    ``digest`` is of the content for a regular file, the target of a "link", "MAJOR:MINOR" of a "char" or
    "block", else empty; ``xattrs`` is a digest of the extended attributes, empty if there are none. ``size``
    is 0 for all but regular files."""

    path: str
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    digest: str
    xattrs: str

    def is_untouched(self, then: FileRecord) -> bool:
        """Whether no write through the file system can have happened since ``then``: each moves the change
        time, which nobody can set back."""
        return (self.kind, self.inode, self.ctime_ns, self.size, self.mode) == (
            then.kind,
            then.inode,
            then.ctime_ns,
            then.size,
            then.mode,
        )

    def difference(self, then: FileRecord, *, digests: bool) -> str:
        """The first thing that a reader of the file would find different from ``then``; empty if nothing is.
        Inode and change time are none: a copy has others. Without ``digests`` only what a stat shows."""
        names = ("kind", "size", "mode", "uid", "gid", "mtime_ns") + (("digest", "xattrs") if digests else ())
        return next((name for name in names if getattr(self, name) != getattr(then, name)), "")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file met by `find_files`: its record, still without digests, and the bytes it takes on disk."""

    record: FileRecord
    disk_bytes: int
    dir_fd: int

    def read(self) -> FileRecord:
        """The whole record. To be called before the search goes on.

        Raises:
            OSError: the disk does not give it back."""
        name, digest = self.record.path.rpartition("/")[2], self.record.digest
        if self.record.kind == "file":
            digest = _content_digest(name, self.dir_fd, self.record.size)
        elif self.record.kind == "link":
            digest = os.readlink(name, dir_fd=self.dir_fd)
        at = f"/proc/self/fd/{self.dir_fd}/{name}"
        keys = sorted(os.listxattr(at, follow_symlinks=False))
        values = [(key, os.getxattr(at, key, follow_symlinks=False).hex()) for key in keys]
        xattrs = blake3(json.dumps(values).encode()).hexdigest() if values else ""
        return dataclasses.replace(self.record, digest=digest, xattrs=xattrs)


def find_files(directory: Path, *, leave_out: Collection[str] = ()) -> Iterator[FoundFile]:
    """Everything below ``directory`` in no set order, except the paths in ``leave_out`` with all below them.

    Raises:
        CheckpointRefused: directories are nested deeper than MAX_DEPTH ("too-deep")."""
    with opened_dir(directory) as fd:
        yield from _find_below(fd, "", 0, leave_out)


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


def _find_below(fd: int, prefix: str, depth: int, leave_out: Collection[str]) -> Iterator[FoundFile]:
    if depth > MAX_DEPTH:
        raise CheckpointRefused(
            f"directories nested more than {MAX_DEPTH} deep: {prefix[:200]}...",
            cause="too-deep",
            culprit=prefix,
        )
    with os.scandir(fd) as entries:
        for entry in entries:
            path = prefix + entry.name
            if path in leave_out:
                continue
            found = entry.stat(follow_symlinks=False)
            record = _record(path, found)
            yield FoundFile(record, found.st_blocks * 512 if record.kind == "file" else 0, fd)
            if record.kind == "dir":
                with opened_dir(entry.name, fd) as below:
                    yield from _find_below(below, path + "/", depth + 1, leave_out)


def _record(path: str, found: os.stat_result) -> FileRecord:
    kind = _KINDS[stat.S_IFMT(found.st_mode)]
    is_device = kind in ("char", "block")
    return FileRecord(
        path=path,
        kind=kind,
        size=found.st_size if kind == "file" else 0,
        mode=stat.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
        inode=found.st_ino,
        digest=f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}" if is_device else "",
        xattrs="",
    )


def _content_digest(name: str, dir_fd: int, size: int) -> str:
    # Over every block that is not all zeros, each with its offset, and the size: the same for a hole and for
    # zeros written out, and quick for a sparse file. Not by mmap: there a disk error kills the process.
    hasher = blake3(max_threads=blake3.AUTO if size > BLOCK_BYTES else 1)
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        offset = 0
        while block := _read_block(file, offset):
            if block == _ZEROS[: len(block)]:
                offset = _next_data(file, offset + len(block))
                continue
            hasher.update(offset.to_bytes(8, "little"))
            hasher.update(block)
            offset += len(block)
        hasher.update(os.fstat(file).st_size.to_bytes(8, "little"))
    finally:
        os.close(file)
    return hasher.hexdigest()


_ZEROS = bytes(BLOCK_BYTES)


def _read_block(file: int, offset: int) -> bytes:
    block = os.pread(file, BLOCK_BYTES, offset)
    while 0 < len(block) < BLOCK_BYTES:
        more = os.pread(file, BLOCK_BYTES - len(block), offset + len(block))
        if not more:
            break
        block += more
    return block


def _next_data(file: int, offset: int) -> int:
    try:
        data = os.lseek(file, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return os.fstat(file).st_size
        raise
    return data - data % BLOCK_BYTES  # blocks are counted from the file's start, wherever its holes lie
