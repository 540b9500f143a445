"""A worker that something happens to when its engine has given so many tokens, for drills.

What a client hands on has been through its journal first; where the disk is slow the engine is by then far
ahead of what its reader has seen."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from belayer_rollout.engines.base import EngineWorker
from belayer_rollout.types import EngineRequest, TokenChunk

__all__ = ["Tripwire"]


class Tripwire:
    """An `EngineWorker` in front of another one."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._left = 0
        self._drill: Callable[[], None] | None = None

    def set(self, after: int, drill: Callable[[], None]) -> None:
        """Call ``drill``, once, when ``after`` more tokens of all requests have come."""
        self._left, self._drill = after, drill

    @property
    def is_set(self) -> bool:
        """Whether the drill is still to come."""
        return self._drill is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """As the worker's."""
        async with contextlib.aclosing(self._worker.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                self._left -= len(chunk.token_ids)
                if self._left <= 0 and self._drill is not None:
                    drill, self._drill = self._drill, None
                    drill()
                yield chunk
