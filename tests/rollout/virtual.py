"""An event loop whose time passes only when nobody has anything to do: hours of queueing take a second."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["run_virtual", "skip_time", "until"]

T = TypeVar("T")
MOST_S = 20_000.0
"""Of virtual time: what takes longer hangs."""


class _Selector(selectors.DefaultSelector):
    """Sleeps by moving the clock."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, in virtual time.

    Raises:
        TimeoutError: it hangs."""

    async def bounded() -> T:
        async with asyncio.timeout(MOST_S):
            return await work

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(bounded())


def skip_time(seconds: float) -> None:
    """Time passes while the loop is not looking, as when the process was stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _VirtualLoop)
    loop.virtual.now += seconds


async def until(condition: Callable[[], bool], *, within_s: float = 120.0) -> None:
    """Wait for something that no event tells of.

    Raises:
        TimeoutError: it does not come about."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is the state of the code under test
            await asyncio.sleep(0.01)
