"""Image references and what is behind them: every form, and what is wrong with each, without a network."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_env.errors import ImageNotFound, ImageUnreadable, InvalidInput, StoreFull
from belayer_env.host.command import Done, which
from belayer_env.host.engine import gather_engine
from belayer_env.sandbox import image
from belayer_env.sandbox.image import ImageRef, parse_image_ref, resolve_image, resolve_in_root

needs_umoci = pytest.mark.skipif(which("umoci") is None, reason="needs umoci")
needs_skopeo = pytest.mark.skipif(which("skopeo") is None, reason="needs skopeo")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return tmp_path / "images"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that passes for a root file system: its shell is not run here."""
    made = tmp_path / "root"
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "busybox").write_text("#!/bin/true\n")
    (made / "bin" / "busybox").chmod(0o755)
    (made / "bin" / "sh").symlink_to("/bin/busybox")
    (made / "etc").mkdir()
    (made / "etc" / "hostname").write_text("box\n")
    return made


def pack(root: Path, into: Path, mode: str = "w") -> Path:
    with tarfile.open(into, mode) as tar:  # type: ignore[call-overload]
        tar.add(root, arcname=".")
    return into


def make_layout(root: Path, layout: Path, *tags: str, config: dict[str, Any] | None = None) -> Path:
    """An OCI layout with one layer, under each of the tags ("" for none)."""
    (layout / "blobs" / "sha256").mkdir(parents=True)

    def blob(data: bytes, media: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (layout / "blobs" / "sha256" / digest).write_bytes(data)
        return {
            "mediaType": f"application/vnd.oci.image.{media}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    layer = pack(root, layout.parent / f"{layout.name}.layer").read_bytes()
    history = {"architecture": "amd64", "os": "linux", "config": config or {}}
    history["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    manifests = []
    for tag in tags:
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(json.dumps(history).encode(), "config.v1+json"),
            "layers": [blob(layer, "layer.v1.tar")],
            # Told apart by tag, as two images of a real layout would be by content.
            "annotations": {"made-for": tag},
        }
        entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
        manifests.append(
            {**entry, **({"annotations": {"org.opencontainers.image.ref.name": tag}} if tag else {})}
        )
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    return layout


def left_behind(images: Path) -> list[str]:
    """What a failed resolve left, apart from its lock."""
    return sorted(path.name for path in images.glob("*") if path.name != "lock") if images.exists() else []


# References


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("python:3.12-slim", ImageRef("name", "python:3.12-slim")),
        ("ubuntu", ImageRef("name", "ubuntu")),
        ("localhost:5000/team/a-b__c.d:v1", ImageRef("name", "localhost:5000/team/a-b__c.d:v1")),
        (f"box@sha256:{'a' * 64}", ImageRef("name", f"box@sha256:{'a' * 64}")),
        (f"sha256:{'0' * 64}", ImageRef("name", f"sha256:{'0' * 64}")),
        ("rootfs:/srv/root", ImageRef("rootfs", "/srv/root")),
        ("rootfs:a:b.tar", ImageRef("rootfs", "a:b.tar")),
        ("oci:/srv/layout", ImageRef("oci", "/srv/layout")),
        ("oci:/srv/layout:v1", ImageRef("oci", "/srv/layout", "v1")),
        ("oci:/srv/with:colon/layout", ImageRef("oci", "/srv/with:colon/layout")),
        ("oci:layout:latest", ImageRef("oci", "layout", "latest")),
    ],
)
def test_each_form_is_understood_and_written_back(text: str, ref: ImageRef) -> None:
    assert parse_image_ref(text) == ref
    assert str(ref) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "rootfs:", "oci:", "UPPER", "a b", "x:y:z", "name:", ":tag", "http://x/y", "docker://x", "a\0b",
     "oci:/a:b c", "oci::tag", "../x", "-x", "x@sha256:12", "name:.tag"],
)  # fmt: skip
def test_malformed_references_are_the_callers_mistake(text: str, images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"rootfs:DIRECTORY"):
        resolve_image(text, images)
    assert not images.exists()


