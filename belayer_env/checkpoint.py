"""What a checkpoint is on disk: its manifest, sealed when it is made and verified before it is used.

A checkpoint directory holds

    manifest.json   what it is, where it was made, and every other file with its digest
    images/         CRIU's images (tier FULL only)
    layer/          a layer snapshot; its ``work/`` is of no use to anyone and is not recorded

Bytes, nanoseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from belayer_env.disk import disk_errors, sync_filesystem, sync_path
from belayer_env.errors import CheckpointCorrupt, CheckpointRefused, IncompatibleCheckpoint
from belayer_env.record import FileRecord, find_files
from belayer_env.sandbox.layers import WORK, is_subvolume
from belayer_env.spec import Tier

__all__ = [
    "CheckpointRef",
    "HostFingerprint",
    "Manifest",
    "check_host",
    "host_fingerprint",
    "read_manifest",
    "seal",
    "verify",
]

VERSION = 1
MANIFEST, IMAGES, LAYER = "manifest.json", "images", "layer"

CARRY_MARGIN_NS = 1_000_000_000
"""A file changed this shortly before a checkpoint may change again within the same clock tick (10 ms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """Names one checkpoint. ``step`` is how many of the agent's steps its state contains; ``size_bytes`` is
    what its files take on disk, blocks shared with other checkpoints included."""

    id: str
    episode_id: str
    task_digest: str
    step: int
    tier: Tier
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFingerprint:
    """What a dumped process may have relied on: it goes on only where all of this is still there."""

    machine: str
    kernel: str
    cpu_flags: tuple[str, ...]
    criu_version: str

    @property
    def cpu_digest(self) -> str:
        """The flags in one word, to compare hosts by."""
        return blake3(" ".join(self.cpu_flags).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is known of a checkpoint. ``layers`` is the kind of layer store it was made on, ``meta`` the
    runtime's data, ``taken_ns`` the time of the save, ``digest`` that of all the rest."""

    version: int
    ref: CheckpointRef
    runtime: str
    image_digest: str
    host: HostFingerprint
    meta: Mapping[str, Any]
    layers: str
    taken_ns: int
    files: tuple[FileRecord, ...]
    digest: str = ""


def host_fingerprint(criu_version: str) -> HostFingerprint:
    """This host's."""
    return HostFingerprint(
        machine=platform.machine(),
        kernel=platform.release(),
        cpu_flags=_cpu_flags(),
        criu_version=criu_version,
    )


def check_host(manifest: Manifest, here: HostFingerprint, *, runtime: str) -> None:
    """Whether ``runtime`` on the host ``here`` can restore it. Without processes (tier FILES) only runtime
    and the machine's architecture matter.

    Raises:
        IncompatibleCheckpoint: it cannot, and why."""
    there = manifest.host
    what = f"checkpoint {manifest.ref.id}"
    if manifest.runtime != runtime:
        raise IncompatibleCheckpoint(
            f'{what} was made by runtime "{manifest.runtime}", not "{runtime}": '
            f'restore it with runtime="{manifest.runtime}"'
        )
    if there.machine != here.machine:
        raise IncompatibleCheckpoint(
            f"{what} was made on {there.machine}, and this is {here.machine}: restore it on {there.machine}"
        )
    if manifest.ref.tier is Tier.FILES:
        return
    if missing := sorted(set(there.cpu_flags) - set(here.cpu_flags)):
        raise IncompatibleCheckpoint(
            f"{what} was made on a CPU with {' '.join(missing)}, which this one lacks: "
            "restore it on a host whose CPU has these flags"
        )
    if _kernel_version(here.kernel) < _kernel_version(there.kernel):
        raise IncompatibleCheckpoint(
            f"{what} was made on Linux {there.kernel}, and this is the older {here.kernel}: "
            "restore it on a host with that kernel or a newer one"
        )


def seal(
    directory: Path,
    ref: CheckpointRef,
    *,
    runtime: str,
    image_digest: str,
    host: HostFingerprint,
    meta: Mapping[str, Any],
    layers: str,
    previous: Manifest | None = None,
) -> Manifest:
    """Record every file and write the manifest; all is on disk when it returns. ``ref.size_bytes`` is set.

    ``previous`` is the manifest of an earlier checkpoint of the same episode: on btrfs its digests are taken
    over for files whose inode and change time are the same; with copied layers, files that are linked to it
    are checked against it, lest its damage be sealed as right.

    Raises:
        CheckpointCorrupt: a file linked to the previous checkpoint is not what that one recorded.
        CheckpointRefused: directories are nested too deep.
        StoreFull: no room."""
    with disk_errors(f"sealing {directory}"):
        taken_ns = directory.stat().st_mtime_ns  # when the last of images/ and layer/ was made
        known = {record.path: record for record in previous.files} if previous else {}
        settled_ns = previous.taken_ns - CARRY_MARGIN_NS if previous and layers == "btrfs" else 0
        files = []
        size_bytes = 0
        for found in find_files(directory, leave_out=_NOT_RECORDED):
            record = found.record
            before = known.get(record.path)
            if before and record.is_untouched(before) and record.ctime_ns < settled_ns:
                record = dataclasses.replace(record, digest=before.digest, xattrs=before.xattrs)
            else:
                record = found.read()
                if before and layers == "copy":
                    _check_linked(record, before)
            files.append(record)
            size_bytes += found.disk_bytes
        manifest = Manifest(
            version=VERSION,
            ref=dataclasses.replace(ref, size_bytes=size_bytes),
            runtime=runtime,
            image_digest=image_digest,
            host=host,
            meta=meta,
            layers=layers,
            taken_ns=taken_ns,
            files=tuple(files),
        )
        body = _encode(manifest)
        digest = blake3(body).hexdigest()
        _sync(directory, files, layers)
        _write_durably(directory / MANIFEST, _HEAD + digest.encode() + _NECK + body + _TAIL)
        return dataclasses.replace(manifest, digest=digest)


def read_manifest(directory: Path) -> Manifest:
    """The manifest, itself verified; the files it lists are not looked at.

    Raises:
        CheckpointCorrupt: it is missing, or not as it was written."""
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: {error.strerror}", path=MANIFEST) from error
    digest_end = len(_HEAD) + 64
    body = data[digest_end + len(_NECK) : -len(_TAIL)]
    digest = data[len(_HEAD) : digest_end]
    # Byte for byte, so that no edit is too small to be seen.
    if data != _HEAD + blake3(body).hexdigest().encode() + _NECK + body + _TAIL:
        raise CheckpointCorrupt(f"{path} is not as it was written", path=MANIFEST)
    try:
        return _decode(body, digest.decode())
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read by this version: {error}", path=MANIFEST) from error


def verify(directory: Path, *, deep: bool = False) -> Manifest:
    """Compare a checkpoint with its manifest.

    Files of ``layer/`` are not read again when the layer store is btrfs and inode, change time, size and mode
    are as recorded: no write through the file system leaves the change time, and under it btrfs has checksums
    of its own. ``deep`` reads them too.

    Raises:
        CheckpointCorrupt: a file or the manifest is cut, changed, missing or added; ``path`` is the first."""
    manifest = read_manifest(directory)
    expected = {record.path: record for record in manifest.files}
    try:
        for found in find_files(directory, leave_out=_NOT_RECORDED):
            path = found.record.path
            recorded = expected.pop(path, None)
            if recorded is None:
                raise CheckpointCorrupt(f"{directory}: {path} was added", path=path)
            in_layer = path == LAYER or path.startswith(LAYER + "/")
            is_trusted = in_layer and not deep and manifest.layers == "btrfs"
            if is_trusted and found.record.is_untouched(recorded):
                continue
            # What a stat shows first: a link in a file's place, or half a file, is not worth reading.
            wrong = found.record.difference(recorded, digests=False)
            wrong = wrong or found.read().difference(recorded, digests=True)
            if wrong:
                raise CheckpointCorrupt(f"{directory}: {wrong} of {path} has changed", path=path)
    except OSError as error:
        # A disk that cannot read a file back, or one that vanished in between.
        raise CheckpointCorrupt(f"{directory}: {error}", path=error.filename or "") from error
    except CheckpointRefused as error:
        raise CheckpointCorrupt(f"{directory}: {error}", path=error.culprit) from error
    if expected:
        path = min(expected)
        raise CheckpointCorrupt(f"{directory}: {path} is missing", path=path)
    return manifest


_NOT_RECORDED = (MANIFEST, f"{LAYER}/{WORK}")

# The manifest file is one JSON object whose only members are these two, always written the same way.
_HEAD, _NECK, _TAIL = b'{"digest":"', b'","manifest":', b"}\n"


def _check_linked(record: FileRecord, before: FileRecord) -> None:
    # The same inode under the same path: a hard link that the copy kind made to save copying.
    if record.kind == "file" and record.inode == before.inode and record.digest != before.digest:
        raise CheckpointCorrupt(
            f"{record.path} of the previous checkpoint was changed on disk", path=record.path
        )


def _encode(manifest: Manifest) -> bytes:
    data = {
        "version": manifest.version,
        "ref": dataclasses.asdict(manifest.ref),
        "runtime": manifest.runtime,
        "image_digest": manifest.image_digest,
        "host": dataclasses.asdict(manifest.host) | {"cpu_digest": manifest.host.cpu_digest},
        "meta": dict(manifest.meta),
        "layers": manifest.layers,
        "taken_ns": manifest.taken_ns,
        "files": [[getattr(record, name) for name in _RECORD_FIELDS] for record in manifest.files],
    }
    # ASCII: names that are not UTF-8 come as lone surrogates, which JSON can escape and UTF-8 cannot hold.
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode("ascii")


def _decode(body: bytes, digest: str) -> Manifest:
    data = json.loads(body)
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}, not {VERSION}")
    host = data["host"]
    return Manifest(
        version=data["version"],
        ref=CheckpointRef(**data["ref"] | {"tier": Tier(data["ref"]["tier"])}),
        runtime=data["runtime"],
        image_digest=data["image_digest"],
        host=HostFingerprint(
            machine=host["machine"],
            kernel=host["kernel"],
            cpu_flags=tuple(host["cpu_flags"]),
            criu_version=host["criu_version"],
        ),
        meta=data["meta"],
        layers=data["layers"],
        taken_ns=data["taken_ns"],
        files=tuple(FileRecord(*record) for record in data["files"]),
        digest=digest,
    )


_RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(FileRecord))


def _sync(directory: Path, files: list[FileRecord], layers: str) -> None:
    layer = directory / LAYER
    if layers != "btrfs" or (layer.exists() and not is_subvolume(layer)):
        sync_filesystem(directory)  # one call for the thousands of files of a copied layer
        return
    # The kernel committed the snapshot when it made it; what is left are the images.
    for record in files:
        if (
            record.kind in ("file", "dir")
            and not record.path.startswith(LAYER + "/")
            and record.path != LAYER
        ):
            sync_path(directory / record.path)
    sync_path(directory)


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_path(path.parent)


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, and Arm
            return tuple(sorted(set(value.split())))
    return ()


def _kernel_version(release: str) -> tuple[int, int]:
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
