"""From an image reference to an image of the Docker Engine. Seconds."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer_env.errors import (
    ImageNotFound,
    ImageUnreadable,
    RuntimeFailed,
    SandboxGone,
)
from belayer_env.sandbox.docker_engine import Engine
from belayer_env.sandbox.image import IMAGE_ID, parse_image_ref, resolve_image

__all__ = ["EngineImage", "engine_image"]

REPOSITORY = "belayer/rootfs"
_PACK_TIMEOUT_S = 900.0
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineImage:
    """``id`` is what the Engine makes containers from; ``digest`` names the content the user referred to."""

    id: str
    digest: str
    env: Mapping[str, str]


def engine_image(engine: Engine, ref: str, images_dir: Path) -> EngineImage:
    """The Engine's image for ``ref``: a name it has or can pull, or a root file system that is imported into
    it, once a digest (as `belayer/rootfs:DIGEST`, to be removed with `docker rmi` when no longer wanted).

    Raises:
        InvalidInput: the reference is malformed.
        ImageNotFound: it names nothing here, and no registry gives it.
        ImageUnreadable: what it names is no usable root file system.
        StoreFull: no room for it.
        EngineUnavailable: no Engine to ask."""
    if parse_image_ref(ref).kind != "name":
        return _imported(engine, ref, images_dir)
    config = _inspect(engine, ref) or _pulled(engine, ref)
    facts = config.get("Config") or {}
    if facts.get("Volumes"):
        # What a program writes into a volume is not in the container's layer: no checkpoint would hold it.
        return _imported(engine, ref, images_dir)
    env = dict(entry.split("=", 1) for entry in facts.get("Env") or [] if "=" in entry)
    return EngineImage(id=str(config["Id"]), digest=str(config["Id"]), env=env)


def _inspect(engine: Engine, name: str) -> dict[str, Any] | None:
    try:
        with engine.client(f"looking for image {name}") as client:
            return dict(client.images.get(name).attrs)
    except SandboxGone:  # how the Engine says "no such thing"
        return None


def _pulled(engine: Engine, name: str) -> dict[str, Any]:
    advice = (
        f"make it known to the Docker Engine (docker pull {name}, docker build, docker import), "
        "or use rootfs:DIRECTORY, rootfs:ARCHIVE.tar or oci:LAYOUT"
    )
    if IMAGE_ID.fullmatch(name):
        raise ImageNotFound(f"No image {name} on this host's Docker Engine: {advice}")
    try:
        with engine.client(f"pulling image {name}") as client:
            client.images.pull(name)
    except (SandboxGone, RuntimeFailed) as error:
        raise ImageNotFound(f"No image {name} here, and no registry gives it: {advice}\n{error}") from error
    found = _inspect(engine, name)
    if found is None:
        raise ImageNotFound(f"No image {name} here after it was pulled: {advice}")
    return found


def _imported(engine: Engine, ref: str, images_dir: Path) -> EngineImage:
    rootfs = resolve_image(ref, images_dir)
    tag = rootfs.digest.replace(":", "-")
    name = f"{REPOSITORY}:{tag}"
    found = _inspect(engine, name)
    words = ""
    if found is None:
        images_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (images_dir / "import.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _inspect(engine, name)
            if found is None:
                words = _import(engine, rootfs.path, tag)
                found = _inspect(engine, name)
    if found is None:
        raise ImageUnreadable(f"the Docker Engine did not import {ref}: {words[-500:].strip()}")
    return EngineImage(id=str(found["Id"]), digest=rootfs.digest, env=rootfs.env)


def _import(engine: Engine, root: Path, tag: str) -> str:
    """What the Engine said: a refusal half-way comes with a good status."""
    with _packed(root) as pieces, engine.client(f"importing {root}") as client:
        return str(client.api.import_image_from_stream(pieces, repository=REPOSITORY, tag=tag))


@contextlib.contextmanager
def _packed(root: Path) -> Iterator[Iterator[bytes]]:
    """The directory as a tar stream, with owners and extended attributes, made while it is read."""
    argv = [
        "tar",
        "--create",
        "--numeric-owner",
        "--xattrs",
        "--one-file-system",
        "--directory",
        str(root),
        ".",
    ]
    null = subprocess.DEVNULL
    process = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null)
    timer = threading.Timer(_PACK_TIMEOUT_S, process.kill)
    timer.start()

    def pieces() -> Iterator[bytes]:
        assert process.stdout is not None
        while piece := process.stdout.read(_CHUNK):
            yield piece
        # 1: a file changed while it was read, or a socket was left out. More: the stream has been cut short.
        if (code := process.wait()) not in (0, 1):
            raise ImageUnreadable(f"rootfs:{root} could not be packed: tar ended with {code}")

    try:
        yield pieces()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
