"""Chunks on their way to the consumer of a stream: each waits for the commit that makes it durable, and a
full outlet makes its reader wait."""

from __future__ import annotations

import asyncio
from collections import deque

from belayer_rollout.types import TokenChunk

__all__ = ["Outlet"]

MOST_CHUNKS = 256
"""A consumer that is slower than its worker slows the reading of its own stream from here on."""


class Outlet:
    """One producer, one consumer, both of one event loop."""

    __slots__ = ("_chunks", "_consumer", "_error", "_is_closed", "_most", "_producer")

    def __init__(self, most: int = MOST_CHUNKS) -> None:
        self._most = most
        self._chunks: deque[tuple[TokenChunk, asyncio.Future[None] | None]] = deque()
        self._consumer: asyncio.Future[None] | None = None
        self._producer: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: BaseException | None = None

    @property
    def is_full(self) -> bool:
        """The producer should await `room` before it reads on."""
        return len(self._chunks) >= self._most

    def put(self, chunk: TokenChunk, commit: asyncio.Future[None] | None) -> None:
        """Hand it on once ``commit`` is done."""
        self._chunks.append((chunk, commit))
        if len(self._chunks) == 1:
            self._wake()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more comes; what is in it is still handed on, then ``error`` is raised."""
        self._is_closed = True
        self._error = error
        self._wake()

    async def room(self) -> None:
        """Wait until it is not full."""
        while self.is_full:
            self._producer = asyncio.get_running_loop().create_future()
            try:
                await self._producer
            finally:
                self._producer = None

    async def get(self) -> TokenChunk | None:
        """The next chunk; None at the end.

        Raises:
            JournalFault: the chunk did not become durable; it is not handed on.
            BaseException: what the outlet was closed with."""
        while True:
            if not self._chunks:
                if self._is_closed:
                    if self._error is not None:
                        raise self._error
                    return None
                await self._wait(None)
                continue
            chunk, commit = self._chunks[0]
            if commit is not None:
                if not commit.done():
                    await self._wait(commit)
                    continue
                commit.result()
            self._chunks.popleft()
            if self._producer is not None and not self._producer.done():
                self._producer.set_result(None)
            return chunk

    async def _wait(self, commit: asyncio.Future[None] | None) -> None:
        # Never awaits the commit itself: other streams share it, and a cancelled consumer would cancel it.
        self._consumer = asyncio.get_running_loop().create_future()
        if commit is not None:
            commit.add_done_callback(self._wake)
        try:
            await self._consumer
        finally:
            self._consumer = None
            if commit is not None:
                commit.remove_done_callback(self._wake)

    def _wake(self, _: object = None) -> None:
        if self._consumer is not None and not self._consumer.done():
            self._consumer.set_result(None)
