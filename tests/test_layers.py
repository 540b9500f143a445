from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from belayer_env.disk import disk_errors
from belayer_env.errors import CheckpointRefused, RuntimeFailed, RuntimeUnavailable, StoreFull
from belayer_env.sandbox.layers import BtrfsLayers, LayerStore, is_subvolume, open_layers
from belayer_env.sandbox.tree import MAX_DEPTH
from tests.store_dirs import LAYER_KINDS, btrfs_dir, layer_store, loop_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers hold what only root can make")


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
    yield home
    layers.drop(home)
    assert not home.exists()


def fill(upper: Path) -> None:
    """Everything an upper directory can hold."""
    upper.chmod(0o751)
    os.setxattr(upper, "trusted.overlay.opaque", b"y")
    (upper / "plain").write_text("plain")
    (upper / "plain").chmod(0o4755)
    os.setxattr(upper / "plain", "trusted.overlay.origin", b"\0\xfb")
    os.setxattr(upper / "plain", "user.note", b"n")
    (upper / "hard").hardlink_to(upper / "plain")
    (upper / "dir").mkdir(mode=0o700)
    (upper / "dir" / "deep").hardlink_to(upper / "plain")
    (upper / "owned").write_text("")
    os.chown(upper / "owned", 1234, 4321)
    (upper / "link").symlink_to("/no/where")
    os.chown(upper / "link", 7, 8, follow_symlinks=False)
    os.mknod(upper / "whiteout", stat.S_IFCHR, os.makedev(0, 0))
    os.mkfifo(upper / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(upper / "socket"))
    with (upper / "sparse").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(512 << 20)
        file.write(b"middle")
    (upper / os.fsdecode(b"not\xffutf8")).write_text("x")
    os.utime(upper / "dir", ns=(1, 2))
    os.utime(upper / "plain", ns=(3, 1_000_000_007))


def picture(upper: Path) -> dict[str, object]:
    """What a program that looks at the tree can see of it."""
    seen: dict[str, object] = {}
    first: dict[int, str] = {}
    for path in sorted([upper, *upper.rglob("*")]):
        found, name = path.lstat(), os.fspath(path.relative_to(upper))
        xattrs = {
            x: os.getxattr(path, x, follow_symlinks=False) for x in os.listxattr(path, follow_symlinks=False)
        }
        content: object = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file() and found.st_size < 1 << 20:
            content = path.read_bytes()
        is_dir = path.is_dir() and not path.is_symlink()
        seen[name] = (
            found.st_mode,
            found.st_uid,
            found.st_gid,
            found.st_rdev,
            None if is_dir else (found.st_size, found.st_nlink, first.setdefault(found.st_ino, name)),
            None if name == "." else found.st_mtime_ns,
            xattrs,
            content,
        )
    return seen


def test_a_snapshot_and_its_clone_show_all_that_the_layer_held(layers: LayerStore, home: Path) -> None:
    layers.create(home / "layer")
    fill(home / "layer" / "upper")
    before = picture(home / "layer" / "upper")
    layers.settle(home / "layer")
    layers.snapshot(home / "layer", home / "snapshot")
    layers.clone(home / "snapshot", home / "clone")
    assert picture(home / "snapshot" / "upper") == before
    assert picture(home / "clone" / "upper") == before
    with (home / "clone" / "upper" / "sparse").open("rb") as file:
        file.seek(512 << 20)
        assert file.read(10) == b"middle\0\0\0\0"
    assert (home / "clone" / "upper" / "sparse").stat().st_blocks * 512 < 1 << 22
    assert list((home / "clone" / "work").iterdir()) == []
    assert sorted(path.name for path in home.iterdir()) == ["clone", "layer", "snapshot"]


def test_a_snapshot_stays_as_it_was_whatever_its_source_and_clones_do(layers: LayerStore, home: Path) -> None:
    layers.create(home / "layer")
    file = home / "layer" / "upper" / "file"
    file.write_text("one")
    (home / "layer" / "work" / "index").mkdir()
    time.sleep(1.1)  # older than the margin within which a file is never taken for unchanged
    layers.snapshot(home / "layer", home / "s1")
    layers.snapshot(home / "layer", home / "s2", previous=home / "s1")
    layers.clone(home / "s2", home / "clone")
    assert list((home / "clone" / "work").iterdir()) == []
    (home / "clone" / "upper" / "file").write_text("clone's")
    with file.open("r+") as opened:
        opened.write("two")
    layers.snapshot(home / "layer", home / "s3", previous=home / "s2")
    layers.drop(home / "s1")
    layers.clone(home / "s3", home / "clone3")
    texts = [
        (home / name / "upper" / "file").read_text() for name in ("layer", "s2", "s3", "clone", "clone3")
    ]
    assert texts == ["two", "one", "two", "clone's", "two"]


