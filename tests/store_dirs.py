"""Directories for tests of the store: on a real btrfs, on a disk that is soon full, on whatever /tmp is."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_env.errors import BelayerError
from belayer_env.sandbox.layers import BtrfsLayers, CopyLayers, LayerStore

LAYER_KINDS = ["btrfs", "reflink", "copy"]


@contextlib.contextmanager
def loop_disk(kind: str, size_bytes: int) -> Iterator[Path]:
    """A freshly made file system of this kind ("btrfs", "ext4") on a loop device."""
    mkfs = {
        "btrfs": ["mkfs.btrfs", "-q"],
        "ext4": ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0"],
    }[kind]
    if os.geteuid() != 0 or shutil.which(mkfs[0]) is None:
        pytest.skip(f"needs root and {mkfs[0]} to make a {kind} disk")
    work = Path(tempfile.mkdtemp(prefix="belayer-disk-"))
    image, mount = work / "image", work / "mount"
    mount.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(size_bytes)
        subprocess.run([*mkfs, image], check=True, capture_output=True, timeout=60)
        mounted = subprocess.run(
            ["mount", "-o", "loop", image, mount], capture_output=True, timeout=60, check=False
        )
        if mounted.returncode != 0:
            pytest.skip(f"cannot mount a loop device here: {mounted.stderr.decode().strip()}")
        try:
            yield mount
        finally:
            subprocess.run(["umount", mount], check=True, timeout=60)
    finally:
        shutil.rmtree(work)


@contextlib.contextmanager
def btrfs_dir() -> Iterator[Path]:
    """A new directory on btrfs: below $BELAYER_TEST_STORE if that is one, else on a loop device."""
    named = os.environ.get("BELAYER_TEST_STORE")
    if named and Path(named).is_dir():
        directory = Path(tempfile.mkdtemp(prefix="test-", dir=named))
        try:
            with contextlib.suppress(BelayerError):
                BtrfsLayers().create(directory / "trial")
                BtrfsLayers().drop(directory / "trial")
                yield directory
                return
        finally:
            BtrfsLayers().drop(directory)
    with loop_disk("btrfs", 300 << 20) as mount:
        yield mount


def layer_store(kind: str) -> LayerStore:
    """The layer store of this kind; "reflink" works on btrfs too."""
    return BtrfsLayers() if kind == "btrfs" else CopyLayers(reflink=kind == "reflink")
