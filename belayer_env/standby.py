"""The environment's shadow worker: one paused clone of the newest checkpoint. Taking it is a swap, not a
restore."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import psutil

from belayer_env.checkpoint import CheckpointRef
from belayer_env.errors import BelayerError, SandboxGone
from belayer_env.sandbox.base import Sandbox

__all__ = ["Standby"]

_LOG = logging.getLogger("belayer")
HOST_SHARE = 0.5
"""A clone may take this share of the memory that the host has left; beyond it, there is none."""


class Standby:
    """Prepared in the background, taken by recovery. Thread-safe. `drop` is owed.

    A clone that dies, or is of an older checkpoint, is replaced by the next `prepare`."""

    def __init__(
        self,
        restore: Callable[[CheckpointRef], Sandbox],
        *,
        max_bytes: int | None = None,
        available_bytes: Callable[[], int] = lambda: psutil.virtual_memory().available,
    ) -> None:
        """``restore`` makes a running sandbox of a checkpoint. ``max_bytes`` bounds the memory of the clone,
        which is at most what the checkpoint's processes held; None: bounded by the host's free memory
        alone."""
        self._restore = restore
        self._max_bytes = max_bytes
        self._available_bytes = available_bytes
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._ref: CheckpointRef | None = None
        self.memory_bytes = 0
        self.refusal = ""

    @property
    def checkpoint_id(self) -> str | None:
        """Which checkpoint it is a clone of; None while there is none that lives."""
        with self._lock:
            if self._sandbox is None or self._ref is None or not self._sandbox.is_alive():
                return None
            return self._ref.id

    def prepare(self, ref: CheckpointRef) -> bool:
        """Have a paused clone of this checkpoint; True if there is one now. Any earlier clone goes.

        Never raises: without a standby, recovery restores; ``refusal`` then says why there is none."""
        with self._lock:
            if self._sandbox is not None and self._ref == ref and self._sandbox.is_alive():
                return True
            self._let_go()
            self.refusal = self._over_budget(ref)
            if self.refusal:
                return False
            sandbox: Sandbox | None = None
            try:
                sandbox = self._restore(ref)
                sandbox.suspend()
                self.memory_bytes = sandbox.memory_bytes()
            except Exception as error:  # noqa: BLE001 - called in the background, where nobody would catch it
                if sandbox is not None:
                    sandbox.destroy()
                self.refusal = str(error) or type(error).__name__
                if not isinstance(error, BelayerError):
                    _LOG.warning("no standby of checkpoint %s", ref.id, exc_info=True)
                return False
            self._sandbox, self._ref = sandbox, ref
            return True

    def take(self, checkpoint_id: str) -> Sandbox:
        """The clone of this checkpoint, woken and proven answering; there is none any more.

        Raises:
            SandboxGone: there was none, or it had died, or a `prepare` has made it one of another checkpoint
                since it was asked for.
            Fault: it did not wake; it is gone."""
        with self._lock:
            if self._sandbox is None or self._ref is None or self._ref.id != checkpoint_id:
                raise SandboxGone(f"there is no standby of checkpoint {checkpoint_id}")
            sandbox, self._sandbox, self._ref = self._sandbox, None, None
            self.memory_bytes = 0
        try:
            sandbox.wake()
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def drop(self) -> None:
        """Let go of the clone. Idempotent, never raises."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        if self._sandbox is not None:
            self._sandbox.destroy()
        self._sandbox = self._ref = None
        self.memory_bytes = 0

    def _over_budget(self, ref: CheckpointRef) -> str:
        if self._max_bytes is not None and ref.size_bytes > self._max_bytes:
            return f"the clone would take up to {ref.size_bytes} bytes; standby_bytes is {self._max_bytes}"
        available = self._available_bytes()
        if ref.size_bytes > available * HOST_SHARE:
            return f"the clone would take up to {ref.size_bytes} bytes, and the host has {available} left"
        return ""
