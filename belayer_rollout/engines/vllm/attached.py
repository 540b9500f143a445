"""A vLLM engine on an owner's memory, as a pair wants it: a `VllmWorker`, and what a take-over needs."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from belayer_rollout.engines.vllm.worker import VllmWorker
from belayer_rollout.errors import OwnerDamaged, UpdateFailed, WorkerHung
from belayer_rollout.types import EngineRequest, SamplingParams

__all__ = ["AttachedVllm", "half_of_the_cores"]

T = TypeVar("T")

WORKER_CLASSES = {
    "host": "belayer_rollout.engines.vllm.attached_worker.AttachedCPUWorker",
    "cuda": "belayer_rollout.engines.vllm.attached_worker.AttachedGPUWorker",
}

CALL_DEADLINE_S = 20.0
"""For what takes an idle or running engine milliseconds, between two steps of a busy one."""

FILL_DEADLINE_S = 600.0
"""For reading a checkpoint and hashing it."""

BACKGROUND_NICE = 5
"""A third of the processor time of those it competes with. Ten starved it on a busy host."""

WARM_REQUESTS = 4
WARM_TOKENS = 8


class AttachedVllm(VllmWorker):
    """Starts on scratch KV; `activate` makes it the one that acts on the owner's arena."""

    def __init__(
        self,
        model: str | Path,
        *,
        owner: Path,
        memory: str = "host",
        name: str,
        engine_args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        weights: Path | None = None,
        files_version: int = 0,
        exact_resume: bool = True,
        in_background: bool = False,
    ) -> None:
        """``weights``: a directory of safetensors that an empty owner is given, None for those of ``model``;
        ``files_version``: their version. What an owner holds has a version of its own. ``in_background``:
        yield the processor to others until it is ready."""
        options = {"owner": str(owner), "memory": memory, "version": files_version}
        if weights is not None:
            options["weights"] = str(weights)
        arguments = {
            **(engine_args or {}),
            "load_format": "belayer",
            "model_loader_extra_config": options,
            "worker_cls": WORKER_CLASSES["cuda" if memory.startswith("cuda") else "host"],
        }
        super().__init__(
            model,
            name=name,
            engine_args=arguments,
            env=env,
            weight_version=files_version,
            exact_resume=exact_resume,
        )
        self._in_background = in_background

    async def start(self) -> None:
        """As `VllmWorker.start`; and it has then decoded a batch, on scratch KV."""
        known = {child.pid for child in multiprocessing.active_children()}
        yielding = asyncio.ensure_future(_renice_next_child(known)) if self._in_background else None
        try:
            await super().start()
            await self._warm_up()
        finally:
            if yielding is not None:
                yielding.cancel()
        _renice(self.processes().all, os.getpriority(os.PRIO_PROCESS, 0))

    async def _warm_up(self) -> None:
        """What the start's one token leaves cold: decoding, and several requests in a step."""
        await asyncio.gather(*(self._decode_some(n) for n in range(WARM_REQUESTS)))

    async def _decode_some(self, n: int) -> None:
        params = SamplingParams(max_tokens=WARM_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
        request = EngineRequest(f"warm-{n}", (0,) * (WARM_TOKENS + n), params)
        async for _ in self.generate(request):
            pass

    def _build(self) -> Any:
        # Importing it registers the load format, here for the engine's configuration to pass.
        from belayer_rollout.engines.vllm import loader  # noqa: F401

        return super()._build()

    def rename(self, name: str) -> None:
        """The name that its chunks carry from now on."""
        self._name = name

    async def wait_gone(self) -> str:
        """Return when it is found dead, or severed: why."""
        await self._died.wait()
        return self._gone or "gone"

    def sever(self, why: str) -> None:
        """End its streams with WorkerGone, and let none of its tokens through any more."""
        self._on_death(None, why)

    async def activate(self, epoch: int) -> dict[str, Any]:
        """Map the live arena under this epoch, follow the weights in force, forget what scratch KV held.

        Raises:
            OwnerDamaged: the owner or the device check refuses.
            WorkerFault: the engine broke."""
        answer = await self._asked("belayer_activate", epoch)
        engine = self._alive()
        await self._raced(engine.reset_prefix_cache(reset_running_requests=True))
        await self._label(int(answer["version"]))
        return answer

    async def follow(self) -> int:
        """Map the weights in force, and forget KV and prefixes of those before; their version."""
        answer = await self._asked("belayer_follow")
        engine = self._alive()
        await self._raced(engine.reset_prefix_cache(reset_running_requests=True))
        await self._label(int(answer["version"]))
        return self._version

    async def fill(self, directory: Path, version: int) -> None:
        """Load a checkpoint into the owner's other buffer and put it in force.

        Raises:
            UpdateFailed: it can't be; the weights before are in force."""
        (answer,) = await self.rpc("belayer_fill", str(directory), version, deadline_s=FILL_DEADLINE_S)
        if "refused" in answer:
            raise UpdateFailed(f"weights {version}: {answer['refused']}", version=self._version)

    async def republish(self, owner: Path) -> int:
        """Give the weights that it maps to another owner; their version."""
        return int(
            (await self._asked("belayer_republish", str(owner), deadline_s=FILL_DEADLINE_S))["version"]
        )

    async def state(self) -> dict[str, Any]:
        """Addresses and sizes (bytes) of what its worker maps."""
        return await self._asked("belayer_state")

    async def hold(self) -> None:
        """Stop at the end of the running step; requests stay."""
        await self._raced(self._alive().pause_generation(mode="keep", clear_cache=False))

    async def release(self) -> None:
        """Go on."""
        await self._raced(self._alive().resume_generation())

    async def _label(self, version: int) -> None:
        await self._raced(self._alive().update_weight_version(str(version)))
        self._version = version

    async def _asked(self, method: str, *args: Any, deadline_s: float = CALL_DEADLINE_S) -> dict[str, Any]:
        (answer,) = await self.rpc(method, *args, deadline_s=deadline_s)
        if "refused" in answer:
            raise OwnerDamaged(f"{self.name}: {answer['refused']}")
        return dict(answer)

    async def _raced(self, call: Coroutine[Any, Any, T]) -> T:
        """vLLM leaves its calls unanswered when its engine dies, and has no deadlines."""
        task = asyncio.ensure_future(call)
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({task, died}, timeout=CALL_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                with self._translated():
                    return task.result()
            self._alive()
            raise WorkerHung(f"no answer in {CALL_DEADLINE_S:g} s", worker=self._name)
        finally:
            task.cancel()
            died.cancel()


def half_of_the_cores(lane: int) -> str:
    """CPUs for an engine, in vLLM's notation: the lower or the upper half, by ``lane`` (0 or 1).

    Primary and shadow get different ones: building a shadow takes no cycle from the engine that serves.
    Both get as many, as another number of threads may add up in another order."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    start = half * lane if len(cores) > 1 else 0
    return ",".join(map(str, cores[start : start + half]))


async def _renice_next_child(known: set[int | None]) -> None:
    """EngineCore's threads and workers inherit its priority; when it is new it has one thread."""
    if not _can_raise_priority():
        return
    while True:
        new = [child.pid for child in multiprocessing.active_children() if child.pid not in known]
        if new:
            _renice([pid for pid in new if pid is not None], BACKGROUND_NICE)
            return
        await asyncio.sleep(0.02)


def _renice(pids: list[int] | tuple[int, ...], nice: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def _can_raise_priority() -> bool:
    """Whether what is made nice here can be made less so again: else it would serve at low priority."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return os.geteuid() == 0 or 20 - soft <= os.getpriority(os.PRIO_PROCESS, 0)
