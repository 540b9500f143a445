"""An engine for a pair's tests: a real process to kill, a real owner's memory, and tokens by arithmetic.

The next token depends on everything before it, so that a continuation from prompt + tokens so far gives what
an undisturbed run gives, and a token that is lost or doubled shows."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from belayer_rollout.errors import OwnerFault, SetupError, UpdateFailed, WorkerGone
from belayer_rollout.memory.client import OwnerClient
from belayer_rollout.memory.layout import TensorSpec, plan_layout
from belayer_rollout.pair_engine import PairEngine
from belayer_rollout.types import EngineRequest, ModelInfo, TokenChunk

__all__ = ["FakeEngine", "Fleet", "next_token"]

LAYOUT = plan_layout([TensorSpec("w", (100, 1000), "float32")])
ARENA_BYTES = 1 << 16


def next_token(tokens: list[int], version: int) -> int:
    return (31 * sum(tokens) + len(tokens) + version) % 997


class Pids(NamedTuple):
    all: tuple[int, ...]


class FakeEngine:
    """See the module."""

    supports_exact_resume = True

    def __init__(self, fleet: Fleet, owner: Path, name: str, files_version: int) -> None:
        self._fleet = fleet
        self._files_version = files_version
        self.owner = owner
        self.name = name
        self.version = -1
        self.is_live = False
        self.is_hung = False
        self._process: subprocess.Popen[bytes] | None = None
        self._gone = asyncio.Event()
        self._why = ""
        self._go = asyncio.Event()
        self._go.set()
        self._fd = -1

    async def start(self) -> None:
        await self._fleet.may_start.wait()
        if self._fleet.start_error is not None:
            raise self._fleet.start_error
        self._process = _sleeper()
        self._fd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._fd, self.sever, "its process died")
        with OwnerClient(self.owner) as client:
            if client.health().version is None:
                self._publish(client, self._files_version)
        await self.follow()

    async def close(self) -> None:
        self.sever("closed")
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def kill(self) -> None:
        await self.close()

    def rename(self, name: str) -> None:
        self.name = name

    def processes(self) -> Pids:
        return Pids((self._process.pid,) if self._process is not None else ())

    async def wait_gone(self) -> str:
        await self._gone.wait()
        return self._why

    def sever(self, why: str) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if not self._gone.is_set():
            self._why = why
            self._gone.set()

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        tokens = list(request.token_ids)
        for left in reversed(range(request.params.max_tokens)):
            await asyncio.sleep(0.001)
            while self.is_hung or not self._go.is_set():
                hung = asyncio.ensure_future(self._gone.wait())
                going = asyncio.ensure_future(self._go.wait() if not self.is_hung else asyncio.Event().wait())
                await asyncio.wait({hung, going}, return_when=asyncio.FIRST_COMPLETED)
                hung.cancel()
                going.cancel()
                self._alive()
            self._alive()
            assert self.is_live, "a shadow was asked for tokens"
            tokens.append(next_token(tokens, self.version))
            yield TokenChunk((tokens[-1],), (-0.5,), self.name, self.version, None if left else "length")

    async def abort(self, request_id: str) -> None: ...

    async def model_info(self) -> ModelInfo:
        return ModelInfo(name="fake")

    async def activate(self, epoch: int) -> dict[str, Any]:
        if self._fleet.on_activate is not None:
            await self._fleet.on_activate(self)
        self._alive()
        with OwnerClient(self.owner) as client:
            os.close(client.activate(epoch, ARENA_BYTES))
        self.is_live = True
        return {"version": await self.follow(), "check_s": 0.0}

    async def follow(self) -> int:
        self._alive()
        with OwnerClient(self.owner) as client:
            attached = client.attach()
        os.close(attached.handle)
        self.version = attached.version
        return self.version

    async def fill(self, directory: Path, version: int) -> None:
        with OwnerClient(self.owner) as client:
            if self._fleet.on_fill is not None:
                await self._fleet.on_fill(self)
            self._alive()
            try:
                self._publish(client, version)
            except OwnerFault as error:
                raise UpdateFailed(str(error), version=self.version) from error
        await self.follow()

    async def republish(self, owner: Path) -> int:
        self._alive()
        with OwnerClient(owner) as client:
            self._publish(client, self.version)
        self.owner = owner
        return self.version

    async def hold(self) -> None:
        self._alive()
        self._go.clear()

    async def release(self) -> None:
        self._alive()
        self._go.set()

    def _alive(self) -> None:
        if self._gone.is_set():
            raise WorkerGone(self._why, worker=self.name)

    @staticmethod
    def _publish(client: OwnerClient, version: int) -> None:
        draft = client.begin(LAYOUT.num_bytes)
        try:
            os.pwrite(draft.handle, bytes([version % 256]) * LAYOUT.num_bytes, 0)
            client.commit(draft, version, LAYOUT)
        finally:
            os.close(draft.handle)


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"])


class Fleet:
    """Makes the engines of a pair, and holds what is to go wrong with them."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.weights: list[Path | None] = []
        """Where each was to load from, had its owner been empty."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_error: SetupError | WorkerGone | None = None
        self.on_activate: Callable[[FakeEngine], Any] | None = None
        self.on_fill: Callable[[FakeEngine], Any] | None = None

    def __call__(
        self,
        *,
        owner: Path,
        lane: int,
        name: str,
        in_background: bool,
        weights: Path | None,
        files_version: int,
    ) -> PairEngine:
        engine = FakeEngine(self, owner, name, files_version)
        self.weights.append(weights)
        self.engines.append(engine)
        return engine
