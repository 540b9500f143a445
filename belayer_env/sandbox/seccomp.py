"""The seccomp profile of every sandbox: what a package manager and a test suite need stays, the rest of the
kernel's attack surface goes. Pure data, in the OCI runtime's and in Docker's spelling.

A deny list over "allow": what Docker's documentation lists as blocked by default, and io_uring, which CRIU
cannot checkpoint. Programs that find io_uring missing (ENOSYS) fall back on epoll.
"""

from __future__ import annotations

import errno
from typing import Any

__all__ = ["docker_profile", "oci_profile"]

_ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}
_DENIED = [
    "acct", "add_key", "bpf", "clock_adjtime", "clock_settime", "create_module", "delete_module",
    "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "get_kernel_syms",
    "init_module", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie",
    "mount", "mount_setattr", "move_mount", "move_pages", "nfsservctl", "open_by_handle_at", "open_tree",
    "perf_event_open", "pivot_root", "quotactl", "quotactl_fd", "reboot", "request_key", "setns",
    "settimeofday", "stime", "swapoff", "swapon", "syslog", "umount", "umount2", "unshare", "uselib",
    "userfaultfd", "vhangup", "vm86", "vm86old",
]  # fmt: skip
_NOT_THERE = ["clone3", "io_uring_enter", "io_uring_register", "io_uring_setup"]
"""Answered with ENOSYS: callers then use the older call. clone3 hides its flags from seccomp in memory."""
_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEW{CGROUP,IPC,NET,NS,PID,USER,UTS}. Source: include/uapi/linux/sched.h"""


def _rules() -> list[dict[str, Any]]:
    new_namespaces = [
        {"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"} for flag in _bits()
    ]
    return [
        {"names": _DENIED, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        {"names": _NOT_THERE, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        # One rule per flag: rules for one call are or-ed, arguments within a rule and-ed.
        *(
            {"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM, "args": [argument]}
            for argument in new_namespaces
        ),
    ]


def _bits() -> list[int]:
    return [1 << n for n in range(32) if _NAMESPACE_FLAGS & 1 << n]


def oci_profile(machine: str) -> dict[str, Any]:
    """For config.json, linux.seccomp. ``machine``: as uname -m says."""
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": _ARCHITECTURES.get(machine, []),
        "syscalls": _rules(),
    }


def docker_profile(machine: str) -> dict[str, Any]:
    """For `docker run --security-opt seccomp=...`: the same rules."""
    return oci_profile(machine)
