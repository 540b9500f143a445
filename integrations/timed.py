"""A container env whose calls run in threads of their own, so that their waiter can stop waiting. Seconds.

A trainer's batch must not wait for ever for one episode. Python cannot end a thread, but a step that waits
for its container ends when the container dies: that is how `close` ends one that nobody waits for any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from belayer_env import ContainerEnv

__all__ = ["StepResult", "TimedEnv"]

T = TypeVar("T")
StepResult = tuple[str, float, bool, bool, dict[str, Any]]
"""What a Gymnasium env's step returns."""

_KILL_AGAIN_S = 0.1


class TimedEnv:
    """One env, made by the first `start`, or by `take_over`. One call at a time: wait for a call's future
    before the next one.

    The futures give what the call raised, KeyboardInterrupt too. `close` is owed."""

    def __init__(self, make: Callable[[], ContainerEnv]) -> None:
        self._make = make
        self._env: ContainerEnv | None = None
        self._call = threading.Thread()  # the one under way; this one never was
        self._hinting: threading.Thread | None = None
        self._closing: threading.Thread | None = None

    @property
    def env(self) -> ContainerEnv | None:
        """The env itself, once `start` has made it."""
        return self._env

    def start(self) -> Future[str]:
        """Make the env if there is none yet, and reset it: its first observation."""

        def begin() -> str:
            if self._env is None:
                self._env = self._make()
            return self._env.reset()[0]

        return self._run(begin)

    def take_over(self, resume: Callable[[], ContainerEnv]) -> Future[ContainerEnv]:
        """Instead of `start`: an env whose episode is under way already."""

        def begin() -> ContainerEnv:
            self._env = resume()
            return self._env

        return self._run(begin)

    def step(self, action: str) -> Future[StepResult]:
        """One step.

        Raises:
            RuntimeError: not started."""
        env = self._env
        if env is None:
            raise RuntimeError("step() before start() has made an env")
        return self._run(lambda: env.step(action))

    def hint(self, seconds: float) -> None:
        """Between two calls: so long it will likely be until the next one (`ContainerEnv.hint_bubble`), which
        waits until the env has taken it in. Waits for nothing itself, and never raises."""
        env = self._env
        if env is None or self._closing is not None or self._call.is_alive():
            return

        def tell() -> None:
            with contextlib.suppress(Exception):
                env.hint_bubble(seconds)

        self._hinting = threading.Thread(target=tell, name="belayer-hint", daemon=True)
        self._hinting.start()

    def close(self) -> threading.Thread:
        """End it in the background, with whatever call is under way; join the thread to wait for that. Never
        raises; more calls give the same thread."""
        if self._closing is None:
            self._closing = threading.Thread(target=self._end, name="belayer-close", daemon=True)
            self._closing.start()
        return self._closing

    def _run(self, call: Callable[[], T]) -> Future[T]:
        if self._closing is not None:
            raise RuntimeError("this env has been closed")
        future: Future[T] = Future()
        hinting, self._hinting = self._hinting, None

        def work() -> None:
            if hinting is not None:
                hinting.join()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the future's reader raises it
                future.set_exception(error)

        # A daemon: a reward function that hangs must not keep the interpreter from its end.
        self._call = threading.Thread(target=work, name="belayer-call", daemon=True)
        self._call.start()
        return future

    def _end(self) -> None:
        while self._call.is_alive():
            # Again and again: a step recovers from the first deaths, as it should.
            with contextlib.suppress(Exception):
                if self._env is not None:
                    self._env.episode.sandbox.kill()
            self._call.join(_KILL_AGAIN_S)
        if self._env is not None:
            self._env.close()
