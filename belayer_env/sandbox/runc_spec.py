"""The OCI runtime specification of a sandbox: what goes into config.json. Pure: data in, data out.

Isolation by default: no network but a loopback of its own, the capabilities a package manager needs,
no-new-privileges, seccomp, an own user namespace, read-only and masked kernel files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belayer_env.sandbox.cgroup import CPU_PERIOD_US
from belayer_env.sandbox.seccomp import oci_profile
from belayer_env.sandbox.shell import CHANNEL_MOUNT
from belayer_env.spec import SandboxSpec

__all__ = ["CAPABILITIES", "DEFAULT_ENV", "dump_externals", "oci_config", "process_env", "restore_externals"]

CAPABILITIES = [
    "CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
]  # fmt: skip
"""Docker's default set without CAP_NET_RAW."""

DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    # No terminal and nobody to answer: pagers copy through, editors and prompts give up at once.
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}

_MAPPED_IDS = 65536
_DEVICES = ("null", "zero", "full", "tty", "urandom", "random")
_MASKED = ("/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats",
           "/proc/sched_debug")  # fmt: skip
"""Files only. runc masks a directory by a tmpfs, and every tmpfs costs a checkpoint some 4 ms."""
_READ_ONLY = ("/proc/acpi", "/proc/asound", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/scsi", "/proc/sys",
              "/proc/sysrq-trigger")  # fmt: skip
_SHM_BYTES = 64 * 1024**2


def process_env(spec: SandboxSpec, image_env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a sandbox's first process: ours, the image's over it, the task's over both."""
    return {**DEFAULT_ENV, **image_env, **spec.env, "BELAYER_WORKDIR": spec.workdir}


def oci_config(
    spec: SandboxSpec,
    *,
    sandbox_id: str,
    rootfs: Path,
    channel: Path,
    empty_dir: Path,
    image_env: Mapping[str, str],
    machine: str,
    user_namespace: bool,
    swap_accounting: bool,
) -> dict[str, Any]:
    """The whole config.json.

    ``empty_dir``: an empty host directory, bound over what is to look empty."""
    limits = spec.limits
    memory = {"limit": limits.memory_bytes}
    if swap_accounting:
        memory["swap"] = limits.memory_bytes  # memory and swap together: no swap
    resources: dict[str, Any] = {"memory": memory, "pids": {"limit": limits.pids}}
    if limits.cpus is not None:
        resources["cpu"] = {"quota": int(limits.cpus * CPU_PERIOD_US), "period": CPU_PERIOD_US}
    namespaces = ["pid", "network", "ipc", "uts", "mount", *(["user"] if user_namespace else [])]
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in namespaces],
        "cgroupsPath": f"/belayer-{sandbox_id}",
        "resources": resources,
        "seccomp": oci_profile(machine),
        "maskedPaths": list(_MASKED),
        "readonlyPaths": list(_READ_ONLY),
    }
    if user_namespace:
        # One to one: the image's owners are what they are. Root inside has no capability outside.
        mapping = [{"containerID": 0, "hostID": 0, "size": _MAPPED_IDS}]
        linux["uidMappings"] = linux["gidMappings"] = mapping
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(rootfs), "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh", f"{CHANNEL_MOUNT}/init.sh"],
            "env": [f"{name}={value}" for name, value in process_env(spec, image_env).items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        },
        "mounts": _mounts(channel, empty_dir),
        "linux": linux,
    }


def dump_externals(config: Mapping[str, Any], *, host_root: Path = Path("/")) -> tuple[str, ...]:
    """CRIU's --external arguments that name, for a dump, each mount of this configuration that comes from
    outside."""
    return tuple(f"mnt[{point}]:{point}" for point in _outside_mounts(config, host_root))


def restore_externals(config: Mapping[str, Any], *, host_root: Path = Path("/")) -> tuple[str, ...]:
    """The same for a restore: what to bind at each."""
    return tuple(f"mnt[{point}]:{source}" for point, source in _outside_mounts(config, host_root).items())


def _outside_mounts(config: Mapping[str, Any], host_root: Path) -> dict[str, str]:
    """Mount point -> source on the host."""
    outside = {m["destination"]: m["source"] for m in config["mounts"] if m["type"] == "bind"}
    if "uidMappings" in config["linux"]:
        # A user namespace may make no device nodes: runc binds the host's.
        outside |= {f"/dev/{name}": f"/dev/{name}" for name in _DEVICES}
    masked = (path for path in config["linux"]["maskedPaths"] if (host_root / path[1:]).exists())
    return outside | dict.fromkeys(masked, "/dev/null")


def _mounts(channel: Path, empty_dir: Path) -> list[dict[str, Any]]:
    def kernel(kind: str, at: str, *options: str) -> dict[str, Any]:
        return {"destination": at, "type": kind, "source": kind, "options": list(options)}

    def bind(source: Path, at: str, *options: str) -> dict[str, Any]:
        return {"destination": at, "type": "bind", "source": str(source), "options": ["bind", *options]}

    return [
        kernel("proc", "/proc"),
        kernel("tmpfs", "/dev", "nosuid", "strictatime", "mode=755", "size=65536k"),
        kernel(
            "devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"
        ),
        kernel("tmpfs", "/dev/shm", "nosuid", "noexec", "nodev", "mode=1777", f"size={_SHM_BYTES}"),
        kernel("mqueue", "/dev/mqueue", "nosuid", "noexec", "nodev"),
        kernel("sysfs", "/sys", "nosuid", "noexec", "nodev", "ro"),
        bind(empty_dir, "/sys/firmware", "ro", "nosuid", "noexec", "nodev"),
        bind(channel, CHANNEL_MOUNT, "rw", "nosuid", "noexec", "nodev"),
    ]
