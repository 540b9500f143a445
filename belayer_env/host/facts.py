"""What this host is and has: gathered here, judged in `verdict`. Bytes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import psutil
import requests
from docker.errors import DockerException

from belayer_env import paths
from belayer_env.host.command import run, which
from belayer_env.host.criu_find import CriuBinary, check_criu, find_criu, read_version
from belayer_env.host.store_mount import StoreDisk, read_store_disk

__all__ = ["EngineFacts", "HostFacts", "RuncFacts", "gather_engine", "gather_host", "gather_runc", "has_capability"]

CAP_SYS_RESOURCE = 24

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
ENGINE_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RuncFacts:
    """``runc`` is its version, empty where it is missing; ``runc_refusal`` its words where it does not start.
    ``criu_refusal`` is what `criu check` said, empty when it passed; ``cgroup``: "v1", "v2", "hybrid" or ""."""

    is_root: bool = True
    runc: str = ""
    runc_refusal: str = ""
    criu: CriuBinary | None = None
    criu_refusal: str = ""
    cgroup: str = ""
    has_overlay: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """``refusal`` is why it does not answer, empty when it does. ``criu`` is the one that its own PATH leads to;
    ``knows_criu`` is False where that PATH cannot be read."""

    installed: bool = False
    refusal: str = ""
    version: str = ""
    experimental: bool = False
    driver: str = ""
    is_local: bool = True
    knows_criu: bool = True
    criu: CriuBinary | None = None
    criu_refusal: str = ""

    @property
    def answers(self) -> bool:
        """Whether there is an Engine at all."""
        return not self.refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """All of it. ``userns_refusal`` is empty where a user namespace could be made."""

    runc: RuncFacts
    engine: EngineFacts
    store: StoreDisk
    kernel: str
    userns_refusal: str = ""
    sys_resource: bool = True


def gather_host() -> HostFacts:
    """Everything the doctor shows. About 0.3 s."""
    return HostFacts(
        runc=gather_runc(),
        engine=gather_engine(),
        store=read_store_disk(paths.default_store()),
        kernel=platform.release(),
        userns_refusal=_try_userns(),
        sys_resource=has_capability(CAP_SYS_RESOURCE),
    )


def gather_runc() -> RuncFacts:
    """What the runc runtime stands on. About 0.1 s."""
    version, refusal = _read_runc()
    criu = find_criu()
    return RuncFacts(
        is_root=os.geteuid() == 0,
        runc=version,
        runc_refusal=refusal,
        criu=criu,
        criu_refusal=check_criu(criu) if criu is not None and criu.is_recent else "",
        cgroup=_read_cgroup(),
        has_overlay=_has_overlay(),
    )


def gather_engine() -> EngineFacts:
    """What the Docker Engine says of itself, and the CRIU that it would find."""
    host = os.environ.get("DOCKER_HOST") or DEFAULT_SOCKET
    installed = which("dockerd") is not None
    try:
        client = docker.from_env(timeout=ENGINE_TIMEOUT_S)
        try:
            info: dict[str, Any] = client.info()
        finally:
            client.close()
    except (DockerException, requests.RequestException, OSError) as error:
        return EngineFacts(installed=installed, refusal=str(error) or type(error).__name__)
    is_local = host.startswith("unix://")
    path = _engine_path(Path(host.removeprefix("unix://"))) if is_local else None
    criu = _criu_on(path) if path is not None else None
    return EngineFacts(
        installed=installed,
        version=str(info.get("ServerVersion", "")),
        experimental=bool(info.get("ExperimentalBuild", False)),
        driver=str(info.get("Driver", "")),
        is_local=is_local,
        knows_criu=path is not None,
        criu=criu,
        criu_refusal=check_criu(criu) if criu is not None and criu.is_recent else "",
    )


def has_capability(number: int, status: str | None = None) -> bool:
    """Whether this process can have the capability, by its bounding set in the text of /proc/self/status."""
    text = status if status is not None else Path("/proc/self/status").read_text()
    found = re.search(r"^CapBnd:\s*([0-9a-f]+)", text, re.MULTILINE)
    return found is not None and bool(int(found.group(1), 16) >> number & 1)


def _read_runc() -> tuple[str, str]:
    if which("runc") is None:
        return "", ""
    done = run(["runc", "--version"], timeout_s=10)
    found = re.search(r"runc version (\S+)", done.output)
    return (found.group(1), "") if done.ok and found else ("", done.tail(3) or "it prints no version")


def _read_cgroup() -> str:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return "v2"
    if not (root / "freezer").exists():
        return ""
    return "hybrid" if (root / "unified" / "cgroup.procs").exists() else "v1"


def _has_overlay() -> bool:
    if re.search(r"\boverlay$", Path("/proc/filesystems").read_text(), re.MULTILINE):
        return True
    # A module not loaded yet: the first mount loads it.
    module = run(["modprobe", "--dry-run", "overlay"], timeout_s=10)
    return module.ok


def _try_userns() -> str:
    done = run(["unshare", "--user", "--map-root-user", "true"], timeout_s=10)
    return "" if done.ok else done.tail(2) or f"unshare exited with {done.exit_code}"


def _engine_path(listening: Path) -> str | None:
    """PATH of the process that starts runc for the Engine: its containerd; None where it cannot be read.

    The one who listens on the Engine's socket is dockerd, or systemd on its behalf; a containerd of its own is its
    child, and a system-wide one has a PATH of its own."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(ENGINE_TIMEOUT_S)
            probe.connect(str(listening))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        listener = struct.unpack("3i", credentials)[0]
        containerds = [p for p in psutil.process_iter(["name", "ppid"]) if p.info["name"] == "containerd"]
        own = [process for process in containerds if process.info["ppid"] == listener]
        for process in own or containerds:
            return process.environ().get("PATH", os.defpath)
    except (OSError, psutil.Error):
        return None
    return None


def _criu_on(path: str) -> CriuBinary | None:
    found = shutil.which("criu", path=path)
    version = read_version(Path(found)) if found else None
    return CriuBinary(Path(found), version) if found and version is not None else None