def test_only_files_that_cannot_have_changed_are_linked_to_the_previous_snapshot(tmp_path: Path) -> None:
    layers = layer_store("copy")
    layers.create(tmp_path / "layer")
    upper = tmp_path / "layer" / "upper"
    for name in ("same", "rewritten", "chmodded", "replaced", "renamed"):
        (upper / name).write_text("old")
    (upper / "twin").hardlink_to(upper / "same")
    time.sleep(1.1)
    (upper / "fresh").write_text("old")
    layers.snapshot(tmp_path / "layer", tmp_path / "s1")
    before = (upper / "rewritten").stat()
    (upper / "rewritten").write_text("new")  # same size, and its time set back
    os.utime(upper / "rewritten", ns=(before.st_atime_ns, before.st_mtime_ns))
    (upper / "chmodded").chmod(0o600)
    (upper / "other").write_text("new")
    (upper / "other").rename(upper / "replaced")
    (upper / "renamed").rename(upper / "renamed2")
    layers.snapshot(tmp_path / "layer", tmp_path / "s2", previous=tmp_path / "s1")
    old = {p.stat().st_ino for p in (tmp_path / "s1" / "upper").iterdir()}
    linked = {p.name for p in (tmp_path / "s2" / "upper").iterdir() if p.stat().st_ino in old}
    assert linked == {"same", "twin"}
    assert picture(tmp_path / "s2" / "upper") | {"same": 0, "twin": 0} == picture(upper) | {
        "same": 0,
        "twin": 0,
    }
    # Another layer's snapshot, a damaged index, a lost one: all is copied.
    layers.clone(tmp_path / "s2", tmp_path / "layer2")
    layers.snapshot(tmp_path / "layer2", tmp_path / "s3", previous=tmp_path / "s2")
    (tmp_path / "s1" / "sources.json").write_text('{"layer": 1}')
    layers.snapshot(tmp_path / "layer", tmp_path / "s4", previous=tmp_path / "s1")
    layers.snapshot(tmp_path / "layer", tmp_path / "s5", previous=tmp_path / "nowhere")
    for name in ("s3", "s4", "s5"):
        assert not {p.stat().st_ino for p in (tmp_path / name / "upper").iterdir()} & (old | {0})
        assert (tmp_path / name / "upper" / "rewritten").read_text() == "new"


def test_a_write_through_a_mapping_is_not_missed(tmp_path: Path) -> None:
    import mmap

    layers = layer_store("copy")
    layers.create(tmp_path / "layer")
    file = tmp_path / "layer" / "upper" / "mapped"
    file.write_bytes(b"a" * 4096)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096) as mapping:
        mapping[0:1] = b"b"
        time.sleep(1.1)
        layers.snapshot(tmp_path / "layer", tmp_path / "s1")
        mapping[1:2] = b"c"  # the page is dirty and mapped already: without a flush no time stamp would move
        layers.snapshot(tmp_path / "layer", tmp_path / "s2", previous=tmp_path / "s1")
    assert (tmp_path / "s1" / "upper" / "mapped").read_bytes()[:3] == b"baa"
    assert (tmp_path / "s2" / "upper" / "mapped").read_bytes()[:3] == b"bca"


def test_an_overlay_mounts_on_a_clone_with_index(layers: LayerStore, home: Path) -> None:
    (home / "lower").mkdir()
    (home / "lower" / "below").write_text("below")
    (home / "mount").mkdir()

    def mounted(layer: Path) -> None:
        options = f"lowerdir={home}/lower,upperdir={layer}/upper,workdir={layer}/work,index=on,nfs_export=on"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, home / "mount"],
            check=True,
            capture_output=True,
        )

    layers.create(home / "layer")
    mounted(home / "layer")
    try:
        (home / "mount" / "below").unlink()
        (home / "mount" / "above").write_text("above")
        layers.snapshot(home / "layer", home / "snapshot")
    finally:
        subprocess.run(["umount", home / "mount"], check=True)
    layers.clone(home / "snapshot", home / "clone")
    mounted(home / "clone")
    try:
        assert [path.name for path in (home / "mount").iterdir()] == ["above"]
    finally:
        subprocess.run(["umount", home / "mount"], check=True)


def test_drop_takes_anything_and_nothing(layers: LayerStore, home: Path) -> None:
    layers.drop(home / "missing")
    layers.create(home / "layer")
    layers.snapshot(home / "layer", home / "snapshot")
    layers.drop(home / "layer")
    layers.drop(home / "layer")
    layers.drop(home / "snapshot")
    assert list(home.iterdir()) == []


