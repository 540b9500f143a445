"""From a fault to a consistent state: the ladder. The order of its rungs is pure; `Recovery` climbs it.

    swap in the standby  ->  restore the newest checkpoint  ->  an older one  ->  ...  ->  a fresh sandbox
and from whichever rung holds, replay the ledger's later steps, comparing each observation by its digest. A
step that tells another story cuts the context: the state becomes that before it, and the agent is told
(`Rollback`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tenacity

from belayer_env.checkpoint import CheckpointRef, Manifest, check_host, host_fingerprint
from belayer_env.errors import (
    CheckpointCorrupt,
    ContextDiverged,
    EngineUnavailable,
    Fault,
    IncompatibleCheckpoint,
    RecoveryFailed,
    RestoreFailed,
    SandboxGone,
    SandboxOOM,
    TaskSetupFailed,
)
from belayer_env.ledger import Ledger, Step, observation_digest
from belayer_env.rollback import Rollback
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.spec import ExecResult, Task
from belayer_env.standby import Standby
from belayer_env.store import Store
from belayer_env.volatile import compile_volatile, normalise

__all__ = ["Attempt", "Budget", "Recovered", "Recovery", "Rung", "ladder", "task_digest_of"]

ENGINE_PATIENCE_S = 60.0
"""How long a container engine may take to come back (a restart of dockerd takes some seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one recovery may take: tries in all (and one more, if need be, for the fresh start), tries at one
    rung when its new sandbox is lost under the replay, and seconds. A rung under way at their end is
    finished."""

    attempts: int = 24
    attempts_per_rung: int = 3
    seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to a sandbox that contains the first ``step`` steps. ``checkpoint`` None: a fresh one."""

    checkpoint: CheckpointRef | None
    step: int = 0
    is_standby: bool = False

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "fresh"
        return f"{'standby' if self.is_standby else 'restore'} {self.checkpoint.id} (step {self.step})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at one rung; ``error`` is empty for the one that held."""

    rung: Rung
    error: str
    total_s: float

    def __str__(self) -> str:
        return f"{self.rung}: {self.error or 'held'}"


def ladder(
    checkpoints: Iterable[tuple[CheckpointRef, int]], *, standby: str | None = None
) -> tuple[Rung, ...]:
    """All rungs, the best first. ``checkpoints``: those the ledger grew from, newest first, each with the
    step its state is that of. ``standby``: the id of the checkpoint that has a paused clone."""
    rungs = []
    for ref, step in checkpoints:
        if ref.id == standby:
            rungs.append(Rung(ref, step, is_standby=True))
        rungs.append(Rung(ref, step))
    return (*rungs, Rung(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A sandbox in the state that exactly the ledger's first ``step`` steps produce. ``rollback`` is set
    where that is not all of them."""

    sandbox: Sandbox
    rung: Rung
    step: int
    attempts: tuple[Attempt, ...]
    rollback: Rollback | None


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
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
        retrying: tenacity.Retrying | None = None,
    ) -> None:
        """``on_fault`` hears of every fault met on the way. ``retrying`` is what carries a call over an
        engine that is away; the default waits up to `ENGINE_PATIENCE_S`."""
        self._store = store
        self._runtime = runtime
        self._task = task
        self._episode_id = episode_id
        self._on_fault = on_fault
        self._budget = budget or Budget()
        self._clock = clock
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

    def verified(self, ref: CheckpointRef) -> tuple[Manifest, Path]:
        """A checkpoint's manifest and directory, its files proven what they were, and fit for this host.

        Raises:
            CheckpointCorrupt: damaged; marked so, and listed no more.
            IncompatibleCheckpoint: not for this host or runtime."""
        manifest, directory = self._store.open_checkpoint(ref)
        check_host(manifest, host_fingerprint(manifest.host.criu_version), runtime=self._runtime.name)
        return manifest, directory

    def restored(self, ref: CheckpointRef, verified: tuple[Manifest, Path] | None = None) -> Sandbox:
        """A new sandbox with a checkpoint's state. ``verified``: what `verified` gave, if that was just done.

        Raises:
            CheckpointCorrupt, IncompatibleCheckpoint: see `verified`.
            RestoreFailed: it did not come back to life."""
        manifest, directory = verified or self.verified(ref)
        return self._made(
            lambda home: self._runtime.restore(self._task.sandbox, directory, manifest.meta, home)
        )

    def recover(self, ledger: Ledger, standby: Standby | None = None) -> Recovered:
        """A sandbox in which exactly the ledger's steps have been executed; or the longest prefix of them
        that can be had again, with a rollback that says so.

        Raises:
            RecoveryFailed: no rung held within the budget; ``tried`` has them all."""
        started = self._clock()
        attempts: list[Attempt] = []
        target, rollback = len(ledger), None
        while True:
            try:
                sandbox, rung = self._climb(ledger, target, standby, attempts, started)
            except ContextDiverged as diverged:
                # What has run of it cannot be taken back in place: climb again, to just before it.
                target = diverged.step - 1
                rollback = Rollback(to_step=target, reason=str(diverged), diverged_step=diverged.step)
                continue
            if self._task.replay == "never" and rung.step < target:
                target = rung.step
                reason = "the environment was lost, and this task's commands must not be run twice"
                rollback = Rollback(to_step=target, reason=reason)
            return Recovered(
                sandbox=sandbox, rung=rung, step=target, attempts=tuple(attempts), rollback=rollback
            )

    def _climb(
        self, ledger: Ledger, target: int, standby: Standby | None, attempts: list[Attempt], started: float
    ) -> tuple[Sandbox, Rung]:
        """Up the ladder to the first rung that holds, and from there to step ``target``.

        Raises:
            ContextDiverged: a replayed step gave another observation.
            RecoveryFailed: none held."""
        checkpoints = [
            (ref, self._store.covered_step(ref)) for ref in self._store.checkpoints(self._episode_id)
        ]
        # A state after ``target`` is of no use: its steps have been told otherwise.
        usable = [(ref, min(step, target)) for ref, step in checkpoints if ref.step <= target]
        for rung in ladder(usable, standby=standby.checkpoint_id if standby is not None else None):
            later = ledger.prefix(target)[rung.step :] if self._task.replay == "always" else ()
            for try_number in range(1, self._budget.attempts_per_rung + 1):
                if self._clock() - started > self._budget.seconds:
                    raise self._failed(ledger, attempts)
                # One try is kept for the fresh start: it needs none of the checkpoints that failed.
                if len(attempts) >= self._budget.attempts and (rung.checkpoint is not None or try_number > 1):
                    break
                began = self._clock()
                is_last_try = (
                    try_number == self._budget.attempts_per_rung or len(attempts) + 1 >= self._budget.attempts
                )
                try:
                    sandbox = self._stand_on(rung, later, ledger, standby, believe_oom=is_last_try)
                except ContextDiverged as diverged:
                    attempts.append(Attempt(rung=rung, error=str(diverged), total_s=self._clock() - began))
                    self._on_fault(diverged)
                    raise
                except (Fault, IncompatibleCheckpoint, TaskSetupFailed) as error:
                    attempts.append(Attempt(rung=rung, error=str(error), total_s=self._clock() - began))
                    if isinstance(error, Fault):
                        self._on_fault(error)
                    if rung.is_standby or not _may_hold_next_time(error, try_number):
                        break
                else:
                    attempts.append(Attempt(rung=rung, error="", total_s=self._clock() - began))
                    return sandbox, rung
        raise self._failed(ledger, attempts)

    def _failed(self, ledger: Ledger, attempts: Sequence[Attempt]) -> RecoveryFailed:
        tried = tuple(str(attempt) for attempt in attempts)
        lines = "\n  ".join(tried)
        return RecoveryFailed(f"no way back to step {len(ledger)}; tried\n  {lines}", tried=tried)

    def _stand_on(
        self,
        rung: Rung,
        later: Sequence[Step],
        ledger: Ledger,
        standby: Standby | None,
        *,
        believe_oom: bool,
    ) -> Sandbox:
        if rung.checkpoint is None:
            sandbox = self.fresh()
        elif rung.is_standby and standby is not None:
            sandbox = standby.take(rung.checkpoint.id)
        else:
            sandbox = self.restored(rung.checkpoint)
        try:
            for step in later:
                self._replay(sandbox, step, ledger, believe_oom=believe_oom)
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def _replay(self, sandbox: Sandbox, step: Step, ledger: Ledger, *, believe_oom: bool) -> None:
        """Run a step again, and compare. What differs in a sandbox that then turns out to be dying, or that
        the OOM killer has struck (unless ``believe_oom``), may come out right when it is tried once more."""
        result = sandbox.run(step.action)
        if task_digest_of(self._task, result) != step.digest:
            message = (
                f"step {step.number} ({step.action[:200]!r}) was replayed and gave another observation: "
                f"{_difference(step, result)}"
            )
            if result.oom_kills and not believe_oom:
                raise SandboxOOM(f"the OOM killer took a process: {message}", begun=True)
            if not sandbox.answers():
                raise SandboxGone(f"the sandbox was dying: {message}", begun=True)
            raise ContextDiverged(message, step=step.number)
        if self._task.reward is not None:
            # Its value is in the ledger; but whatever it ran is part of the state that the next steps saw.
            self._task.reward(sandbox, Ledger(ledger.prefix(step.number)))

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


def _may_hold_next_time(error: Exception, try_number: int) -> bool:
    """Whether what ended a try lay in the world (killed, frozen, stopped under its replay, a runtime command
    that failed) and not in the rung. A restore that fails may be either, and is tried twice."""
    if isinstance(error, RestoreFailed):
        return try_number == 1
    return isinstance(error, Fault) and not isinstance(error, CheckpointCorrupt)


def task_digest_of(task: Task, result: ExecResult) -> str:
    """The digest by which a replay of this result is recognised, the task's volatile parts left out."""
    observation = normalise(result.output, compile_volatile(tuple(task.volatile)))
    return observation_digest(observation, result.exit_code, result.timed_out)


def _difference(step: Step, result: ExecResult) -> str:
    if step.timed_out != result.timed_out:
        return f"timed_out was {step.timed_out} and is {result.timed_out}"
    if step.exit_code != result.exit_code:
        return f"the exit code was {step.exit_code} and is {result.exit_code}"
    before, now = step.observation.splitlines(), result.output.splitlines()
    for old, new in zip(before, now, strict=False):
        if old != new:
            return f"{old[:200]!r} was told, {new[:200]!r} is now"
    return f"{len(before)} lines were told, {len(now)} are now"