@given(st.text(max_size=40))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        ref = parse_image_ref(text)
    except InvalidInput:
        return
    assert str(ref) == text


# Inside a root


def test_symlinks_are_followed_as_inside_the_container(root: Path) -> None:
    assert resolve_in_root(root, "/bin/sh") == root / "bin" / "busybox"
    (root / "lib").symlink_to("../../../../bin")
    assert resolve_in_root(root, "/lib/sh") == root / "bin" / "busybox"
    assert resolve_in_root(root, "/../../etc/./hostname") == root / "etc" / "hostname"
    assert resolve_in_root(root, "/") == root


def test_no_symlink_leads_to_a_file_of_the_host(root: Path) -> None:
    (root / "host").symlink_to("/etc/passwd")
    assert resolve_in_root(root, "/host") is None
    (root / "loop").symlink_to("loop")
    assert resolve_in_root(root, "/loop") is None
    assert resolve_in_root(root, "/etc/hostname/below") is None


# Directories


def test_a_directory_is_used_in_place(root: Path, images: Path) -> None:
    found = resolve_image(f"rootfs:{root}", images)
    assert found.path == root
    assert found.workdir is None
    assert not images.exists()


def test_a_directorys_digest_changes_with_its_top_level(root: Path, images: Path) -> None:
    first = resolve_image(f"rootfs:{root}", images).digest
    assert resolve_image(f"rootfs:{root}", images).digest == first
    (root / "srv").mkdir()
    assert resolve_image(f"rootfs:{root}", images).digest != first


