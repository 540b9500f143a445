"""From a fault to a consistent state: the ladder. The order of its rungs is pure; `Recovery` climbs it.

    restore the newest checkpoint  ->  an older one  ->  ...  ->  a fresh sandbox with the task's setup
and from whichever rung holds, replay the ledger's later steps, comparing each observation by its digest.
A standby will be one more kind of rung, in front.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tenacity

from belayer_env.checkpoint import CheckpointRef, check_host, host_fingerprint
from belayer_env.errors import (
    ContextDiverged,
    EngineUnavailable,
    Fault,
    IncompatibleCheckpoint,
    RecoveryFailed,
    SandboxGone,
    StoreFull,
    TaskSetupFailed,
)
from belayer_env.ledger import Ledger, Step, observation_digest
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.spec import ExecResult, Task
from belayer_env.store import Store

__all__ = ["Recovered", "Recovery", "Rung", "ladder"]

ENGINE_PATIENCE_S = 60.0
"""How long a container engine may take to come back (a restart of dockerd takes some seconds)."""

REPLAY_ATTEMPTS = 3
"""Fresh tries at one rung when the new sandbox dies in the middle of the replay."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to a sandbox that contains the first ``step`` steps. ``checkpoint`` None: a fresh one."""

    checkpoint: CheckpointRef | None

    @property
    def step(self) -> int:
        """How many of the ledger's steps it contains already."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    def __str__(self) -> str:
        return f"restore {self.checkpoint.id} (step {self.step})" if self.checkpoint else "fresh"


def ladder(checkpoints: Iterable[CheckpointRef]) -> tuple[Rung, ...]:
    """All rungs, the best first. ``checkpoints``: those the ledger grew from, newest first."""
    return (*(Rung(ref) for ref in checkpoints), Rung(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A sandbox in the state that exactly the ledger's steps produce."""

    sandbox: Sandbox
    rung: Rung
    tried: tuple[str, ...]
    num_replayed: int
    total_s: float


class Recovery:
    """Builds sandboxes for one episode: fresh, from a checkpoint, or up to the end of its ledger."""

    def __init__(
        self,
        store: Store,
        runtime: SandboxRuntime,
        task: Task,
        episode_id: str,
        *,
        on_fault: Callable[[Fault], None],
        retrying: tenacity.Retrying | None = None,
    ) -> None:
        """``on_fault`` hears of every fault met on the way. ``retrying`` is what carries a call over an
        engine that is away; the default waits up to `ENGINE_PATIENCE_S`."""
        self._store = store
        self._runtime = runtime
        self._task = task
        self._episode_id = episode_id
        self._on_fault = on_fault
        self._retrying = retrying or tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(EngineUnavailable),
            stop=tenacity.stop_after_delay(ENGINE_PATIENCE_S),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2),
            reraise=True,
        )

    def fresh(self) -> Sandbox:
        """A new sandbox, the task's setup done.

        Raises:
            TaskSetupFailed: a setup command failed.
            Fault, SetupError: the sandbox could not be made, or died in its setup."""
        sandbox = self._made(lambda home: self._runtime.create(self._task.sandbox, home))
        try:
            for command in self._task.setup:
                result = sandbox.run(command, timeout_s=self._task.limits.setup_timeout_s)
                if result.exit_code != 0 or result.timed_out:
                    ended = "timed out" if result.timed_out else f"exited with {result.exit_code}"
                    raise TaskSetupFailed(
                        f"setup command {command!r} {ended}:\n{result.output.strip()}\n"
                        "correct Task.setup, or Limits.setup_timeout_s"
                    )
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def restored(self, ref: CheckpointRef) -> Sandbox:
        """A new sandbox with a checkpoint's state.

        Raises:
            CheckpointCorrupt: damaged; marked so, and listed no more.
            IncompatibleCheckpoint: not for this host, runtime or image.
            RestoreFailed: it did not come back to life."""
        manifest, directory = self._store.open_checkpoint(ref)
        check_host(manifest, host_fingerprint(manifest.host.criu_version), runtime=self._runtime.name)
        return self._made(
            lambda home: self._runtime.restore(self._task.sandbox, directory, manifest.meta, home)
        )

    def recover(self, ledger: Ledger) -> Recovered:
        """A sandbox in which exactly the ledger's steps have been executed.

        Raises:
            ContextDiverged: a replayed step gave another observation.
            RecoveryFailed: no rung held; ``tried`` has them all."""
        started = time.monotonic()
        tried: list[str] = []
        for rung in ladder(self._store.checkpoints(self._episode_id)):
            for _ in range(REPLAY_ATTEMPTS):
                try:
                    sandbox = self._stand_on(rung, ledger.since(rung.step))
                except ContextDiverged:
                    raise
                except (Fault, IncompatibleCheckpoint, TaskSetupFailed) as error:
                    tried.append(f"{rung}: {error}")
                    if isinstance(error, Fault):
                        self._on_fault(error)
                    if isinstance(error, StoreFull):
                        break  # the next rung may need less
                    if not isinstance(error, SandboxGone):
                        break  # this rung does not hold; a sandbox that died under a replay may, next time
                else:
                    return Recovered(
                        sandbox=sandbox,
                        rung=rung,
                        tried=tuple(tried),
                        num_replayed=len(ledger) - rung.step,
                        total_s=time.monotonic() - started,
                    )
        lines = "\n  ".join(tried)
        raise RecoveryFailed(f"no way back to step {len(ledger)}; tried\n  {lines}", tried=tuple(tried))

    def _stand_on(self, rung: Rung, later: Sequence[Step]) -> Sandbox:
        sandbox = self.restored(rung.checkpoint) if rung.checkpoint is not None else self.fresh()
        try:
            for step in later:
                self._replay(sandbox, step)
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def _replay(self, sandbox: Sandbox, step: Step) -> None:
        result = sandbox.run(step.action)
        digest = observation_digest(result.output, result.exit_code, result.timed_out)
        if digest != step.digest:
            raise ContextDiverged(
                f"step {step.number} ({step.action!r}) was replayed and gave another observation: "
                f"{_difference(step, result)}",
                step=step.number,
            )
        if self._task.reward is not None:
            # Its value is in the ledger; but whatever it ran is part of the state that the next steps saw.
            # What it raises, it raised then too, or recovery would not be here for this step.
            self._task.reward(sandbox, Ledger(self._store.load_ledger(self._episode_id).prefix(step.number)))

    def _made(self, make: Callable[[Path], Sandbox]) -> Sandbox:
        """A sandbox in a home of its own, which is gone again if it could not be made."""

        def attempt() -> Sandbox:
            home = self._store.new_home(self._episode_id, self._runtime.name)
            try:
                return make(home)
            except BaseException:
                self._runtime.sweep(home)
                raise

        return self._retrying(attempt)


def _difference(step: Step, result: ExecResult) -> str:
    if step.timed_out != result.timed_out:
        return f"timed_out was {step.timed_out} and is {result.timed_out}"
    if step.exit_code != result.exit_code:
        return f"the exit code was {step.exit_code} and is {result.exit_code}"
    before, now = step.observation.splitlines(), result.output.splitlines()
    for old, new in zip(before, now, strict=False):
        if old != new:
            return f"{old[:200]!r} was {new[:200]!r}"
    return f"{len(before)} lines were {len(now)}"
