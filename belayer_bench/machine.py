"""The machine a bench ran on, and what of it the run takes: figures mean little without. Bytes."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Machine", "kernel_bytes", "process_bytes"]

_KERNEL_FIELDS = ("Slab", "KernelStack", "PageTables", "Percpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """As the kernel names it. ``cores`` are those this process may use."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=psutil.virtual_memory().total,
            kernel=platform.release(),
        )

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB, Linux {self.kernel}"


def process_bytes() -> int:
    """What this process and its children have in memory for themselves: PSS, so that a shared page counts by
    its share. Source: /proc/PID/smaps_rollup."""
    here = psutil.Process()
    return sum(_pss(process.pid) for process in (here, *here.children(recursive=True)))


def kernel_bytes() -> int:
    """What the kernel holds for its own objects, for everybody on this host. Source: /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in _KERNEL_FIELDS if name in fields)


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
