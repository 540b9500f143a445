"""Image references and the read-only root file system behind each, unpacked once, by content address."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from blake3 import blake3

from belayer_env.errors import ImageNotFound, ImageUnreadable, InvalidInput, StoreFull
from belayer_env.host.command import Done, run, which
from belayer_env.sandbox.oci_layout import config_facts, pick_manifest, read_config

__all__ = ["ImageRef", "RootFs", "parse_image_ref", "resolve_image", "resolve_in_root"]

UNPACK_TIMEOUT_S = 900.0
DOWNLOAD_TIMEOUT_S = 900.0
ENGINE_TIMEOUT_S = 60

# Marks a container made to be read from, with the pid of its maker: a killed one leaves it behind.
EXPORT_LABEL = "belayer.export"

# As the kernel: more hops than this are a loop.
MAX_SYMLINKS = 40

# What the distribution specification allows in a name; the registry's host and the digest are optional.
NAME = re.compile(
    r"(?:(?:[A-Za-z0-9-]+\.)*[A-Za-z0-9-]+(?::\d+)?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
IMAGE_ID = re.compile(r"sha256:[0-9a-f]{64}")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """``target`` is a path, or for "name" the whole name; ``tag`` is of "oci" only."""

    kind: Literal["name", "rootfs", "oci"]
    target: str
    tag: str = ""

    def __str__(self) -> str:
        if self.kind == "name":
            return self.target
        return f"{self.kind}:{self.target}" + (f":{self.tag}" if self.tag else "")


@dataclass(frozen=True, slots=True)
class RootFs:
    """A root file system with a usable /bin/sh, only to be read.

    ``digest`` names its content ("blake3:..." or "sha256:..."; of a directory: which one, and its top level).
    ``env`` and ``workdir`` are what the image's own configuration asks for."""

    path: Path
    digest: str
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None


def parse_image_ref(text: str) -> ImageRef:
    """What `name:tag`, `rootfs:PATH` or `oci:PATH[:tag]` refers to; `str` of the answer is the inverse.

    Raises:
        InvalidInput: it is none of these."""
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInput(f"{text!r} is no image reference: {_FORMS}")
    scheme, _, rest = text.partition(":")
    if scheme in ("rootfs", "oci") and not rest:
        raise InvalidInput(f"{text!r} names no path: {_FORMS}")
    if scheme == "rootfs":
        return ImageRef("rootfs", rest)
    if scheme == "oci":
        path, colon, tag = rest.rpartition(":")
        # A colon before the last slash belongs to the path.
        if not colon or "/" in tag:
            return ImageRef("oci", rest)
        if not path or not TAG.fullmatch(tag):
            raise InvalidInput(f"{text!r} has no valid path and tag: {_FORMS}")
        return ImageRef("oci", path, tag)
    if not NAME.fullmatch(text) and not IMAGE_ID.fullmatch(text):
        raise InvalidInput(f"{text!r} is no image reference: {_FORMS}")
    return ImageRef("name", text)


_FORMS = "write name:tag, rootfs:DIRECTORY, rootfs:ARCHIVE.tar or oci:LAYOUT[:tag]"


def resolve_image(ref: str, images_dir: Path) -> RootFs:
    """The root file system that ``ref`` names. A directory is used in place; all else is unpacked once into
    ``images_dir/DIGEST/rootfs``, by one process at a time, and appears there whole or not at all.

    Raises:
        InvalidInput: the reference is malformed.
        ImageNotFound: it names nothing here, and no registry gives it.
        ImageUnreadable: what it names is no root file system with a /bin/sh.
        StoreFull: no room to unpack it."""
    image = parse_image_ref(ref)
    kept = _Kept(images_dir)
    if image.kind == "rootfs":
        path = Path(image.target).expanduser().absolute()
        if path.is_dir():
            return _in_place(path)
        return _from_tar(path, kept)
    if image.kind == "oci":
        return _from_layout(Path(image.target).expanduser().absolute(), image.tag, kept)
    return _from_name(image.target, kept)


def resolve_in_root(root: Path, path: str) -> Path | None:
    """Where ``path`` of a container with this root lies on the host, with symlinks followed as inside it: an
    absolute one starts at ``root``, and none leads out of it. None where there is nothing. Does not follow
    the last mount."""
    done = root
    todo = [part for part in path.split("/") if part not in ("", ".")]
    hops = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            done = done.parent if done != root else root
            continue
        step = done / part
        try:
            mode = step.lstat().st_mode
        except OSError:
            return None
        if not stat.S_ISLNK(mode):
            done = step
            continue
        hops += 1
        if hops > MAX_SYMLINKS:
            return None
        target = str(step.readlink())
        if target.startswith("/"):
            done = root
        todo = [word for word in target.split("/") if word not in ("", ".")] + todo
    return done


