"""Gathers what `facts` holds: reads, tries and asks, and judges nothing."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from belayer_env import paths
from belayer_env.host.command import run, which
from belayer_env.host.criu_find import check_criu, find_criu
from belayer_env.host.facts import HostFacts, RuncFacts
from belayer_env.host.store_mount import read_store_disk

__all__ = ["gather_host", "gather_runc", "has_capability"]

CAP_SYS_RESOURCE = 24


def gather_host() -> HostFacts:
    """Everything the doctor shows. About 0.4 s."""
    # Imported when asked for: the Docker SDK costs a process 0.2 s, which the runc runtime need not pay.
    from belayer_env.host.engine import gather_engine

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
