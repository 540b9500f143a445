"""The control groups of one sandbox, v1 and v2: freeze, thaw, kill, count OOM kills, remove. Seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from belayer_env.errors import RuntimeFailed

__all__ = ["Cgroup", "cgroup_paths", "is_unified"]

_ROOT = Path("/sys/fs/cgroup")
_POLL_S = 0.0005
UNIFIED = "unified"
CPU_PERIOD_US = 100_000


def is_unified(root: Path = _ROOT) -> bool:
    """Whether the host runs pure cgroup v2 (else v1 controllers, perhaps with a v2 tree beside them)."""
    return (root / "cgroup.controllers").exists()


def cgroup_paths(proc_cgroup: str, *, unified: bool, root: Path = _ROOT) -> dict[str, Path]:
    """Directories by controller ("unified" for v2) from the text of /proc/PID/cgroup. Pure.

    Source: cgroups(7), lines are "ID:controllers:path"."""
    paths = {}
    for line in proc_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if unified:
            if controllers == "":
                paths[UNIFIED] = root / path.lstrip("/")
        else:
            for controller in controllers.split(","):
                # Named hierarchies ("name=systemd") are mounted under their bare name.
                name = controller.removeprefix("name=") or UNIFIED
                paths[controller or UNIFIED] = root / name / path.lstrip("/")
    return paths


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A sandbox's own cgroup in each hierarchy. ``paths``: controller -> directory."""

    paths: Mapping[str, Path]

    @classmethod
    def of_pid(cls, pid: int) -> Cgroup:
        """Those that a process is in.

        Raises:
            ProcessLookupError: no such process."""
        try:
            text = Path(f"/proc/{pid}/cgroup").read_text()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise ProcessLookupError(pid) from error
        return cls(cgroup_paths(text, unified=is_unified()))

    @classmethod
    def find(cls, name: str) -> Cgroup:
        """The top-level cgroups of this name, in whatever hierarchies they exist (perhaps none)."""
        if is_unified():
            return cls({UNIFIED: _ROOT / name})
        # A start or an end cut short may leave any of them, and not the freezer's.
        found = {path.parent.name: path for path in _ROOT.glob(f"*/{name}")}
        return cls({"freezer": _ROOT / "freezer" / name} | found)

    @classmethod
    def create(cls, name: str) -> Cgroup:
        """New ones with the controllers that hold a sandbox's limits and its freezer.

        Raises:
            RuntimeFailed: they cannot be made."""
        try:
            if is_unified():
                for controller in ("cpu", "memory", "pids"):
                    with contextlib.suppress(OSError):
                        (_ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
                paths = {UNIFIED: _ROOT / name}
            else:
                mounted = ("freezer", "memory", "pids", "cpu")
                # Controllers mounted together ("cpu,cpuacct") are one hierarchy under several names.
                paths = {c: (_ROOT / c).resolve() / name for c in mounted if (_ROOT / c).is_dir()}
            for path in paths.values():
                path.mkdir(exist_ok=True)
        except OSError as error:
            raise RuntimeFailed(f"cannot make the sandbox's cgroups: {error}") from error
        return cls(paths)

    def set_limits(self, *, memory_bytes: int, pids: int, cpus: float | None) -> None:
        """Bound what is in it, as runc does for a new container.

        Raises:
            RuntimeFailed: a controller refuses, or is not there."""
        v2 = UNIFIED in self.paths and "memory" not in self.paths  # v1 hosts may have a v2 tree beside
        memory = self.paths[UNIFIED] if v2 else self.paths.get("memory", _ROOT / "memory")
        controls = {
            memory / ("memory.max" if v2 else "memory.limit_in_bytes"): str(memory_bytes),
            (self.paths[UNIFIED] if v2 else self.paths.get("pids", _ROOT / "pids")) / "pids.max": str(pids),
        }
        if v2 and (memory / "memory.swap.max").exists():
            controls[memory / "memory.swap.max"] = "0"
        elif not v2 and (memory / "memory.memsw.limit_in_bytes").exists():
            controls[memory / "memory.memsw.limit_in_bytes"] = str(memory_bytes)
        if cpus is not None:
            quota = int(cpus * CPU_PERIOD_US)
            if v2:
                controls[memory / "cpu.max"] = f"{quota} {CPU_PERIOD_US}"
            else:
                cpu = self.paths.get("cpu", _ROOT / "cpu")
                controls[cpu / "cpu.cfs_period_us"] = str(CPU_PERIOD_US)
                controls[cpu / "cpu.cfs_quota_us"] = str(quota)
        try:
            for control, value in controls.items():
                control.write_text(value)
        except OSError as error:
            raise RuntimeFailed(f"cannot limit the sandbox: {error}") from error

    @property
    def freezer(self) -> Path:
        """The directory whose freezer holds the sandbox."""
        return self.paths.get("freezer") or self.paths[UNIFIED]

    def freeze(self, deadline_s: float = 5.0) -> None:
        """Stop every process; returns once all have stopped.

        Raises:
            RuntimeFailed: not within ``deadline_s`` (they are thawed again), or the cgroup is gone."""
        self._set_frozen(True, deadline_s)

    def thaw(self, deadline_s: float = 5.0) -> None:
        """Let them run again. Idempotent.

        Raises:
            RuntimeFailed: not within ``deadline_s``, or the cgroup is gone."""
        self._set_frozen(False, deadline_s)

    def is_frozen(self) -> bool:
        """Whether it is frozen or on the way there, by whomever."""
        try:
            if "freezer" in self.paths:
                return (self.freezer / "freezer.state").read_text().strip() != "THAWED"
            return (self.freezer / "cgroup.freeze").read_text().strip() == "1"
        except OSError:
            return False

    def pids(self) -> list[int]:
        """Host pids of every process in it, child cgroups included."""
        found = []
        for directory, _, _ in os.walk(self.freezer):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in (Path(directory) / "cgroup.procs").read_text().split()]
        return found

    def oom_kills(self) -> int:
        """Processes that the OOM killer has taken here since the cgroup was made; 0 where nothing counts
        them."""
        name = "memory.oom_control" if "memory" in self.paths else "memory.events"
        directory = self.paths.get("memory") or self.paths.get(UNIFIED)
        if directory is None:
            return 0
        with contextlib.suppress(OSError):
            for line in (directory / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def anonymous_bytes(self) -> int:
        """Memory of its processes that no file backs; 0 where nothing counts it."""
        directory, key = (
            (self.paths["memory"], "total_rss")
            if "memory" in self.paths
            else (self.paths.get(UNIFIED), "anon")
        )
        if directory is not None:
            with contextlib.suppress(OSError):
                for line in (directory / "memory.stat").read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == key:
                        return int(value)
        return 0

    def kill_all(self, deadline_s: float = 5.0) -> bool:
        """SIGKILL everything in it, frozen or not; False if something still lived at the deadline."""
        until = time.monotonic() + deadline_s
        while True:
            pids = self.pids()
            if not pids:
                return True
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            # A v1 freezer holds even the killed: they die once thawed.
            if self.is_frozen():
                with contextlib.suppress(RuntimeFailed):
                    self.thaw(1.0)
            if time.monotonic() > until:
                return False
            time.sleep(0.002)

    def remove(self, deadline_s: float = 2.0) -> bool:
        """Remove the (empty) directories in every hierarchy. Idempotent; False if one would not go."""
        until = time.monotonic() + deadline_s
        left = set(self.paths.values())
        while left:
            for path in list(left):
                if _remove_tree(path):
                    left.discard(path)
            if left:
                if time.monotonic() > until:
                    return False
                time.sleep(0.005)
        return True

    def _set_frozen(self, frozen: bool, deadline_s: float) -> None:
        v1 = "freezer" in self.paths
        control = self.freezer / ("freezer.state" if v1 else "cgroup.freeze")
        want = ("FROZEN" if frozen else "THAWED") if v1 else str(int(frozen))
        until = time.monotonic() + deadline_s
        try:
            control.write_text(want)
            while not self._has_become(frozen, v1):
                if time.monotonic() > until:
                    if frozen:
                        control.write_text("THAWED" if v1 else "0")
                    raise RuntimeFailed(
                        f"the sandbox could not be {'frozen' if frozen else 'thawed'} within {deadline_s:g} s"
                    )
                time.sleep(_POLL_S)
                if v1:
                    control.write_text(want)  # a v1 freezer caught in FREEZING needs another push
        except OSError as error:
            raise RuntimeFailed(f"cannot {'freeze' if frozen else 'thaw'} the sandbox: {error}") from error

    def _has_become(self, frozen: bool, v1: bool) -> bool:
        if v1:
            return (self.freezer / "freezer.state").read_text().strip() == ("FROZEN" if frozen else "THAWED")
        events = dict(line.split() for line in (self.freezer / "cgroup.events").read_text().splitlines())
        return events.get("frozen") == str(int(frozen))


def _remove_tree(path: Path) -> bool:
    try:
        for directory, _, _ in os.walk(path, topdown=False):
            Path(directory).rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not path.exists()
