"""Work that nobody waits for: the event loop itself does not hold on to its tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from belayer_rollout.errors import RolloutError

__all__ = ["Background"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Background:
    """Tasks in the background. One that breaks is logged, unless by a fault: those have been dealt with."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin some work."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self, within_s: float) -> None:
        """Wait for all of it, and cancel what is not done by then."""
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=within_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, RolloutError):
            _log.error("a task of the client broke", exc_info=error)
