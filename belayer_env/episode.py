"""One attempt at a task: a sandbox, the ledger of what the model was told, and the way back after a fault.

No Gymnasium in here. The one invariant: whenever `step` has returned, the sandbox is in the state that
executing exactly the ledger's actions produces, or the caller has been told (`Rollback`) that the ledger is
now shorter. A fault puts the sandbox out of that state; it is then thrown away and a new one is brought
there, by the ladder of `recovery`, before anything else is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from belayer_env.checkpoint import CheckpointRef
from belayer_env.checkpointer import Checkpointer
from belayer_env.errors import (
    BelayerError,
    CheckpointCorrupt,
    CheckpointRefused,
    Fault,
    ForeignCheckpoint,
    InvalidInput,
    RecoveryFailed,
    SandboxGone,
    StoreFull,
)
from belayer_env.ledger import Ledger, Step
from belayer_env.policy import CheckpointPolicy
from belayer_env.recovery import Recovery, task_digest_of
from belayer_env.rollback import Rollback
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.sandbox.shell import check_command
from belayer_env.spec import ExecResult, Task
from belayer_env.standby import Standby
from belayer_env.store import Store
from belayer_env.telemetry import RecoveryRecord, StepRecord, Telemetry
from belayer_env.timelines import Recorder

__all__ = ["Episode", "Means"]

_LOG = logging.getLogger("belayer")
ACTION_ATTEMPTS = 3
"""How often one action may take its sandbox down before it is the action that is to blame."""
_TRIES = 12
"""How often in all it is tried: a sandbox lost before the action had begun is nobody's blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What an episode runs on. ``standby``: keep a paused clone; ``standby_bytes`` bounds its memory (None:
    half of what the host has left)."""

    store: Store
    runtime: SandboxRuntime
    policy: CheckpointPolicy
    standby: bool = False
    standby_bytes: int | None = None


class Episode:
    """Made by `begin`, `resume` or `fork`; `close` is owed. Used by one thread at a time."""

    def __init__(self, episode_id: str, task: Task, means: Means, ledger: Ledger) -> None:
        self.id = episode_id
        self.task = task
        self.ledger = ledger
        self.telemetry = Telemetry()
        self.terminated = _is_terminated(ledger)
        self._means = means
        self._store = means.store
        self._recovery = Recovery(means.store, means.runtime, task, episode_id, on_fault=self._note_fault)
        self._standby = (
            Standby(self._recovery.restored, max_bytes=means.standby_bytes) if means.standby else None
        )
        self._checkpointer = Checkpointer(
            episode_id,
            task,
            store=means.store,
            runtime=means.runtime,
            policy=means.policy,
            telemetry=self.telemetry,
            on_published=self._prepare_standby,
        )
        self._recorder = Recorder(means.store.timelines, episode_id, self.telemetry)
        self._sandbox: Sandbox | None = None
        self._untold: Rollback | None = None
        self._standby_due: CheckpointRef | None = None
        self._burials: list[threading.Thread] = []

    @classmethod
    def begin(cls, task: Task, means: Means) -> Episode:
        """A new episode: a fresh sandbox, the task's setup done, a checkpoint if the policy wants one.

        Raises:
            SetupError: the image, the host or the setup commands will not do. Nothing is left running.
            Fault: the sandbox did not survive its start."""
        episode_id = means.store.begin_episode(
            task, runtime=means.runtime.name, policy=str(means.policy), tier=means.runtime.tier
        )
        episode: Episode | None = None
        try:
            episode = cls(episode_id, task, means, Ledger())
            episode._sandbox = episode._recovery.fresh()
            episode.telemetry.reset_s = episode.telemetry.now_s()
            episode._open_bubble()
        except BaseException:
            if episode is None:
                means.store.end_episode(episode_id)
            else:
                episode.close()
            raise
        return episode

    @classmethod
    def resume(cls, episode_id: str, task: Task, means: Means) -> Episode:
        """Go on with an open episode whose process died: what it left running is swept away, and its last
        consistent state is brought back from checkpoint and ledger. Should that be a shorter prefix, the next
        `step` says so.

        Raises:
            InvalidInput: it is unknown, closed, of another task, or its owner lives.
            RecoveryFailed: the state cannot be had again."""
        record = means.store.claim_episode(episode_id)
        if record.task_digest != task.digest:
            raise InvalidInput(f"episode {episode_id} is of another task: give the task it was begun with")
        for home in means.store.homes():
            if home.episode_id == episode_id:
                means.runtime.sweep(home.path)
        episode = cls(episode_id, task, means, means.store.load_ledger(episode_id))
        try:
            episode._recover()
            episode._replenish_standby()
        except BaseException:
            episode._suspend()  # the episode itself stays: its checkpoints may serve another try
            raise
        return episode

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox as it is now, perhaps dead: for tools and fault drills. What is done to it by others
        than `step` is not in the ledger, and lost with it.

        Raises:
            SandboxGone: a fault took it, and the next step will bring a new one."""
        if self._sandbox is None:
            raise SandboxGone("the sandbox was lost; the next step recovers it")
        return self._sandbox

    def step(self, action: str) -> Step | Rollback:
        """Execute one action, whatever befalls the sandbox meanwhile; the ledger has it when this returns.

        A `Rollback` instead of a step: the action was not run, the ledger has been cut, and the sandbox is in
        the state of what is left of it.

        Raises:
            InvalidInput: the action is no text, or holds NUL. Nothing ran.
            RecoveryFailed: a fault, and no way back; or the action itself takes its sandbox down each time.
                Then the state before it has been recovered, and another action may follow."""
        check_command(action)
        started_s = self.telemetry.now_s()
        waited_s = self._close_bubble()
        outcome = self._run_through(action)
        if isinstance(outcome, Rollback):
            self._replenish_standby()
            self._recorder.look()
            return outcome
        try:
            self._store.append_step(self.id, outcome)
        except BaseException:
            # The action had effects that no ledger holds. (One that was interrupted may hold it after all.)
            self._drop_sandbox()
            with contextlib.suppress(BelayerError):
                self._store.cut_ledger(self.id, len(self.ledger))
            raise
        self.ledger.append(outcome)
        self.terminated = outcome.terminated
        self.telemetry.steps.append(
            StepRecord(
                step=outcome.number,
                command_s=outcome.cost_s,
                total_s=self.telemetry.now_s() - started_s,
                waited_s=waited_s,
                started_s=started_s,
            )
        )
        self._open_bubble()
        self._recorder.look()
        return outcome

    def checkpoint(self, *, pinned: bool = True) -> CheckpointRef:
        """A full checkpoint of now. ``pinned``: kept until the episode is closed.

        Raises:
            CheckpointRefused: the sandbox cannot be checkpointed as it is; it goes on unharmed.
            StoreFull: no room; it goes on unharmed.
            Fault: the sandbox was lost twice over it; the next step recovers."""
        self._close_bubble()
        for attempt in (1, 2):
            sandbox = self._consistent_sandbox()
            try:
                return self._checkpointer.take(sandbox, len(self.ledger), pinned=pinned)
            except (CheckpointRefused, StoreFull):
                raise
            except Fault:
                if attempt == 2:
                    raise
            finally:
                if self._checkpointer.sandbox_lost:
                    self._drop_sandbox()
        raise AssertionError("unreachable")

    def restore(self, ref: CheckpointRef) -> None:
        """Go back (or over) to a checkpoint: a new sandbox with its state, and the ledger of its time.

        Raises:
            ForeignCheckpoint: it is of another task or episode, or has been dropped. Nothing has changed.
            CheckpointCorrupt, RestoreFailed, IncompatibleCheckpoint: it does not come back. Nothing has
                changed."""
        if ref.task_digest != self.task.digest:
            raise ForeignCheckpoint(
                f"checkpoint {ref.id} is of another task; restore it in an env of that task"
            )
        if ref.episode_id != self.id:
            raise ForeignCheckpoint(
                f"checkpoint {ref.id} belongs to episode {ref.episode_id}, not to {self.id}: "
                "checkpoints end with their episode"
            )
        self._close_bubble()
        self._checkpointer.settle()
        sandbox = self._recovery.restored(ref)
        try:
            self.ledger = self._store.rewind_ledger(ref)
        except BaseException:
            sandbox.destroy()
            raise
        self._drop_sandbox()
        self._sandbox = sandbox
        self.terminated = _is_terminated(self.ledger)
        self._untold = None
        self._checkpointer.stand_on(ref, ref.step)

    def fork(self, n: int, open_store: Callable[[], Store] | None = None) -> list[Episode]:
        """``n`` episodes from one instant, now (of the checkpoint that this bubble has, if it has one): each
        with a sandbox, a ledger (the same so far) and a lifetime of its own, restored in parallel from one
        checkpoint. This episode goes on as before. ``open_store``: opens this episode's store once more, for
        a fork that is to outlive it.

        Raises:
            InvalidInput: ``n`` is below 1.
            Fault: the checkpoint or a restore failed; then there is no fork at all."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidInput(f"fork(n) takes a whole number of envs, 1 or more, not {n!r}")
        ref = self._checkpoint_of_now() or self.checkpoint(pinned=False)
        try:
            verified = self._recovery.verified(ref)
        except CheckpointCorrupt as error:
            self._note_fault(error)
            ref = self.checkpoint(pinned=False)
            verified = self._recovery.verified(ref)
        forks: list[Episode] = []
        try:
            for _ in range(n):
                store = open_store() if open_store is not None else self._store
                episode_id, own_ref = store.fork_episode(ref, policy=str(self._means.policy))
                means = dataclasses.replace(self._means, store=store)
                fork = Episode(episode_id, self.task, means, store.load_ledger(episode_id))
                fork._checkpointer.stand_on(own_ref, store.covered_step(own_ref))
                fork._untold = self._untold  # its agent's context is this one's
                forks.append(fork)
            with ThreadPoolExecutor(n, thread_name_prefix="belayer-fork") as pool:
                sandboxes = [pool.submit(fork._recovery.restored, ref, verified) for fork in forks]
            for fork, sandbox in zip(forks, sandboxes, strict=True):
                fork._sandbox = sandbox.result() if sandbox.exception() is None else None
            failure = next((s.exception() for s in sandboxes if s.exception() is not None), None)
            if failure is not None:
                raise failure
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        return forks

    def _checkpoint_of_now(self) -> CheckpointRef | None:
        """The one that was taken since the last step, or is that step's state: it has to be taken only
        once."""
        self._close_bubble()
        self._checkpointer.settle()
        foothold = self._checkpointer.foothold
        if self._sandbox is None or foothold is None or foothold.step != len(self.ledger):
            return None
        return foothold.ref

    def hint_bubble(self, seconds: float) -> None:
        """What a rollout client knows of the wait under way: seconds from now until the next action.

        Raises:
            InvalidInput: not a finite number of seconds, 0 or more."""
        self._checkpointer.hint(seconds, self._sandbox, self.ledger)

    def settle(self) -> None:
        """Wait until what runs in the background (a checkpoint being published, a standby being made, a lost
        sandbox being cleared away) is done."""
        self._checkpointer.settle()
        for thread in self._burials:
            thread.join()

    def close(self) -> None:
        """End it: the sandbox, its checkpoints and its ledger go. Idempotent, never raises."""
        self._suspend()
        self._recorder.close()
        with contextlib.suppress(Exception):
            self._store.end_episode(self.id)

    # -- one action

    def _run_through(self, action: str) -> Step | Rollback:
        """Run the action in a consistent sandbox, over faults; its step, not yet in the ledger."""
        num_begun = 0
        for _ in range(_TRIES):
            sandbox = self._consistent_sandbox()
            if self._untold is not None:
                rollback, self._untold = self._untold, None
                return rollback
            try:
                return self._attempt(sandbox, action)
            except Fault as fault:
                self._note_fault(fault)
                if not fault.begun and sandbox.is_alive() and sandbox.answers():
                    continue  # nothing was lost
                self._drop_sandbox()
                if fault.begun and self.task.replay == "never":
                    return self._told_of_unknown_effects(fault)
                num_begun += fault.begun
                if num_begun == ACTION_ATTEMPTS:
                    self._recover()
                    raise RecoveryFailed(
                        f"the action took its sandbox down {num_begun} times ({fault}); "
                        f"the state before it has been recovered: {action[:200]!r}"
                    ) from fault
            except BaseException:
                # The reward's own error, or an interrupt: the action had effects that no ledger holds.
                self._drop_sandbox()
                raise
        raise RecoveryFailed(f"the action could not be run in {_TRIES} attempts: {action[:200]!r}")

    def _attempt(self, sandbox: Sandbox, action: str) -> Step:
        result = sandbox.run(action)
        if self.task.reward is None:
            return self._step_of(action, result)
        seen = Ledger((*self.ledger.steps, self._step_of(action, result)))
        try:
            verdict = self.task.reward(sandbox, seen)
        except Fault as fault:
            fault.begun = True  # the action ran, whatever the reward's own command did
            raise
        reward, terminated = verdict if isinstance(verdict, tuple) else (verdict, False)
        return self._step_of(action, result, reward=float(reward), terminated=bool(terminated))

    def _step_of(
        self, action: str, result: ExecResult, *, reward: float = 0.0, terminated: bool = False
    ) -> Step:
        foothold = self._checkpointer.foothold
        return Step(
            number=len(self.ledger) + 1,
            action=action,
            observation=result.output,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            output_truncated=result.output_truncated,
            shell_restarted=result.shell_restarted,
            cost_s=result.duration_s,
            digest=task_digest_of(self.task, result),
            checkpoint_id=foothold.ref.id if foothold is not None else None,
            reward=reward,
            terminated=terminated,
        )

    # -- recovery

    def _consistent_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._recover()
        assert self._sandbox is not None
        return self._sandbox

    def _recover(self) -> None:
        """Bring a sandbox to the end of the ledger; or cut the ledger to where one could be brought, and keep
        the rollback for the next step to tell."""
        started_s = self.telemetry.now_s()
        self._checkpointer.settle()  # the checkpoint being published may be the best rung
        recovered = self._recovery.recover(self.ledger, self._standby)
        if recovered.rollback is not None:
            try:
                self._cut(recovered.rollback)
            except BaseException:
                # A sandbox behind its ledger, and nobody told: the next step begins once more.
                recovered.sandbox.destroy()
                raise
        self._sandbox = recovered.sandbox
        num_replayed = recovered.step - recovered.rung.step
        self._checkpointer.stand_on(recovered.rung.checkpoint, recovered.rung.step)
        self.telemetry.recoveries.append(
            RecoveryRecord(
                step=len(self.ledger) + 1,
                rung=str(recovered.rung),
                tried=tuple(str(attempt) for attempt in recovered.attempts[:-1]),
                num_replayed=num_replayed,
                total_s=self.telemetry.now_s() - started_s,
                rolled_back_to=recovered.step if recovered.rollback is not None else None,
                started_s=started_s,
            )
        )
        if self._standby is not None and recovered.rung.checkpoint is not None:
            self._standby_due = recovered.rung.checkpoint

    def _cut(self, rollback: Rollback) -> None:
        """Make the ledger the prefix that could be had again, and keep the rollback to tell."""
        self._store.cut_ledger(self.id, rollback.to_step)
        self.ledger.cut(rollback.to_step)
        self.terminated = _is_terminated(self.ledger)
        # Two in a row before anybody was told: the shorter prefix is what holds.
        if self._untold is None or rollback.to_step < self._untold.to_step:
            self._untold = rollback
        with contextlib.suppress(Fault):
            self._store.forget_after(
                self.id, rollback.to_step
            )  # they are listed no more; this is for their room

    def _told_of_unknown_effects(self, fault: Fault) -> Rollback:
        self._recover()
        rollback, self._untold = self._untold, None
        return rollback or Rollback(
            to_step=len(self.ledger),
            reason=f"a fault hit the command under way ({fault}), and this task's commands are not run twice",
        )

    def _replenish_standby(self) -> None:
        """After a recovery, but not at once: its restore would race the action that has waited already."""
        ref, self._standby_due = self._standby_due, None
        if ref is not None:
            self._in_background(lambda: self._prepare_standby(ref))

    def _prepare_standby(self, ref: CheckpointRef) -> None:
        if self._standby is not None:
            self._standby.prepare(ref)
            self.telemetry.standby_bytes = self._standby.memory_bytes
            self.telemetry.standby_refusal = self._standby.refusal

    # -- the sandbox's end

    def _drop_sandbox(self) -> None:
        """Part with the sandbox: killed now, cleared away in the background, where no step waits for it."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._in_background(sandbox.destroy)

    def _in_background(self, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001 - nobody is there to catch it
                _LOG.warning("%s: an error in the background", self.id, exc_info=True)

        thread = threading.Thread(target=guarded, name=f"belayer-{self.id}", daemon=True)
        thread.start()
        self._burials = [*(old for old in self._burials if old.is_alive()), thread]

    def _suspend(self) -> None:
        """Let go of everything that runs, and of nothing that is on disk. Never raises."""
        self._checkpointer.close()
        self._drop_sandbox()
        for thread in self._burials:
            thread.join()
        if self._standby is not None:
            self._standby.drop()

    def _note_fault(self, fault: Fault) -> None:
        self.telemetry.note_fault(len(self.ledger) + 1, fault)

    # -- bubbles

    def _open_bubble(self) -> None:
        self._replenish_standby()
        if self._sandbox is not None and not self.terminated:
            self._checkpointer.open_bubble(self._sandbox, self.ledger)

    def _close_bubble(self) -> float:
        """Seconds that the checkpoint of this bubble made the caller wait."""
        waited_s = self._checkpointer.close_bubble()
        if self._checkpointer.sandbox_lost:
            self._drop_sandbox()
        return waited_s


def _is_terminated(ledger: Ledger) -> bool:
    steps: Sequence[Step] = ledger.steps
    return bool(steps and steps[-1].terminated)