class _Kept:
    """The unpacked images under one directory: ``DIGEST/rootfs`` and ``DIGEST/image.json``; ``refs/``
    remembers which digest a file or a name had."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, digest: str) -> RootFs | None:
        home = self._home(digest)
        try:
            config = json.loads((home / "image.json").read_text())
        except FileNotFoundError:
            return None
        return RootFs(home / "rootfs", digest, config["env"], config["workdir"])

    @contextlib.contextmanager
    def aside(self) -> Iterator[Path]:
        """A directory to unpack in, under the lock; gone afterwards, with whatever was not published."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Left by a killed process: nobody else unpacks while we hold the lock.
            for half_made in self._directory.glob(".new-*"):
                run(["rm", "-rf", half_made], timeout_s=UNPACK_TIMEOUT_S)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self._directory) as aside:
                yield Path(aside)

    def publish(self, rootfs: Path, digest: str, config: Mapping[str, Any], source: str) -> RootFs:
        """Move what was unpacked in `aside` to its place.

        Raises:
            ImageUnreadable: it has no usable /bin/sh."""
        _require_shell(rootfs, source)
        for directory in (rootfs, rootfs.parent):
            directory.chmod(0o755)
        (rootfs.parent / "image.json").write_text(json.dumps({**config, "source": source}))
        if (there := self.get(digest)) is not None:
            return there
        rootfs.parent.rename(self._home(digest))
        there = self.get(digest)
        assert there is not None
        return there

    def recall(self, key: str) -> RootFs | None:
        """The image that `remember` noted, if it is still there."""
        try:
            return self.get((self._directory / "refs" / _hash(key)).read_text())
        except FileNotFoundError:
            return None

    def remember(self, key: str, digest: str) -> None:
        note = self._directory / "refs" / _hash(key)
        note.parent.mkdir(exist_ok=True)
        fresh = note.with_suffix(f".{os.getpid()}")
        fresh.write_text(digest)
        fresh.rename(note)

    def _home(self, digest: str) -> Path:
        return self._directory / digest.replace(":", "-")


def _in_place(directory: Path) -> RootFs:
    root = directory.resolve()
    try:
        top = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(root))
        facts = [
            str(root),
            str(root.stat().st_ino),
            *(f"{name} {st.st_ino} {st.st_mtime_ns}" for name, st in top),
        ]
    except OSError as error:
        raise ImageUnreadable(f"rootfs:{directory} cannot be read: {error}") from error
    _require_shell(root, f"rootfs:{directory}")
    return RootFs(root, f"blake3:{_hash(chr(10).join(facts))}")


def _from_tar(archive: Path, kept: _Kept) -> RootFs:
    source = f"rootfs:{archive}"
    try:
        facts = archive.stat()
        # Looked at before it is opened: opening a FIFO would wait for ever.
        if not stat.S_ISREG(facts.st_mode):
            raise ImageUnreadable(f"{source} is neither a directory nor a file")
        if not facts.st_size:
            raise ImageUnreadable(f"{source} is empty")
        key = f"tar {archive.resolve()} {facts.st_dev} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"
        if (there := kept.recall(key)) is not None:
            return there
        digest = f"blake3:{blake3(max_threads=blake3.AUTO).update_mmap(archive).hexdigest()}"
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ImageNotFound(
            f"{source} does not exist: name a directory, or a tar such as `docker export CONTAINER` writes"
        ) from error
    except OSError as error:
        raise ImageUnreadable(f"{source} cannot be read: {error}") from error
    with kept.aside() as aside:
        there = kept.get(digest)
        if there is None:
            rootfs = _untar(archive, aside / "image" / "rootfs", source)
            there = kept.publish(rootfs, digest, {"env": {}, "workdir": None}, source)
        kept.remember(key, digest)
    return there


def _from_layout(layout: Path, tag: str, kept: _Kept) -> RootFs:
    source = f"oci:{layout}" + (f":{tag}" if tag else "")
    if not layout.exists():
        raise ImageNotFound(
            f"{source} does not exist: name an OCI layout, as `skopeo copy docker://NAME oci:DIR:TAG` makes"
        )
    tag, digest = pick_manifest(layout, tag, source)
    if (there := kept.get(digest)) is not None:
        return there
    with kept.aside() as aside:
        if (there := kept.get(digest)) is not None:
            return there
        if not tag:
            # umoci finds manifests by tag alone; skopeo takes the only one of a layout and gives it one.
            _done(run(["skopeo", "--insecure-policy", "copy", f"oci:{layout}", f"oci:{aside}/tagged:it"],
                      timeout_s=UNPACK_TIMEOUT_S), source)  # fmt: skip
            layout, tag = aside / "tagged", "it"
        return kept.publish(
            _unpack_layout(layout, tag, aside, source), digest, read_config(layout, digest), source
        )


