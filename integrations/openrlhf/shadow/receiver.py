"""Weights as OpenRLHF's trainer sends them, received in the actor's own process, which outlives its engines.

An engine that were a rank of the trainer's group itself would break it for good by its death, and its
successor could not join. So the actor is that rank, gathers an update, and hands the pair the whole of it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from belayer_integrations.openrlhf.shadow.shards import Shards
from belayer_integrations.openrlhf.shadow.sync_group import SyncGroup, join

__all__ = ["OutOfGroup", "WeightReceiver"]

T = TypeVar("T")
log = logging.getLogger(__name__)


class OutOfGroup(RuntimeError):
    """Weights are to come, and ``init_process_group`` was not called."""


class WeightReceiver:
    """Calls come one after the other, as the trainer makes them; all belong to one event loop."""

    def __init__(self, place: Callable[[], Path], put_in_force: Callable[[Path], Awaitable[None]]) -> None:
        """``place``: where directories of weights can be made. ``put_in_force``: returns when the weights in
        a directory are, and needs that until it has been called with another one and returned."""
        self._place = place
        self._put_in_force = put_in_force
        self._thread = _Thread()
        self._group: SyncGroup | None = None
        self._coming: Shards | None = None
        self._in_force: Shards | None = None
        self._number = 0

    async def join(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
        use_ray: bool = False,
    ) -> None:
        """Take the engine's rank in the trainer's group; returns when all have come.

        Raises:
            ShadowUnavailable: the backend cannot be had here."""
        # The pair's one worker: its rank within the engine is 0.
        self._group = await self._thread.run(
            lambda: join(master_address, master_port, rank_offset, world_size, group_name, backend, use_ray)
        )

    async def receive(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        """One parameter, from rank 0. ``empty_cache`` is upstream's mark of an update's last one: then this
        returns when all of it is in force, on both engines of the pair.

        Raises:
            OutOfGroup: no group was joined.
            Exception: what the group, the memory or ``put_in_force`` raised; the weights of before are in
                force then, and a whole new update can be sent."""
        group = self._group
        if group is None:
            raise OutOfGroup("update_weight before init_process_group")
        if self._coming is not None and name in self._coming.names:
            log.warning("an update that broke off after %d tensors is dropped", len(self._coming.names))
            self._drop()
        if self._coming is None:
            self._number += 1
            self._coming = Shards(self._place() / f"weights-{self._number}")
        coming = self._coming
        try:
            await self._thread.run(lambda: _receive(group, coming, name, dtype, shape))
        except BaseException:
            self._drop()
            raise
        if empty_cache:
            # Carried through, whoever waits for it: the pair may have these weights for its own by then.
            await asyncio.shield(asyncio.ensure_future(self._finish(coming)))

    async def _finish(self, coming: Shards) -> None:
        try:
            await self._put_in_force(await self._thread.run(coming.finish))
        except BaseException:
            self._drop()
            raise
        before, self._in_force, self._coming = self._in_force, coming, None
        if before is not None:
            before.close()

    def _drop(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.close()


def _receive(group: SyncGroup, shards: Shards, name: str, dtype: Any, shape: Any) -> None:
    import torch

    tensor = torch.empty(tuple(shape), dtype=dtype, device=group.device)
    group.broadcast(tensor)
    shards.add(name, tensor.cpu())


class _Thread:
    """Runs what blocks, one call after the other, always in the same thread: CUDA has a state for each. A
    daemon: a broadcast from a trainer that died may never return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="belayer-weights", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((call, future))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            call, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - its waiter raises it
                future.set_exception(error)
