"""The OCI configuration: isolated by default, limited, and known to CRIU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from belayer_env.sandbox.runc_spec import dump_externals, oci_config, process_env, restore_externals
from belayer_env.sandbox.seccomp import docker_profile, oci_profile
from belayer_env.spec import Limits, SandboxSpec


def config(*, user_namespace: bool = True, **limits: Any) -> dict[str, Any]:
    return oci_config(
        SandboxSpec(image="x", env={"A": "task"}, limits=Limits(**limits)),
        sandbox_id="sb-x",
        rootfs=Path("/home/rootfs"),
        channel=Path("/home/ch"),
        empty_dir=Path("/home/empty"),
        image_env={"A": "image", "B": "image"},
        machine="x86_64",
        user_namespace=user_namespace,
        swap_accounting=True,
    )


def test_it_is_isolated_by_default() -> None:
    made = json.loads(json.dumps(config()))
    process, linux = made["process"], made["linux"]
    assert process["noNewPrivileges"]
    assert not process["terminal"]
    assert not {"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_NET_RAW"} & set(
        process["capabilities"]["effective"]
    )
    assert {"pid", "network", "ipc", "uts", "mount", "user"} == {ns["type"] for ns in linux["namespaces"]}
    assert all("path" not in namespace for namespace in linux["namespaces"])
    assert "/proc/sys" in linux["readonlyPaths"]
    assert "/proc/kcore" in linux["maskedPaths"]
    assert linux["seccomp"]["syscalls"]


def test_limits_are_the_kernels() -> None:
    resources = config(memory_bytes=64 << 20, pids=33, cpus=1.5)["linux"]["resources"]
    assert resources["memory"] == {"limit": 64 << 20, "swap": 64 << 20}
    assert resources["pids"] == {"limit": 33}
    assert resources["cpu"]["quota"] / resources["cpu"]["period"] == 1.5
    assert "cpu" not in config()["linux"]["resources"]


def test_the_task_has_the_last_word_in_the_environment() -> None:
    env = process_env(SandboxSpec(image="x", env={"A": "task"}), {"A": "image", "B": "image"})
    assert (env["A"], env["B"], env["TERM"]) == ("task", "image", "dumb")


@pytest.mark.parametrize("user_namespace", [True, False])
def test_dump_and_restore_name_the_same_outside_mounts(user_namespace: bool, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/keys").touch()
    made = config(user_namespace=user_namespace)
    dumped = dump_externals(made, host_root=tmp_path)
    restored = restore_externals(made, host_root=tmp_path)
    points = [external.partition("]:")[0] for external in dumped]
    assert points == [external.partition("]:")[0] for external in restored]
    assert "mnt[/belayer]:/home/ch" in restored
    assert "mnt[/proc/keys]:/dev/null" in restored
    assert ("mnt[/dev/null" in points) is user_namespace
    # A masked file that this kernel has not is not mounted over, and CRIU would not find it.
    assert not any("timer_list" in external for external in dumped)


def test_what_criu_cannot_dump_is_not_there_and_namespaces_are_denied() -> None:
    for profile in (oci_profile("x86_64"), docker_profile("aarch64")):
        rules = {name: rule for rule in profile["syscalls"] for name in rule["names"]}
        assert rules["io_uring_setup"]["errnoRet"] == 38
        assert rules["clone3"]["errnoRet"] == 38
        assert rules["unshare"]["errnoRet"] == 1
        flags = [rule["args"][0]["value"] for rule in profile["syscalls"] if rule["names"] == ["clone"]]
        assert sorted(flags) == sorted(
            [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
        )
        assert profile["architectures"]
