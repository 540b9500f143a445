"""The seat of a pair's owner: the process that sits in it, its epoch, its checks, and its successor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from belayer_rollout.errors import OwnerFault, OwnerGone, RolloutError
from belayer_rollout.memory.launch import OwnerProcess
from belayer_rollout.pair_engine import PairEngine

__all__ = ["OwnerSeat"]

SAMPLE_CHUNKS = 8
"""Of the weights, checked at a take-over: 2 MiB, about a millisecond."""


class OwnerSeat:
    """Raises OwnerFault where the owner is gone or not what it was."""

    def __init__(self, memory: str) -> None:
        self._memory = memory
        self._process: OwnerProcess | None = None
        self._epoch = 0
        self._checks = 0

    @property
    def process(self) -> OwnerProcess:
        if self._process is None:
            raise OwnerGone("there is no owner")
        return self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def fence(self) -> tuple[int, int | None]:
        """A new epoch, from an owner that was found sound; and the version that it holds."""
        self._epoch = await asyncio.to_thread(self.process.client.fence, self._epoch)
        return self._epoch, await self.check(SAMPLE_CHUNKS)

    async def check(self, sample: int | None) -> int | None:
        """That it lives, is the one that was started, and its weights are what was published (``sample``
        chunks of them, None for all); the version in force, None for none."""
        self._checks += 1
        return await asyncio.to_thread(self._check, self.process, sample)

    def _check(self, owner: OwnerProcess, sample: int | None) -> int | None:
        health = owner.client.health()
        if health.generation != owner.generation or health.epoch != self._epoch:
            raise OwnerGone(f"another owner answers, or another client fenced it: {health}")
        if health.version is not None:
            owner.client.verify(sample, seed=self._checks)
        return health.version

    async def in_force(self) -> int | None:
        """The version in force."""
        return (await asyncio.to_thread(self.process.client.health)).version

    async def renew(self, rescue_from: Iterable[PairEngine] = ()) -> int | None:
        """Seat a new owner. Weights come from the first engine that still maps them: those of an owner that
        died live on in its users. Their version; None if the new owner is empty. The old one is ended."""
        old, self._process = self._process, None
        if old is not None:
            await asyncio.to_thread(old.close)
        starting = asyncio.ensure_future(asyncio.to_thread(OwnerProcess, memory=self._memory))
        try:
            self._process = fresh = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Its thread can't be stopped: wait for what it makes, and end that.
            await asyncio.to_thread((await starting).close)
            raise
        self._epoch = 0
        for engine in rescue_from:
            try:
                return await engine.republish(fresh.path)
            except RolloutError:
                # It is lost as well, or its memory is; the next one, or the files.
                continue
        return None

    async def wait_gone(self) -> int:
        """Return when the process in the seat now has died: its id."""
        owner = self.process
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            fd = owner.pidfd()
        except OwnerFault:
            return owner.pid
        try:
            loop.add_reader(fd, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return owner.pid

    async def close(self) -> None:
        """End the owner. Idempotent."""
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
