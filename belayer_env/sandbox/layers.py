"""The writable layer of a sandbox: made, snapshotted, cloned, bounded, dropped. Sizes in bytes, times in ns.

A layer is a directory with ``upper/`` and ``work/``, the upperdir and workdir of an overlay mount. How a
snapshot is taken depends on the file system of the store:

    btrfs     a layer is a subvolume, a snapshot a read-only subvolume: O(1)
    reflink   ``upper/`` is copied, the data blocks are shared (XFS)
    copy      ``upper/`` is copied; files unchanged since the previous snapshot are hard links to its copies
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from belayer_env.disk import disk_errors, libc, opened_dir, remove_tree, sync_filesystem
from belayer_env.errors import RuntimeFailed, RuntimeUnavailable
from belayer_env.ownership import Owner
from belayer_env.sandbox.tree import FICLONE, EarlierCopy, copy_tree

__all__ = [
    "BtrfsLayers",
    "CopyLayers",
    "LayerStore",
    "is_subvolume",
    "open_layers",
]

UPPER, WORK = "upper", "work"
SOURCES = "sources.json"
"""In a snapshot of the copy kind: what each source file looked like when it was copied."""

RACY_NS = 1_000_000_000
"""A file changed this shortly before a snapshot may change again under the same time stamp (a clock tick is
up to 10 ms), so it is never taken for unchanged. Source: git's Documentation/technical/racy-git.txt."""

# Source: include/uapi/linux/btrfs.h and fs.h, as _IOC(direction, type, number, size) of asm-generic/ioctl.h.
_SUBVOL_CREATE = 0x5000940E
_SNAP_DESTROY = 0x5000940F
_SNAP_CREATE_V2 = 0x50009417
_QUOTA_CTL = 0xC0109428
_QGROUP_LIMIT = 0x8030942B
_QUOTA_RESCAN_WAIT = 0x0000942E
_SUBVOL_RDONLY = 1 << 1
_QUOTA_ENABLE = 1
_LIMIT_MAX_RFER = 1 << 0
_NO_LIMIT = (1 << 64) - 1
_SUBVOLUME_INODE = 256


class LayerStore(Protocol):
    """Makes layers and snapshots. Safe to use from many threads, but not on one layer at once.

    Every method raises StoreFull when the disk or a quota is full, and RuntimeFailed on any other refusal
    of the file system; what it was about to make is then gone again."""

    @property
    def kind(self) -> str:
        """One of "btrfs", "reflink" and "copy"."""

    def create(self, layer: Path) -> None:
        """An empty layer. Its parent exists, itself it does not."""

    def snapshot(self, source: Path, target: Path, *, previous: Path | None = None) -> None:
        """A frozen copy of the layer ``source`` at ``target``; nobody writes to the source meanwhile.
        ``previous``, an earlier snapshot, may save copying; only the copy kind looks at it."""

    def clone(self, snapshot: Path, target: Path) -> None:
        """A writable layer with what ``snapshot`` holds, sharing nothing that a write could reach. ``work/``
        is empty: an overlay's index directory in there would name the upper directory it was made for."""

    def drop(self, layer: Path) -> None:
        """Remove a layer or snapshot, or a directory that holds some. Idempotent: a missing one is fine."""

    def limit(self, layer: Path, max_bytes: int) -> None:
        """Bound what the layer holds, shared blocks included.

        Raises:
            RuntimeUnavailable: this kind cannot."""

    def settle(self, layer: Path) -> None:
        """Write the layer's dirty data out, so that a snapshot soon after need not."""


def open_layers(directory: Path) -> LayerStore:
    """The layer store that suits the file system of ``directory``, found by trial."""
    with disk_errors(f"trying the file system of {directory}"):
        trial = _trial_path(directory)
        btrfs = BtrfsLayers()
        try:
            btrfs.create(trial)
        except RuntimeFailed:
            pass  # not btrfs, or not ours to make subvolumes on
        else:
            btrfs.drop(trial)
            return btrfs
        return CopyLayers(reflink=_can_reflink(directory))


