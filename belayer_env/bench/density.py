"""The density bench: many sandboxes at once in one process, every one stepping and checkpointing.

Bytes, seconds. Host-side memory is what this process (and any child of it that is in no sandbox) has for
itself, plus what lies in the sandboxes' shell channels, which are a tmpfs each. What runs inside the
sandboxes is in their own cgroups, bounded by the task's limits, and not counted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from belayer_bench.machine import Machine, kernel_bytes, process_bytes
from belayer_bench.report import Report, Target, quantile
from belayer_env.bench.contender import SERVER
from belayer_env.env import ContainerEnv
from belayer_env.errors import BelayerError
from belayer_env.spec import Task
from belayer_env.store import Store

__all__ = ["TARGET_MB", "Crowd", "measure", "summarise"]

TARGET_MB = Target(at_most=8)

_MB = 1_000_000

NOTES = {
    "host_mb_per_sandbox": "growth from the first sandbox to all, by sandbox: PSS of this process and of its "
    "children that are in no sandbox, and what lies in the shell channels (tmpfs)",
    "kernel_mb_per_sandbox": "growth of Slab, KernelStack, PageTables and Percpu of the whole host, "
    "so that other work on it shows",
}


@dataclass(slots=True)
class Crowd:
    """What a run gave. ``failures`` are said in words; memory is at one sandbox and at all."""

    sandboxes: int
    failures: list[str] = field(default_factory=list)
    reset_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    checkpoint_s: list[float] = field(default_factory=list)
    host_bytes: tuple[int, int] = (0, 0)
    kernel_bytes: tuple[int, int] = (0, 0)
    wall_s: float = 0.0


async def measure(
    image: str, store: Path | None, *, sandboxes: int, steps: int, report: Callable[[str], None]
) -> Crowd:
    """Reset one env and let it work, then all the others at once, then let all work at once."""
    crowd, alone = Crowd(sandboxes), Crowd(1)
    task = Task(image=image, setup=(SERVER, "count=0"))
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        envs = []
        for _ in range(sandboxes):
            env = ContainerEnv(task, runtime="runc", policy="every-step", store=store, require="full")
            stack.push_async_callback(env.aclose)
            envs.append(env)
        with Store(store) as seen:
            report("the first sandbox")
            # Two episodes: the first pays for whatever is loaded and allocated once.
            for _ in range(2):
                await _begin(envs[0], alone)
                await _work(envs[0], alone, steps)
            crowd.failures += alone.failures
            host, kernel = _host_bytes(seen), kernel_bytes()
            report(f"{sandboxes - 1} more at once")
            async with anyio.create_task_group() as group:
                for env in envs[1:]:
                    group.start_soon(_begin, env, crowd)
            report(f"{sandboxes} at once, {steps} steps and checkpoints each")
            async with anyio.create_task_group() as group:
                for env in envs:
                    group.start_soon(_work, env, crowd, steps)
            crowd.host_bytes = (host, _host_bytes(seen))
            crowd.kernel_bytes = (kernel, kernel_bytes())
        report("ending them")
        async with anyio.create_task_group() as group:
            for env in envs:
                group.start_soon(env.aclose)
    crowd.wall_s = time.monotonic() - began
    return crowd


def summarise(crowd: Crowd, machine: Machine) -> Report:
    """The report. Pure."""
    others = max(crowd.sandboxes - 1, 1)
    host_mb = (crowd.host_bytes[1] - crowd.host_bytes[0]) / _MB / others
    medians = {
        "sandboxes": float(crowd.sandboxes),
        "host_mb_per_sandbox": host_mb,
        "kernel_mb_per_sandbox": (crowd.kernel_bytes[1] - crowd.kernel_bytes[0]) / _MB / others,
        "wall_s": crowd.wall_s,
    }
    for name in ("reset", "step", "pause", "checkpoint"):
        values = [1000 * seconds for seconds in getattr(crowd, f"{name}_s")]
        if values:
            medians[f"{name}_ms"] = statistics.median(values)
            medians[f"{name}_p95_ms"] = quantile(values, 0.95)
    return Report(
        bench="density",
        machine=machine,
        medians=medians,
        checks={"failures": len(crowd.failures), "host_mb_per_sandbox": TARGET_MB.check(host_mb)},
        notes={**NOTES, **{f"failure {n}": said for n, said in enumerate(crowd.failures, start=1)}},
    )


async def _begin(env: ContainerEnv, crowd: Crowd) -> None:
    started = time.monotonic()
    try:
        await env.areset()
    except BelayerError as error:
        crowd.failures.append(f"reset: {error}")
    else:
        crowd.reset_s.append(time.monotonic() - started)


async def _work(env: ContainerEnv, crowd: Crowd, steps: int) -> None:
    """Steps that each change a variable and a file, and can be checked."""
    telemetry = env.telemetry
    done = (len(telemetry.steps), len(telemetry.checkpoints), len(telemetry.faults))
    for number in range(done[0] + 1, done[0] + steps + 1):
        try:
            observed, *_ = await env.astep("count=$((count + 1)); echo $count | tee -a counted")
        except BelayerError as error:
            crowd.failures.append(f"step: {error}")
            break
        if observed != f"{number}\n":
            crowd.failures.append(f"step {number}: {observed!r} was to be {number}")
    # One more, asked for: when it has been made, none of the policy's is under way in the background.
    with contextlib.suppress(BelayerError):  # the telemetry has it
        await env.acheckpoint()
    crowd.step_s += [record.command_s for record in telemetry.steps[done[0] :]]
    crowd.failures += [f"fault: {fault.kind}: {fault.message}" for fault in telemetry.faults[done[2] :]]
    for record in telemetry.checkpoints[done[1] :]:
        if record.error:
            crowd.failures.append(f"checkpoint: {record.error}")
        else:
            crowd.pause_s.append(record.pause_s)
            crowd.checkpoint_s.append(record.total_s)


def _host_bytes(store: Store) -> int:
    gc.collect()
    channels = 0
    for home in store.homes():
        channel = home.path / "ch"
        if home.pid == os.getpid() and channel.is_mount():
            found = os.statvfs(channel)
            channels += (found.f_blocks - found.f_bfree) * found.f_frsize
    return process_bytes() + channels
