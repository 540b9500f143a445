"""Where Belayer keeps things on a host: state (the store), data (its CRIU, its images). No I/O."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "busybox_image",
    "criu_prefix",
    "data_dir",
    "default_store",
    "images_dir",
    "store_image",
    "test_image",
]


def data_dir() -> Path:
    """What `belayer setup` makes once: $XDG_DATA_HOME/belayer, by default ~/.local/share/belayer."""
    return _xdg("XDG_DATA_HOME", ".local/share")


def default_store() -> Path:
    """The store used when none is named: $XDG_STATE_HOME/belayer, by default ~/.local/state/belayer."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def criu_prefix() -> Path:
    """The private prefix of the CRIU that `belayer setup` installs; its binary is usr/sbin/criu under it."""
    return data_dir() / "criu"


def store_image() -> Path:
    """The file behind the loop-mounted btrfs of the default store, where `belayer setup` made one."""
    return data_dir() / "store.btrfs"


def test_image() -> Path:
    """Root file system of the small image that the demo, the tests and the benches run on."""
    return images_dir() / "test" / "rootfs"


def busybox_image() -> Path:
    """Root file system with nothing but busybox in it: a POSIX sh and no bash, for the tests."""
    return images_dir() / "busybox" / "rootfs"


def images_dir() -> Path:
    """Root file systems by digest, beside the ones that `belayer setup` makes."""
    return data_dir() / "images"


def _xdg(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable, "")
    # The XDG specification: a relative path in these variables is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / fallback) / "belayer"
