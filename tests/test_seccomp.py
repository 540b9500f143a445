"""The seccomp profile: what it denies, and that a real sandbox enforces it."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from belayer_env.sandbox.seccomp import docker_profile, oci_profile
from tests.sandboxes import Sandboxes


def rule_of(profile: dict[str, Any], call: str) -> dict[str, Any]:
    found = [rule for rule in profile["syscalls"] if call in rule["names"]]
    assert found, f"no rule for {call}"
    first: dict[str, Any] = found[0]
    return first


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_profile_allows_by_default_and_is_the_same_for_both_runtimes(machine: str) -> None:
    profile = oci_profile(machine)
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert profile == docker_profile(machine)


def test_machine_we_do_not_know_gets_no_foreign_architectures() -> None:
    assert oci_profile("riscv64")["architectures"] == []
    assert "SCMP_ARCH_X86_64" in oci_profile("x86_64")["architectures"]


@pytest.mark.parametrize(
    "call", ["mount", "unshare", "setns", "bpf", "kexec_load", "ptrace", "keyctl", "reboot"]
)
def test_dangerous_call_is_denied_but_debuggers_work(call: str) -> None:
    names = {name for rule in oci_profile("x86_64")["syscalls"] for name in rule["names"]}
    assert (call in names) is (call != "ptrace")


def test_io_uring_looks_absent_so_that_programs_fall_back() -> None:
    for call in ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3"):
        assert rule_of(oci_profile("x86_64"), call)["errnoRet"] == errno.ENOSYS


def test_clone_is_denied_for_every_namespace_flag_and_no_other() -> None:
    rules = [rule for rule in oci_profile("x86_64")["syscalls"] if rule["names"] == ["clone"]]
    flags = {argument["value"] for rule in rules for argument in rule["args"]}
    # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
    assert flags == {0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000}
    # Arguments within one rule are and-ed: each flag needs a rule of its own.
    assert all(len(rule["args"]) == 1 for rule in rules)


def test_sandbox_enforces_it(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    program = (
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\n"
        "for call in (lambda: l.mount(b'x', b'/mnt', b'tmpfs', 0, None), lambda: l.unshare(0x20000), "
        "lambda: l.syscall(425, 8, None)):\n  ctypes.set_errno(0); print(call(), ctypes.get_errno())"
    )
    assert sandbox.run(f'python3 -c "{program}"').output == "-1 1\n-1 1\n-1 38\n"
    assert sandbox.run("grep Seccomp: /proc/$$/status; grep NoNewPrivs /proc/$$/status").output.split() == [
        "Seccomp:", "2", "NoNewPrivs:", "1",
    ]  # fmt: skip