def test_a_relative_path_and_a_link_to_a_directory_work(
    root: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    (root.parent / "link").symlink_to(root)
    assert resolve_image("rootfs:root", images) == resolve_image("rootfs:link", images)


@pytest.mark.parametrize("damage", ["absent", "of the host", "empty", "not executable", "directory"])
def test_a_directory_without_a_usable_shell_is_refused(damage: str, root: Path, images: Path) -> None:
    shell = root / "bin" / "sh"
    shell.unlink()
    if damage == "of the host":
        shell.symlink_to(sys.executable)
    elif damage == "empty":
        shell.touch(0o755)
    elif damage == "not executable":
        shell.write_text("#!/bin/true\n")
    elif damage == "directory":
        shell.mkdir()
    with pytest.raises(ImageUnreadable, match="/bin/sh"):
        resolve_image(f"rootfs:{root}", images)


# Archives


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_an_archive_is_unpacked_once(mode: str, root: Path, images: Path, tmp_path: Path) -> None:
    if mode == "w:bz2" and which("bzip2") is None:
        pytest.skip("needs bzip2")
    archive = pack(root, tmp_path / "root.archive", mode)
    found = resolve_image(f"rootfs:{archive}", images)
    assert found.path.is_relative_to(images)
    assert (found.path / "etc" / "hostname").read_text() == "box\n"
    (found.path / "marker").touch()
    assert resolve_image(f"rootfs:{archive}", images) == found
    assert (found.path / "marker").exists()


def test_a_changed_archive_is_another_image_and_a_copy_the_same(
    root: Path, images: Path, tmp_path: Path
) -> None:
    archive = pack(root, tmp_path / "root.tar")
    first = resolve_image(f"rootfs:{archive}", images)
    shutil.copy(archive, tmp_path / "copy.tar")
    assert resolve_image(f"rootfs:{tmp_path / 'copy.tar'}", images) == first
    (root / "etc" / "hostname").write_text("other\n")
    pack(root, archive)
    second = resolve_image(f"rootfs:{archive}", images)
    assert second.digest != first.digest
    assert (second.path / "etc" / "hostname").read_text() == "other\n"
    assert (first.path / "etc" / "hostname").read_text() == "box\n"


@pytest.mark.parametrize("damage", ["empty", "no archive", "cut", "no shell", "fifo"])
def test_a_bad_archive_is_refused_and_nothing_is_left(
    damage: str, root: Path, images: Path, tmp_path: Path
) -> None:
    (root / "etc" / "big").write_bytes(os.urandom(200_000))
    archive = tmp_path / "root.tar"
    if damage == "no shell":
        (root / "bin" / "sh").unlink()
    pack(root, archive)
    if damage == "empty":
        archive.write_bytes(b"")
    elif damage == "no archive":
        archive.write_bytes(b"not a tar" * 1000)
    elif damage == "cut":
        archive.write_bytes(archive.read_bytes()[:100_000])
    elif damage == "fifo":
        archive.unlink()
        os.mkfifo(archive)
    with pytest.raises(ImageUnreadable, match=r"root\.tar"):
        resolve_image(f"rootfs:{archive}", images)
    assert left_behind(images) == []


def test_an_archive_of_docker_save_is_told_what_to_do(images: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "saved.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("manifest.json"), io.BytesIO())
    with pytest.raises(ImageUnreadable, match="docker load"):
        resolve_image(f"rootfs:{tmp_path / 'saved.tar'}", images)
    assert left_behind(images) == []


def test_an_archive_cannot_write_outside(root: Path, images: Path, tmp_path: Path) -> None:
    archive = pack(root, tmp_path / "root.tar")
    with tarfile.open(archive, "a") as tar:
        tar.addfile(tarfile.TarInfo("../../../escaped"), io.BytesIO())
    with contextlib.suppress(ImageUnreadable):
        resolve_image(f"rootfs:{archive}", images)
    assert not [path for path in tmp_path.glob("**/escaped") if "rootfs" not in path.parts]


def test_a_full_disk_is_the_worlds_fault(
    root: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Done(("tar",), 2, "tar: etc/hostname: Cannot write: No space left on device")
    monkeypatch.setattr(image, "run", lambda *args, **kwargs: full)
    with pytest.raises(StoreFull):
        resolve_image(f"rootfs:{pack(root, tmp_path / 'root.tar')}", images)
    assert left_behind(images) == []


def test_what_a_killed_process_left_is_swept(root: Path, images: Path, tmp_path: Path) -> None:
    (images / ".new-killed" / "image" / "rootfs").mkdir(parents=True)
    found = resolve_image(f"rootfs:{pack(root, tmp_path / 'root.tar')}", images)
    assert left_behind(images) == sorted([found.path.parent.name, "refs"])


def test_concurrent_processes_agree_on_one_copy(root: Path, images: Path, tmp_path: Path) -> None:
    (root / "etc" / "big").write_bytes(os.urandom(5_000_000))
    archive = pack(root, tmp_path / "root.tar")
    code = (
        "import sys; from pathlib import Path; from belayer_env.sandbox.image import resolve_image;"
        "found = resolve_image(sys.argv[1], Path(sys.argv[2]));"
        "sys.stdout.write(f'{found.path} {(found.path / \"etc/big\").stat().st_size}')"
    )
    argv = [sys.executable, "-c", code, f"rootfs:{archive}", str(images)]
    racers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {racer.communicate(timeout=60)[0] for racer in racers}
    assert len(answers) == 1
    assert answers.pop().endswith("/rootfs 5000000")
    assert all(racer.returncode == 0 for racer in racers)
    assert len(left_behind(images)) == 2


# OCI layouts


@needs_umoci
def test_a_layouts_image_is_unpacked_with_its_configuration(root: Path, images: Path, tmp_path: Path) -> None:
    config = {"Env": ["PATH=/bin", "A=b=c", "EMPTY="], "WorkingDir": "/srv"}
    layout = make_layout(root, tmp_path / "layout", "v1", config=config)
    found = resolve_image(f"oci:{layout}:v1", images)
    assert (found.path / "etc" / "hostname").read_text() == "box\n"
    assert found.env == {"PATH": "/bin", "A": "b=c", "EMPTY": ""}
    assert found.workdir == "/srv"
    assert resolve_image(f"oci:{layout}", images) == found
    assert sorted(path.name for path in found.path.parent.iterdir()) == ["image.json", "rootfs"]


@needs_umoci
@needs_skopeo
def test_the_only_image_of_a_layout_needs_no_tag(root: Path, images: Path, tmp_path: Path) -> None:
    layout = make_layout(root, tmp_path / "layout", "")
    assert (resolve_image(f"oci:{layout}", images).path / "etc" / "hostname").exists()


def test_a_wrong_or_ambiguous_tag_names_the_right_ones(root: Path, images: Path, tmp_path: Path) -> None:
    layout = make_layout(root, tmp_path / "layout", "v1", "v2")
    with pytest.raises(ImageNotFound, match="it has: v1, v2"):
        resolve_image(f"oci:{layout}:v3", images)
    with pytest.raises(ImageNotFound, match="TAG of: v1, v2"):
        resolve_image(f"oci:{layout}", images)
    assert left_behind(images) == []


@pytest.mark.parametrize("index", [None, "", "[]", "{}", '{"manifests": [1]}', '{"manifests": {}}', '"text"'])
def test_no_layout_is_refused(index: str | None, images: Path, tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    layout.mkdir()
    if index is not None:
        (layout / "index.json").write_text(index)
    with pytest.raises((ImageUnreadable, ImageNotFound), match="layout"):
        resolve_image(f"oci:{layout}", images)


@needs_umoci
def test_a_layout_with_a_damaged_layer_is_refused_and_nothing_is_left(
    root: Path, images: Path, tmp_path: Path
) -> None:
    layout = make_layout(root, tmp_path / "layout", "v1")
    largest = max((layout / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[::-1])
    with pytest.raises(ImageUnreadable, match="could not be unpacked"):
        resolve_image(f"oci:{layout}:v1", images)
    assert left_behind(images) == []


# Names


def test_absent_files_say_how_to_get_one(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageNotFound, match="docker export"):
        resolve_image(f"rootfs:{tmp_path / 'absent'}", images)
    with pytest.raises(ImageNotFound, match="skopeo copy"):
        resolve_image(f"oci:{tmp_path / 'absent'}", images)


def test_a_name_that_nobody_knows_says_how_to_import_it(images: Path) -> None:
    # A registry on this machine's port 1: refused at once, and no name is asked of anybody else.
    with pytest.raises(ImageNotFound, match="docker pull localhost:1/belayer/none:x"):
        resolve_image("localhost:1/belayer/none:x", images)
    assert left_behind(images) == []


def test_without_engine_and_skopeo_a_name_is_not_found(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/engine.sock")
    monkeypatch.setattr(image, "which", lambda name: None)
    with pytest.raises(ImageNotFound, match="rootfs:DIRECTORY"):
        resolve_image("python:3.12-slim", images)


@pytest.fixture
def imported(root: Path, tmp_path: Path) -> Iterator[str]:
    """An image known to the Docker Engine by this name alone."""
    if not gather_engine().answers:
        pytest.skip("needs a running Docker Engine: belayer setup --docker")
    import docker

    name = f"belayer-test-image:{os.getpid()}"
    client = docker.from_env()
    try:
        archive = pack(root, tmp_path / "imported.tar")
        client.api.import_image_from_file(str(archive), repository=name.split(":")[0], tag=name.split(":")[1])
        yield name
        client.images.remove(name, force=True)
    finally:
        client.close()


@pytest.mark.docker
def test_an_image_of_the_engine_is_exported_once(imported: str, images: Path) -> None:
    found = resolve_image(imported, images)
    assert (found.path / "etc" / "hostname").exists()
    assert (found.path / "bin" / "sh").is_symlink()
    assert found.digest.startswith("sha256:")
    assert resolve_image(imported, images) == found
    assert resolve_image(found.digest, images) == found
    import docker

    client = docker.from_env()
    try:
        assert client.containers.list(all=True, filters={"label": image.EXPORT_LABEL}) == []
    finally:
        client.close()
