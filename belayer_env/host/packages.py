"""The system packages Belayer stands on: decided by the commands they bring, installed by apt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from belayer_env.errors import SetupError
from belayer_env.host.command import Done, run, which

__all__ = ["NEEDED", "Package", "install", "missing"]

INSTALL_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Package:
    """Its ``name`` in Debian and Ubuntu, the ``commands`` it brings (all must be there), and what for."""

    name: str
    commands: tuple[str, ...]
    used_for: str


NEEDED = (
    Package("runc", ("runc",), "the runc runtime"),
    Package("docker.io", ("dockerd",), "the docker runtime"),
    Package("btrfs-progs", ("mkfs.btrfs", "btrfs"), "the store's snapshots"),
    Package("skopeo", ("skopeo",), "images of a registry"),
    Package("umoci", ("umoci",), "OCI images"),
    Package("iproute2", ("ip",), "network namespaces"),
    Package("iptables", ("iptables",), "the Docker Engine's bridge"),
    Package("patchelf", ("patchelf",), "CRIU in a private prefix"),
    Package("mmdebstrap", ("mmdebstrap",), "the test image"),
    Package("util-linux", ("unshare", "nsenter", "setsid"), "namespaces"),
    Package("mount", ("mount", "umount", "losetup"), "mounts and the store's loop device"),
    Package("xz-utils", ("xz",), "compressed root file systems"),
    Package("zstd", ("zstd",), "compressed root file systems"),
)


def missing(needed: Sequence[Package] = NEEDED) -> list[Package]:
    """Those of which a command is not there."""
    return [package for package in needed if any(which(command) is None for command in package.commands)]


def install(packages: Sequence[Package], *, on_line: Callable[[str], None] | None = None) -> None:
    """Install them with apt-get; the lists are fetched first where they are empty or old.

    Raises:
        SetupError: not root, no apt on this system, or apt failed."""
    names = " ".join(package.name for package in packages)
    if which("apt-get") is None:
        wanted = "\n".join(f"  {', '.join(p.commands)}: for {p.used_for}" for p in packages)
        raise SetupError(
            f"This system has no apt-get, and these commands are missing:\n{wanted}\n"
            "Install them with the system's own package manager, then run `belayer setup` again."
        )
    if os.geteuid() != 0:
        raise SetupError(
            f"System packages are missing, and only root installs them: sudo apt-get install {names}"
        )
    # A set-up killed in mid-install leaves dpkg asking for this.
    if run(("dpkg", "--audit"), timeout_s=60).output.strip():
        _apt("dpkg", "--configure", "-a", on_line=on_line)
    # Lists that are empty or stale show themselves by a failed install: no need to fetch good ones again.
    if not _install(packages, on_line).ok:
        _apt("apt-get", "update", on_line=on_line)
        _install(packages, on_line).require(
            "Installing system packages", remedy=f"Try: apt-get install {names}"
        )
    if still := missing(packages):
        wanted = ", ".join(command for package in still for command in package.commands)
        raise SetupError(f"apt-get installed {names}, yet one of these commands is still missing: {wanted}")


def _install(packages: Sequence[Package], on_line: Callable[[str], None] | None) -> Done:
    names = [package.name for package in packages]
    return _apt("apt-get", "install", "--yes", "--no-install-recommends", *names, on_line=on_line)


def _apt(*argv: str, on_line: Callable[[str], None] | None) -> Done:
    if argv[0] == "apt-get":
        argv = (argv[0], "-o", "DPkg::Lock::Timeout=300", "-o", "Dpkg::Use-Pty=0", *argv[1:])
    quiet = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    return run(argv, timeout_s=INSTALL_TIMEOUT_S, env=quiet, on_line=on_line)
