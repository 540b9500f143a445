"""What a shadow pair needs of an engine, and its slot in the pair. Seconds, by the monotonic clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from belayer_rollout.fence import Fenced, is_stopped
from belayer_rollout.types import EngineRequest, ModelInfo, TokenChunk

__all__ = ["EngineFactory", "PairEngine", "ProcessIds", "Slot"]


class ProcessIds(Protocol):
    """The processes of an engine."""

    @property
    def all(self) -> tuple[int, ...]: ...


class PairEngine(Protocol):
    """An engine on an owner's memory. `engines.vllm.attached.AttachedVllm` is the real one, and says what
    its methods raise."""

    @property
    def supports_exact_resume(self) -> bool: ...
    def rename(self, name: str) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def kill(self) -> None: ...
    def processes(self) -> ProcessIds: ...
    async def wait_gone(self) -> str: ...
    def sever(self, why: str) -> None: ...
    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]: ...
    async def abort(self, request_id: str) -> None: ...
    async def model_info(self) -> ModelInfo: ...
    async def activate(self, epoch: int) -> dict[str, Any]: ...
    async def follow(self) -> int: ...
    async def fill(self, directory: Path, version: int) -> None: ...
    async def republish(self, owner: Path) -> int: ...
    async def hold(self) -> None: ...
    async def release(self) -> None: ...


class EngineFactory(Protocol):
    """Makes an engine (not started) on an owner. ``lane`` is 0 or 1, another than that of the engine that
    serves: two of them share no core, for one. ``weights``, of version ``files_version``, is what an empty
    owner is given: a directory of safetensors, None for the model's own files."""

    def __call__(
        self,
        *,
        owner: Path,
        lane: int,
        name: str,
        in_background: bool,
        weights: Path | None,
        files_version: int,
    ) -> PairEngine: ...


class Slot:
    """An engine of the pair, its processes, and when it last showed life."""

    def __init__(self, engine: PairEngine, lane: int) -> None:
        self.engine = engine
        self.lane = lane
        self.processes = Fenced(())
        self.num_open = 0
        """Streams that wait for tokens."""
        self.is_held = False
        """Paused, by an update or the pair's user: silence is no fault."""
        self.is_lost = False
        self.seen_alive = time.monotonic()
        self._stopped_polls = 0

    async def start(self) -> None:
        """Start the engine, then note who its processes are and what they would leave behind."""
        await self.engine.start()
        pids = self.engine.processes().all
        self.processes = Fenced.of(pids)
        self.seen_alive = time.monotonic()

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """The engine's stream, with an eye on its pace."""
        if self.num_open == 0:
            # Idle until now: its silence begins here.
            self.seen_alive = time.monotonic()
        self.num_open += 1
        try:
            async with contextlib.aclosing(self.engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    self.seen_alive = time.monotonic()
                    yield chunk
        finally:
            self.num_open -= 1

    def why_hung(self, stall_s: float) -> str | None:
        """Why it counts as hung: found stopped twice in a row, or silent for too long with streams open."""
        self._stopped_polls = self._stopped_polls + 1 if any(map(is_stopped, self.processes.pids)) else 0
        if self._stopped_polls >= 2:
            return "a process of it is stopped"
        silent_s = time.monotonic() - self.seen_alive
        if self.num_open and not self.is_held and silent_s > stall_s:
            return f"no token of {self.num_open} streams for {silent_s:.1f} s"
        return None

    async def dispose(self) -> None:
        """End what is left of it, and what it left behind. Never raises."""
        await self.engine.close()
        self.processes.close()
