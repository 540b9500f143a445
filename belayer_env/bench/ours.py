"""Belayer's runc runtime in the checkpoint bench."""

from __future__ import annotations

import time
from importlib.metadata import version

from belayer_env.bench.contender import DIRTY, SERVER, Sample
from belayer_env.checkpoint import CheckpointRef
from belayer_env.env import ContainerEnv
from belayer_env.errors import RuntimeFailed
from belayer_env.recovery import Recovery
from belayer_env.spec import Task
from belayer_env.store import Store

__all__ = ["Ours"]


class Ours:
    """A `ContainerEnv` that is stepped and checkpointed, and whose checkpoints are restored beside it."""

    name = "belayer"

    def __init__(self, image: str, store: Store) -> None:
        self.version = version("belayer")
        self._task = Task(image=image, setup=(SERVER,))
        self._store = store
        self._env: ContainerEnv | None = None
        self._last: CheckpointRef | None = None

    def start(self) -> None:
        """See `Contender.start`."""
        self._env = ContainerEnv(
            self._task, runtime="runc", policy="never", store=self._store, require="full"
        )
        self._env.reset()

    def round(self) -> Sample:
        """See `Contender.round`. The restore is what recovery does: verified by hash, a new sandbox."""
        env = self._env
        assert env is not None
        env.step(DIRTY)
        ref = env.checkpoint()
        record = env.telemetry.checkpoints[-1]
        if self._last is not None:
            self._store.drop_checkpoint(self._last.id)
        self._last = ref
        recovery = Recovery(self._store, env.runtime, self._task, env.episode.id, on_fault=lambda fault: None)
        started = time.monotonic()
        sandbox = recovery.restored(ref)
        try:
            if sandbox.run("true").exit_code != 0:
                raise RuntimeFailed("the restored shell cannot run `true`")
            restore_s = time.monotonic() - started
        finally:
            sandbox.destroy()
        started = time.monotonic()
        env.step("true")
        step_s = time.monotonic() - started
        return Sample(pause_s=record.pause_s, checkpoint_s=record.total_s, restore_s=restore_s, step_s=step_s)

    def close(self) -> None:
        """See `Contender.close`."""
        if self._env is not None:
            self._env.close()
            self._env = None