def test_what_fails_leaves_nothing(layers: LayerStore, home: Path) -> None:
    acts: list[Callable[[], None]] = [
        lambda: layers.create(home / "no" / "layer"),
        lambda: layers.snapshot(home / "missing", home / "target"),
        lambda: layers.clone(home / "missing", home / "target"),
        lambda: layers.settle(home / "missing"),
    ]
    for act in acts:
        with pytest.raises(RuntimeFailed):
            act()
    assert list(home.iterdir()) == []
    layers.create(home / "layer")
    (home / "layer" / "upper" / "file").write_text("kept")
    with pytest.raises(RuntimeFailed):
        layers.create(home / "layer")
    layers.snapshot(home / "layer", home / "snapshot")
    with pytest.raises(RuntimeFailed):
        layers.clone(home / "snapshot", home / "layer")
    assert (home / "layer" / "upper" / "file").read_text() == "kept"


def test_a_tree_too_deep_to_copy_is_refused_and_dropped(tmp_path: Path) -> None:
    layers = layer_store("copy")
    layers.create(tmp_path / "layer")
    here = os.open(tmp_path / "layer" / "upper", os.O_RDONLY)
    for _ in range(MAX_DEPTH + 3):
        os.mkdir("d" * 30, dir_fd=here)
        below = os.open("d" * 30, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(CheckpointRefused) as refused:
        layers.snapshot(tmp_path / "layer", tmp_path / "snapshot")
    assert refused.value.cause == "too-deep"
    assert not (tmp_path / "snapshot").exists()
    layers.drop(tmp_path / "layer")
    assert not (tmp_path / "layer").exists()


def test_the_file_system_decides_the_kind(disk: Path, tmp_path: Path) -> None:
    assert open_layers(disk).kind == "btrfs"
    assert list(disk.iterdir()) == []
    with loop_disk("ext4", 16 << 20) as ext4:
        assert open_layers(ext4).kind == "copy"
        assert [path.name for path in ext4.iterdir()] == ["lost+found"]
    with pytest.raises(RuntimeFailed):
        open_layers(tmp_path / "missing")


def write_until_full(path: Path, max_bytes: int) -> int:
    with disk_errors("writing"), path.open("wb", buffering=0) as file:
        while path.stat().st_size < max_bytes:
            file.write(os.urandom(1 << 20))
            os.fsync(file)
    return path.stat().st_size


def test_a_layer_is_bounded_on_btrfs_and_refused_elsewhere(tmp_path: Path) -> None:
    layers = BtrfsLayers()
    with loop_disk("btrfs", 300 << 20) as disk:  # one of our own, as quotas stay on
        layers.create(disk / "layer")
        layers.limit(disk / "layer", 8 << 20)
        assert is_subvolume(disk / "layer")
        with pytest.raises(StoreFull):
            write_until_full(disk / "layer" / "upper" / "big", 32 << 20)
        assert (disk / "layer" / "upper" / "big").stat().st_size <= 9 << 20
        # The state "full" can be saved and brought back, and is full again once it is bounded.
        layers.settle(disk / "layer")
        layers.snapshot(disk / "layer", disk / "snapshot")
        layers.clone(disk / "snapshot", disk / "clone")
        layers.limit(disk / "clone", 16 << 20)
        with pytest.raises(StoreFull):
            write_until_full(disk / "clone" / "upper" / "more", 32 << 20)
        assert (disk / "clone" / "upper" / "more").stat().st_size <= 9 << 20
    with pytest.raises(RuntimeUnavailable, match="belayer setup"):
        layer_store("copy").limit(tmp_path, 1 << 20)


def test_a_full_disk_is_a_typed_fault_and_leaves_nothing() -> None:
    layers = layer_store("copy")
    with loop_disk("ext4", 16 << 20) as disk:
        layers.create(disk / "layer")
        (disk / "layer" / "upper" / "big").write_bytes(os.urandom(9 << 20))
        with pytest.raises(StoreFull):
            layers.snapshot(disk / "layer", disk / "snapshot")
        assert not (disk / "snapshot").exists()
        assert (disk / "layer" / "upper" / "big").stat().st_size == 9 << 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_told_from_other_refusals(code: int) -> None:
    with pytest.raises(StoreFull), disk_errors("trying"):
        raise OSError(code, os.strerror(code))
    with pytest.raises(RuntimeFailed), disk_errors("trying"):
        raise OSError(errno.EIO, "broken")
