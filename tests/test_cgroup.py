"""Control groups of both versions, on trees made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer_env.errors import RuntimeFailed
from belayer_env.sandbox.cgroup import Cgroup, cgroup_paths, is_unified

V1 = """\
9:name=systemd:/
5:freezer:/belayer-sb-x
4:cpu,cpuacct:/belayer-sb-x
3:memory:/belayer-sb-x
0::/unified/sb
"""


def test_v1_paths_by_controller() -> None:
    paths = cgroup_paths(V1, unified=False, root=Path("/cg"))
    assert paths["freezer"] == Path("/cg/freezer/belayer-sb-x")
    assert paths["cpuacct"] == Path("/cg/cpuacct/belayer-sb-x")
    assert paths["name=systemd"] == Path("/cg/systemd")
    assert paths["unified"] == Path("/cg/unified/unified/sb")


def test_v2_path() -> None:
    assert cgroup_paths("0::/belayer-sb-x\n", unified=True, root=Path("/cg")) == {
        "unified": Path("/cg/belayer-sb-x")
    }


def test_the_version_is_told_by_the_root(tmp_path: Path) -> None:
    assert not is_unified(tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    assert is_unified(tmp_path)


def v1(tmp_path: Path) -> Cgroup:
    (tmp_path / "freezer.state").write_text("THAWED\n")
    (tmp_path / "cgroup.procs").write_text("11\n12\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "memory.stat").write_text("cache 5\nrss 6\ntotal_rss 7\n")
    return Cgroup(dict.fromkeys(("freezer", "memory", "pids", "cpu"), tmp_path))


def v2(tmp_path: Path) -> Cgroup:
    (tmp_path / "cgroup.freeze").write_text("0\n")
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    (tmp_path / "cgroup.procs").write_text("11\n")
    (tmp_path / "child").mkdir()
    (tmp_path / "child/cgroup.procs").write_text("12\n")
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    (tmp_path / "memory.stat").write_text("anon 7\nfile 9\n")
    (tmp_path / "memory.swap.max").write_text("max\n")
    return Cgroup({"unified": tmp_path})


def test_both_versions_say_the_same(tmp_path: Path) -> None:
    for number, make in enumerate((v1, v2)):
        directory = tmp_path / str(number)
        directory.mkdir()
        cgroup = make(directory)
        assert not cgroup.is_frozen()
        assert sorted(cgroup.pids()) == [11, 12]
        assert cgroup.oom_kills() == 3
        assert cgroup.anonymous_bytes() == 7


def test_v2_freezes_by_cgroup_freeze_and_waits_for_the_event(tmp_path: Path) -> None:
    cgroup = v2(tmp_path)
    with pytest.raises(RuntimeFailed, match="frozen"):
        cgroup.freeze(deadline_s=0.05)
    assert (tmp_path / "cgroup.freeze").read_text() == "0"  # thawed again
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    cgroup.freeze(deadline_s=0.05)
    assert cgroup.is_frozen()


def test_limits_of_both_versions(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    v1(one).set_limits(memory_bytes=1 << 20, pids=9, cpus=0.5)
    v2(two).set_limits(memory_bytes=1 << 20, pids=9, cpus=0.5)
    assert (one / "memory.limit_in_bytes").read_text() == (two / "memory.max").read_text() == str(1 << 20)
    assert (one / "pids.max").read_text() == (two / "pids.max").read_text() == "9"
    assert (one / "cpu.cfs_quota_us").read_text() == "50000"
    assert (two / "cpu.max").read_text() == "50000 100000"
    assert (two / "memory.swap.max").read_text() == "0"


def test_a_cgroup_that_is_gone_is_empty_and_removed(tmp_path: Path) -> None:
    cgroup = Cgroup({"freezer": tmp_path / "gone"})
    assert cgroup.pids() == []
    assert cgroup.oom_kills() == 0
    assert not cgroup.is_frozen()
    assert cgroup.kill_all()
    assert cgroup.remove()
    with pytest.raises(RuntimeFailed):
        cgroup.freeze()