@dataclass(frozen=True, slots=True)
class BtrfsLayers:
    """Layers as btrfs subvolumes.

    The ioctls are called straight: starting a `btrfs` process takes longer than the snapshot (3 ms)."""

    @property
    def kind(self) -> str:
        """Always "btrfs"."""
        return "btrfs"

    def create(self, layer: Path) -> None:
        """See `LayerStore.create`."""
        with disk_errors(f"making layer {layer}"), self._undone(layer):
            with opened_dir(layer.parent) as parent:
                _ioctl(parent, _SUBVOL_CREATE, struct.pack("q4088s", 0, os.fsencode(layer.name)))
            layer.chmod(0o755)
            _make_dir(layer / UPPER)
            _make_dir(layer / WORK)

    def snapshot(self, source: Path, target: Path, *, previous: Path | None = None) -> None:
        """See `LayerStore.snapshot`. On disk when it returns: the kernel commits the transaction first.
        A read-only subvolume cannot be moved to another directory, only along with its parent."""
        with disk_errors(f"taking snapshot {target} of {source}"):
            _snapshot(source, target, flags=_SUBVOL_RDONLY)

    def clone(self, snapshot: Path, target: Path) -> None:
        """See `LayerStore.clone`. It is not bounded, whatever its origin was."""
        with disk_errors(f"cloning {snapshot} to {target}"), self._undone(target):
            _snapshot(snapshot, target, flags=0)
            # A snapshot inherits the limit: one of a layer that was full would not even take a new work/.
            with opened_dir(target) as fd, contextlib.suppress(OSError):  # no quotas, no limit
                _ioctl(fd, _QGROUP_LIMIT, _limit_request(_NO_LIMIT))
            if (target / WORK).exists():
                shutil.rmtree(target / WORK)
            _make_dir(target / WORK)

    def drop(self, layer: Path) -> None:
        """See `LayerStore.drop`. The space comes back a little later: the kernel cleans up behind us."""
        with disk_errors(f"dropping {layer}"):
            if is_subvolume(layer):
                with opened_dir(layer.parent) as parent, contextlib.suppress(FileNotFoundError):
                    _ioctl(parent, _SNAP_DESTROY, struct.pack("q4088s", 0, os.fsencode(layer.name)))
            elif layer.is_dir() and not layer.is_symlink():
                # rm cannot remove a read-only subvolume. Ours lie directly in a checkpoint or a home.
                for child in list(layer.iterdir()):
                    if is_subvolume(child):
                        self.drop(child)
        remove_tree(layer)

    def limit(self, layer: Path, max_bytes: int) -> None:
        """See `LayerStore.limit`. Turns on the file system's quotas the first time."""
        with disk_errors(f"limiting {layer}"), opened_dir(layer) as fd:
            request = _limit_request(max_bytes)
            try:
                _ioctl(fd, _QGROUP_LIMIT, request)
            except OSError as error:
                if error.errno not in (errno.ENOTCONN, errno.EINVAL, errno.ENOENT):
                    raise
                _ioctl(fd, _QUOTA_CTL, struct.pack("QQ", _QUOTA_ENABLE, 0))
                _ioctl(fd, _QUOTA_RESCAN_WAIT, b"")  # until then usage is not known, and no limit holds
                _ioctl(fd, _QGROUP_LIMIT, request)

    def settle(self, layer: Path) -> None:
        """See `LayerStore.settle`. By a throw-away snapshot: that flushes this subvolume and no other."""
        # Writable, so that one left by a killed process is a plain directory to whoever removes its parent.
        throwaway = layer.parent / f".settle-{secrets.token_hex(8)}"
        with disk_errors(f"settling {layer}"):
            _snapshot(layer, throwaway, flags=0)
            self.drop(throwaway)

    @contextlib.contextmanager
    def _undone(self, layer: Path) -> Iterator[None]:
        fresh = not layer.exists()
        try:
            yield
        except BaseException:
            if fresh:
                self.drop(layer)
            raise


