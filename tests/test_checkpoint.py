from __future__ import annotations

import dataclasses
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from belayer_env.checkpoint import (
    CheckpointRef,
    HostFingerprint,
    Manifest,
    check_host,
    host_fingerprint,
    read_manifest,
    seal,
    verify,
)
from belayer_env.errors import CheckpointCorrupt, CheckpointRefused, IncompatibleCheckpoint
from belayer_env.sandbox.layers import LayerStore
from belayer_env.spec import Tier
from tests.store_dirs import LAYER_KINDS, btrfs_dir, layer_store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers hold what only root can make")

HERE = HostFingerprint(machine="x86_64", kernel="6.18.2", cpu_flags=("avx", "sse"), criu_version="4.2")
REF = CheckpointRef(id="ck-1", episode_id="ep-1", task_digest="t", step=3, tier=Tier.FULL, size_bytes=0)


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    with btrfs_dir() as directory:
        yield directory


@pytest.fixture(params=LAYER_KINDS)
def layers(request: pytest.FixtureRequest) -> LayerStore:
    return layer_store(request.param)


@pytest.fixture
def home(layers: LayerStore, disk: Path, tmp_path: Path) -> Iterator[Path]:
    home = tmp_path if layers.kind == "copy" else disk / f"home-{time.time_ns()}"
    home.mkdir(exist_ok=True)
    layers.create(home / "source")
    upper = home / "source" / "upper"
    (upper / "etc").mkdir()
    (upper / "etc" / "passwd").write_text("root")
    (upper / "link").symlink_to("etc/passwd")
    (upper / os.fsdecode(b"\xff\xfe")).write_text("name")
    os.mknod(upper / "gone", stat.S_IFCHR, os.makedev(0, 0))
    os.setxattr(upper / "etc", "trusted.overlay.opaque", b"y")
    (upper / "empty").write_text("")
    yield home
    for child in list(home.iterdir()):
        layers.drop(child)
    layers.drop(home)


def save(
    layers: LayerStore,
    home: Path,
    name: str = "ck",
    *,
    previous: Manifest | None = None,
    link: Path | None = None,
) -> Path:
    directory = home / name
    (directory / "images").mkdir(parents=True)
    (directory / "images" / "pages-1.img").write_bytes(os.urandom(3 << 20))
    (directory / "images" / "inventory.img").write_bytes(b"inventory")
    if layers.kind == "btrfs":
        layers.clone(home / "source", directory / "layer")  # writable, so that it can be damaged
    else:
        layers.snapshot(home / "source", directory / "layer", previous=link)
    seal(
        directory,
        REF,
        runtime="runc",
        image_digest="i",
        host=HERE,
        meta={"a": [1, "é"]},
        layers=layers.kind,
        previous=previous,
    )
    return directory


