"""An event loop in a thread of its own, so that an engine can be shared between tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    def __enter__(self) -> LoopThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def run(self, coroutine: Coroutine[Any, Any, T], deadline_s: float = 300.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(deadline_s)

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