@dataclass(frozen=True, slots=True)
class CopyLayers:
    """Layers as plain directories; ``reflink``: data blocks are shared where the file system can."""

    reflink: bool = False

    @property
    def kind(self) -> str:
        """Either "reflink" or "copy"."""
        return "reflink" if self.reflink else "copy"

    def create(self, layer: Path) -> None:
        """See `LayerStore.create`."""
        with disk_errors(f"making layer {layer}"), _undone_tree(layer):
            _make_dir(layer)
            _make_dir(layer / UPPER)
            _make_dir(layer / WORK)

    def snapshot(self, source: Path, target: Path, *, previous: Path | None = None) -> None:
        """See `LayerStore.snapshot`. Holds no ``work/``."""
        with disk_errors(f"taking snapshot {target} of {source}"), _undone_tree(target):
            _make_dir(target)
            if self.reflink:
                copy_tree(source / UPPER, target / UPPER, reflink=True)
                return
            # A page that is dirty and mapped can be written again without moving the file's times; once
            # written out it is write-protected, and the next write moves them. Only then times prove a thing.
            sync_filesystem(source)
            started_ns = time.time_ns()
            layer = (source / UPPER).stat()
            identity = [layer.st_dev, layer.st_ino]
            earlier = _read_sources(previous, identity) if previous else None
            copied = copy_tree(source / UPPER, target / UPPER, earlier=earlier)
            settled = {path: state for path, state in copied.items() if state[2] < started_ns - RACY_NS}
            (target / SOURCES).write_text(json.dumps({"layer": identity, "files": settled}))

    def clone(self, snapshot: Path, target: Path) -> None:
        """See `LayerStore.clone`."""
        with disk_errors(f"cloning {snapshot} to {target}"), _undone_tree(target):
            _make_dir(target)
            copy_tree(snapshot / UPPER, target / UPPER, reflink=self.reflink)
            _make_dir(target / WORK)

    def drop(self, layer: Path) -> None:
        """See `LayerStore.drop`."""
        remove_tree(layer)

    def limit(self, layer: Path, max_bytes: int) -> None:
        """See `LayerStore.limit`: always raises RuntimeUnavailable."""
        raise RuntimeUnavailable(
            f"Limits.disk_bytes needs a store on btrfs, and {layer} is not on one. Leave disk_bytes out, "
            "name a btrfs directory as store, or make one: belayer setup"
        )

    def settle(self, layer: Path) -> None:
        """See `LayerStore.settle`."""
        with disk_errors(f"settling {layer}"):
            sync_filesystem(layer)


def is_subvolume(path: Path) -> bool:
    """Whether it is the root of a btrfs subvolume. Ask only on btrfs: elsewhere any directory may match."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_ino == _SUBVOLUME_INODE


def _read_sources(previous: Path, identity: list[int]) -> EarlierCopy | None:
    try:
        data = json.loads((previous / SOURCES).read_text())
        if data["layer"] != identity:
            return None  # a snapshot of another layer: a restored sandbox's, say
        states = {path: (int(a), int(b), int(c), int(d)) for path, (a, b, c, d) in data["files"].items()}
        return EarlierCopy(previous / UPPER, states)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # then everything is copied


def _trial_path(directory: Path) -> Path:
    # As the store names what is in its tmp/, so that one left by a killed process is swept.
    return directory / f"trial-{secrets.token_hex(8)}.{Owner.here().token}"


def _can_reflink(directory: Path) -> bool:
    trial = [_trial_path(directory) for _ in range(2)]
    try:
        trial[0].write_bytes(b"x" * 4096)
        with trial[0].open("rb") as source, trial[1].open("wb") as target:
            fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
            raise
        return False
    finally:
        for path in trial:
            path.unlink(missing_ok=True)
    return True


def _snapshot(source: Path, target: Path, *, flags: int) -> None:
    with opened_dir(source) as source_fd, opened_dir(target.parent) as parent:
        request = struct.pack("qQQ32s4040s", source_fd, 0, flags, b"", os.fsencode(target.name))
        _ioctl(parent, _SNAP_CREATE_V2, request)


def _limit_request(max_bytes: int) -> bytes:
    # Quota group 0 stands for the subvolume's own.
    return struct.pack("QQQQQQ", 0, _LIMIT_MAX_RFER, max_bytes, 0, 0, 0)


def _make_dir(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)  # whatever the umask


@contextlib.contextmanager
def _undone_tree(path: Path) -> Iterator[None]:
    fresh = not path.exists()
    try:
        yield
    except BaseException:
        if fresh:
            remove_tree(path)
        raise


def _ioctl(fd: int, request: int, argument: bytes) -> None:
    # Not fcntl.ioctl: it holds the interpreter lock for arguments above 1024 bytes, all through the snapshot.
    buffer = ctypes.create_string_buffer(argument, len(argument)) if argument else None
    if libc().ioctl(fd, request, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