def test_what_was_sealed_is_verified_and_read_back(layers: LayerStore, home: Path) -> None:
    directory = save(layers, home)
    for manifest in (verify(directory), verify(directory, deep=True), read_manifest(directory)):
        assert manifest.ref == dataclasses.replace(REF, size_bytes=manifest.ref.size_bytes)
        assert manifest.ref.size_bytes >= 3 << 20
        assert (manifest.runtime, manifest.image_digest, manifest.host) == ("runc", "i", HERE)
        assert (manifest.meta, manifest.layers) == ({"a": [1, "é"]}, layers.kind)
    kinds = {record.path: record.kind for record in manifest.files}
    assert kinds["layer/upper/link"] == "link"
    assert kinds["layer/upper/gone"] == "char"
    assert kinds["layer/upper/" + os.fsdecode(b"\xff\xfe")] == "file"
    directory.rename(home / "moved")
    verify(home / "moved")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    found = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def zero(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def delete(path: Path) -> None:
    path.unlink()


def add(path: Path) -> None:
    (path.parent / "added").write_text("")


def add_link_to_directory(path: Path) -> None:
    (path.parent / "added").symlink_to("/")


def relink(path: Path) -> None:
    directory = next(parent for parent in path.parents if (parent / "manifest.json").exists())
    elsewhere = directory.with_name("elsewhere")
    shutil.copy2(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def chmod(path: Path) -> None:
    path.chmod(0o4777)


def chown(path: Path) -> None:
    os.chown(path, 1, 1)


def swap_for_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    cut,
    flip,
    grow,
    zero,
    delete,
    add,
    add_link_to_directory,
    relink,
    make_fifo,
    chmod,
    chown,
    swap_for_directory,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("victim", ["images/pages-1.img", "images/inventory.img", "layer/upper/etc/passwd"])
def test_damage_is_found_and_named(
    layers: LayerStore, home: Path, damage: Callable[[Path], None], victim: str
) -> None:
    directory = save(layers, home)
    damage(directory / victim)
    for deep in (False, True):
        with pytest.raises(CheckpointCorrupt) as corrupt:
            verify(directory, deep=deep)
        assert Path(corrupt.value.path).parent in (Path(victim).parent, Path(victim).parent.parent)


def rename_file(directory: Path) -> None:
    (directory / "layer/upper/empty").rename(directory / "layer/upper/void")


def retarget(directory: Path) -> None:
    (directory / "layer/upper/link").unlink()
    (directory / "layer/upper/link").symlink_to("etc/shadow")


def change_device(directory: Path) -> None:
    (directory / "layer/upper/gone").unlink()
    os.mknod(directory / "layer/upper/gone", stat.S_IFCHR, os.makedev(1, 3))


def change_xattr(directory: Path) -> None:
    os.setxattr(directory / "layer/upper/etc", "trusted.overlay.opaque", b"n")


def remove_images(directory: Path) -> None:
    shutil.rmtree(directory / "images")


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def empty_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"")


def edit_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":2'))


def pad_manifest(directory: Path) -> None:
    grow(directory / "manifest.json")


def manifest_of_a_later_version(directory: Path) -> None:
    from blake3 import blake3

    path = directory / "manifest.json"
    body = path.read_bytes()[87:-2].replace(b'"version":1', b'"version":9')
    digest = blake3(body).hexdigest().encode()
    path.write_bytes(b'{"digest":"' + digest + b'","manifest":' + body + b"}\n")


@pytest.mark.parametrize(
    ("damage", "path"),
    [
        (rename_file, "layer/upper"),
        (retarget, "layer/upper"),
        (change_device, "layer/upper"),
        (change_xattr, "layer/upper/etc"),
        (remove_images, "images"),
        (remove_manifest, "manifest.json"),
        (empty_manifest, "manifest.json"),
        (edit_manifest, "manifest.json"),
        (pad_manifest, "manifest.json"),
        (manifest_of_a_later_version, "manifest.json"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_to_the_whole_is_found(
    layers: LayerStore, home: Path, damage: Callable[[Path], None], path: str
) -> None:
    directory = save(layers, home)
    damage(directory)
    with pytest.raises(CheckpointCorrupt) as corrupt:
        verify(directory)
    assert corrupt.value.path.startswith(path)


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    (tmp_path / "ck" / "images").mkdir(parents=True)
    seal(tmp_path / "ck", REF, runtime="r", image_digest="", host=HERE, meta={}, layers="copy")
    path = tmp_path / "ck" / "manifest.json"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointCorrupt):
            read_manifest(tmp_path / "ck")


def test_reading_a_checkpoint_does_not_damage_it(layers: LayerStore, home: Path) -> None:
    directory = save(layers, home)
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.read_bytes()
    layers.clone(directory / "layer", home / "clone")
    verify(directory)
    verify(directory, deep=True)


def test_digests_are_carried_over_only_for_untouched_files(layers: LayerStore, home: Path) -> None:
    time.sleep(1.2)
    first = save(layers, home, "one")
    manifest = verify(first)
    (home / "source/upper/etc/passwd").write_text("toor")
    (home / "source/upper/new").write_text("new")
    second = save(layers, home, "two", previous=manifest, link=first / "layer")
    full = {record.path: record.digest for record in manifest.files}
    for record in verify(second, deep=True).files:
        same = record.path in full and not record.path.endswith(("passwd", ".img", "sources.json"))
        assert not same or record.digest == full[record.path]


def test_damage_of_a_linked_file_is_not_sealed_as_right(tmp_path: Path) -> None:
    layers = layer_store("copy")
    layers.create(tmp_path / "source")
    (tmp_path / "source/upper/file").write_text("content")
    time.sleep(1.2)
    first = save(layers, tmp_path, "one")
    flip(first / "layer/upper/file")
    with pytest.raises(CheckpointCorrupt) as corrupt:
        save(layers, tmp_path, "two", previous=read_manifest(first), link=first / "layer")
    assert corrupt.value.path == "layer/upper/file"


def test_holes_and_zeros_are_the_same_content(tmp_path: Path) -> None:
    directory = tmp_path / "ck"
    (directory / "images").mkdir(parents=True)
    file = directory / "images" / "ghost"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # were its zeros read, the test would run into its time limit
        opened.seek((4 << 30) + 12345)
        opened.write(b"data")
    seal(directory, REF, runtime="r", image_digest="", host=HERE, meta={}, layers="copy")
    verify(directory)
    found = file.stat()
    with file.open("r+b") as opened:
        opened.seek(1 << 30)
        opened.write(bytes(1 << 16))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    verify(directory)
    with file.open("r+b") as opened:
        opened.seek((4 << 30) + 12345 - 4096)  # the same data a page earlier
        opened.write(b"data")
        opened.seek((4 << 30) + 12345)
        opened.write(bytes(4))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CheckpointCorrupt):
        verify(directory)


def test_a_tree_too_deep_to_record_is_refused(tmp_path: Path) -> None:
    here = tmp_path
    for _ in range(300):
        here = here / "d"
    here.mkdir(parents=True)
    with pytest.raises(CheckpointRefused, match="nested"):
        seal(tmp_path, REF, runtime="r", image_digest="", host=HERE, meta={}, layers="copy")


def manifest_from(host: HostFingerprint, tier: Tier = Tier.FULL) -> Manifest:
    return Manifest(
        version=1,
        ref=dataclasses.replace(REF, tier=tier),
        runtime="runc",
        image_digest="",
        host=host,
        meta={},
        layers="copy",
        taken_ns=0,
        files=(),
    )


@pytest.mark.parametrize(
    ("change", "runtime", "why"),
    [
        ({}, "docker", 'runtime="runc"'),
        ({"machine": "aarch64"}, "runc", "aarch64"),
        ({"cpu_flags": ("avx", "avx512f", "sse")}, "runc", "avx512f"),
        ({"kernel": "6.19.0-rc1"}, "runc", "6.19"),
        ({"kernel": "7.0"}, "runc", "7.0"),
    ],
)
def test_a_host_that_cannot_stand_in_is_refused(change: dict[str, object], runtime: str, why: str) -> None:
    there = dataclasses.replace(HERE, **change)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleCheckpoint, match=why):
        check_host(manifest_from(there), HERE, runtime=runtime)


@pytest.mark.parametrize("kernel", ["6.18.2", "6.18.9-amd64", "6.9.1", "5.15.0-91-generic", "weird"])
def test_a_host_that_has_all_the_other_had_is_fine(kernel: str) -> None:
    there = dataclasses.replace(HERE, kernel=kernel, cpu_flags=("sse",))
    check_host(manifest_from(there), HERE, runtime="runc")


def test_without_processes_cpu_and_kernel_do_not_matter() -> None:
    there = dataclasses.replace(HERE, kernel="7.0", cpu_flags=("other",))
    check_host(manifest_from(there, Tier.FILES), HERE, runtime="runc")


def test_this_host_can_stand_in_for_itself() -> None:
    here = host_fingerprint("4.2")
    assert here.cpu_flags
    assert len(here.cpu_digest) == 16
    check_host(manifest_from(here), here, runtime="runc")
