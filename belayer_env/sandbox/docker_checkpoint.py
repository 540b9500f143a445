"""What CRIU and the Engine need of each other: mounts from outside, the images' place, the restore's log.

A dump is made by CRIU directly, on a container that the Engine started; the Engine restores it, by runc. Both
must name the mounts from outside alike. Source: runc 1.1, libcontainer/container_linux.go.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from belayer_env.disk import disk_errors
from belayer_env.errors import RestoreFailed, RuntimeFailed
from belayer_env.sandbox import criu
from belayer_env.sandbox.criu_log import restore_failure
from belayer_env.sandbox.tree import copy_tree

__all__ = [
    "CHECKPOINT_NAME",
    "RestoreLog",
    "engine_externals",
    "find_bundle",
    "install_images",
    "read_externals",
    "runc_restores",
]

CHECKPOINT_NAME = "belayer"
_RUNC_CRIU_OPTIONS = Path("/etc/criu/runc.conf")
_POLL_S = 0.002


def find_bundle(pid: int) -> Path:
    """The OCI bundle of the container whose init this is: the working directory of its shim, init's parent.

    Raises:
        RuntimeFailed: there is none."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        bundle = Path(f"/proc/{parent}/cwd").readlink()
    except OSError as error:
        raise RuntimeFailed(f"cannot find the bundle of the container of process {pid}: {error}") from error
    if not (bundle / "config.json").is_file():
        raise RuntimeFailed(
            f"{bundle} is no container's bundle: what started process {pid} is no shim of ours"
        )
    return bundle


def read_externals(pid: int, bundle: Path) -> tuple[str, ...]:
    """`engine_externals` of a running container."""
    with disk_errors("reading the container's configuration"):
        config = json.loads((bundle / "config.json").read_text())
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    root = Path(f"/proc/{pid}/root")

    def is_file(path: str) -> bool:
        there = root / path[1:]
        return there.exists() and not there.is_dir()

    return engine_externals(config, mounts, is_file=is_file)


def engine_externals(
    config: Mapping[str, Any], mountinfo: str, *, is_file: Callable[[str], bool]
) -> tuple[str, ...]:
    """CRIU's --external arguments for a dump that runc is to restore. Pure.

    ``mountinfo``: of the container's init. ``is_file``: whether a path of the container is there and no
    directory."""
    points = [mount["destination"] for mount in config["mounts"] if mount["type"] == "bind"]
    if any(mount["type"] == "cgroup" for mount in config["mounts"]):
        # One bind for each v1 hierarchy; with v2 it is one mount, which CRIU makes anew.
        for line in mountinfo.splitlines():
            point, kind = line.split(" ")[4], line.partition(" - ")[2].split(" ")[0]
            if kind == "cgroup" and point.startswith("/sys/fs/cgroup/"):
                points.append(point)
    masked = [path for path in config["linux"].get("maskedPaths") or [] if is_file(path)]
    return tuple(
        [f"mnt[{point}]:{point}" for point in points] + [f"mnt[{path}]:/dev/null" for path in masked]
    )


def runc_restores(options: Path = _RUNC_CRIU_OPTIONS) -> tuple[str, ...]:
    """Which of CRIU's options in `criu.RESTORABLE` a restore by runc has. The Engine can set none of them,
    and no environment variable gets through to CRIU: only this file does."""
    try:
        lines = [line.strip() for line in options.read_text().splitlines()]
    except OSError:
        return ()
    return tuple(option for option in criu.RESTORABLE if option in lines)


def install_images(images: Path, container_dir: Path) -> None:
    """Put CRIU's images where the Engine looks for a container's checkpoint."""
    with disk_errors("handing the checkpoint to the Engine"):
        place = container_dir / "checkpoints"
        place.mkdir(mode=0o700, exist_ok=True)
        copy_tree(images, place / CHECKPOINT_NAME, reflink=True)


class RestoreLog:
    """CRIU's log of a restore by the Engine, which removes it as soon as the restore has failed: opened in
    time, from a thread. Without ``bundles``, the directory of the Engine's bundles, there is none."""

    def __init__(self, bundles: Path | None, container: str) -> None:
        self._path = bundles / container / "work/restore.log" if bundles else None
        self._file: IO[str] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="belayer-restore-log")

    def __enter__(self) -> RestoreLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._file is not None:
            self._file.close()

    def failure(self, refusal: RuntimeFailed) -> RestoreFailed:
        """What the log says, or else what the Engine said."""
        self._ended.set()
        self._thread.join()
        log = self._file.read() if self._file is not None else ""
        if "Error (" in log:
            return restore_failure(log, 1)
        return RestoreFailed(f"the checkpoint did not restore: {refusal}")

    def _watch(self) -> None:
        while self._path is not None and not self._ended.is_set():
            with contextlib.suppress(OSError):
                self._file = self._path.open(errors="replace")
                return
            self._ended.wait(_POLL_S)