def _from_name(name: str, kept: _Kept) -> RootFs:
    if (exported := _from_engine(name, kept)) is not None:
        return exported
    if (pulled := kept.recall(f"name {name}")) is not None:
        return pulled
    advice = (
        f"make it known to the Docker Engine (docker pull {name}, docker build, docker import), "
        "or use rootfs:DIRECTORY, rootfs:ARCHIVE.tar or oci:LAYOUT"
    )
    if which("skopeo") is None or IMAGE_ID.fullmatch(name):
        raise ImageNotFound(f"No image {name} on this host's Docker Engine: {advice}")
    with kept.aside() as aside:
        if (pulled := kept.recall(f"name {name}")) is not None:
            return pulled
        copied = run(
            ["skopeo", "--insecure-policy", "copy", f"docker://{name}", f"oci:{aside}/pulled:it"],
            timeout_s=DOWNLOAD_TIMEOUT_S,
        )
        if not copied.ok:
            _raise_if_full(copied, name)
            raise ImageNotFound(f"No image {name} here, and no registry gives it: {advice}\n{copied.tail(2)}")
        layout = aside / "pulled"
        tag, digest = pick_manifest(layout, "it", name)
        there = kept.get(digest) or kept.publish(
            _unpack_layout(layout, tag, aside, name), digest, read_config(layout, digest), name
        )
        kept.remember(f"name {name}", digest)
        return there


def _from_engine(name: str, kept: _Kept) -> RootFs | None:
    """None where no Engine answers or it does not have it."""
    # Imported when asked for: a task on a directory needs no Docker SDK.
    import docker
    import requests
    from docker.errors import DockerException
    from docker.errors import ImageNotFound as Unknown

    from belayer_env.host.engine import connection_refusal

    if connection_refusal():
        return None
    try:
        client = docker.from_env(timeout=ENGINE_TIMEOUT_S)
    except (DockerException, requests.RequestException):
        return None
    with contextlib.closing(client):
        try:
            image = client.images.get(name)
            digest = str(image.id)
            if (there := kept.get(digest)) is not None:
                return there
            with kept.aside() as aside:
                if (there := kept.get(digest)) is not None:
                    return there
                archive = aside / "exported.tar"
                for left in client.containers.list(all=True, filters={"label": EXPORT_LABEL}):
                    if not psutil.pid_exists(int(left.labels[EXPORT_LABEL])):
                        left.remove(force=True)
                # Never started: only what it would start from is read.
                container = client.containers.create(
                    digest, command=["/bin/sh"], network_mode="none", labels={EXPORT_LABEL: str(os.getpid())}
                )
                try:
                    with archive.open("wb") as file:
                        for piece in container.export():
                            file.write(piece)  # type: ignore[arg-type]  # the stubs say str; it is bytes
                finally:
                    container.remove(force=True)
                rootfs = _untar(archive, aside / "image" / "rootfs", name)
                return kept.publish(rootfs, digest, config_facts(image.attrs.get("Config") or {}), name)
        except Unknown:
            return None
        except (DockerException, requests.RequestException) as error:
            raise ImageUnreadable(f"The Docker Engine has {name}, but does not give it: {error}") from error
        except OSError as error:
            raise StoreFull(f"No room to unpack {name}: {error}") from error


def _unpack_layout(layout: Path, tag: str, aside: Path, source: str) -> Path:
    bundle = aside / "image"
    rootless = ["--rootless"] if os.geteuid() != 0 else []
    _done(
        run(["umoci", "unpack", *rootless, "--image", f"{layout}:{tag}", bundle], timeout_s=UNPACK_TIMEOUT_S),
        source,
    )
    # umoci leaves its own notes beside the root; only the root is kept.
    for note in bundle.iterdir():
        if note.name != "rootfs":
            note.unlink()
    return bundle / "rootfs"


def _untar(archive: Path, rootfs: Path, source: str) -> Path:
    rootfs.mkdir(parents=True)
    as_packed = ("--numeric-owner", "--same-permissions", "--xattrs", "--xattrs-include=*")
    argv: list[str | Path] = ["tar", "--extract", *as_packed, "--directory", rootfs, "--file", archive]
    _done(run(argv, timeout_s=UNPACK_TIMEOUT_S), source)
    return rootfs


def _done(done: Done, source: str) -> None:
    if done.ok:
        return
    _raise_if_full(done, source)
    how = f"`{done.argv[0]}` exited with {done.exit_code}"
    raise ImageUnreadable(f"{source} could not be unpacked, {how}: {done.tail(3)}")


def _raise_if_full(done: Done, source: str) -> None:
    if "No space left on device" in done.output or "Disk quota exceeded" in done.output:
        raise StoreFull(f"No room to unpack {source}: {done.tail(1)}")


def _require_shell(root: Path, source: str) -> None:
    shell = resolve_in_root(root, "/bin/sh")
    if shell is not None:
        facts = shell.stat()
        if stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o111 and facts.st_size > 0:
            return
    hint = ""
    if (root / "manifest.json").exists() or (root / "index.json").exists():
        hint = (
            ". It looks like an archive of `docker save`: give it to `docker load`, and use the image's name"
        )
    raise ImageUnreadable(f"{source} has no usable /bin/sh, which a sandbox's shell needs{hint}")


def _hash(text: str) -> str:
    return blake3(text.encode(errors="surrogateescape")).hexdigest()
