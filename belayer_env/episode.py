"""One attempt at a task: a sandbox, the ledger of what the model was told, and the way back after a fault.

No Gymnasium in here. The one invariant: whenever `step` has returned, the sandbox is in the state that
executing exactly the ledger's actions produces. A fault puts the sandbox out of that state; it is then thrown
away and a new one is brought there, from a checkpoint and a replay, before anything else is run.
"""

from __future__ import annotations

import contextlib
import time

from belayer_env.checkpoint import CheckpointRef
from belayer_env.errors import (
    CheckpointRefused,
    Fault,
    ForeignCheckpoint,
    InvalidInput,
    RecoveryFailed,
    SandboxGone,
    StoreFull,
)
from belayer_env.ledger import Ledger, Step
from belayer_env.policy import CheckpointPolicy, Moment
from belayer_env.recovery import Recovery
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.sandbox.shell import check_command
from belayer_env.spec import ExecResult, Task
from belayer_env.store import Store
from belayer_env.telemetry import CheckpointRecord, RecoveryRecord, StepRecord, Telemetry

__all__ = ["Episode"]

ACTION_ATTEMPTS = 3
"""How often one action may take its sandbox down before it is the action that is to blame."""

KEPT_CHECKPOINTS = 2
"""Of those the policy made: the newest, and one to fall back on should it be damaged."""

MOST_SKIPPED_BUBBLES = 16


class Episode:
    """Made by `begin` or `resume`; `close` is owed. Used by one thread at a time."""

    def __init__(
        self,
        episode_id: str,
        task: Task,
        *,
        store: Store,
        runtime: SandboxRuntime,
        policy: CheckpointPolicy,
        ledger: Ledger,
    ) -> None:
        self.id = episode_id
        self.task = task
        self.ledger = ledger
        self.telemetry = Telemetry()
        self.terminated = bool(ledger.steps and ledger.steps[-1].terminated)
        self._store = store
        self._runtime = runtime
        self._policy = policy
        self._recovery = Recovery(store, runtime, task, episode_id, on_fault=self._note_fault)
        self._sandbox: Sandbox | None = None
        self._rests_on: CheckpointRef | None = None
        self._bubbles_to_skip = 0
        self._refusals = 0

    @classmethod
    def begin(cls, task: Task, *, store: Store, runtime: SandboxRuntime, policy: CheckpointPolicy) -> Episode:
        """A new episode: a fresh sandbox, the task's setup done, a checkpoint if the policy wants one.

        Raises:
            SetupError: the image, the host or the setup commands will not do. Nothing is left running.
            Fault: the sandbox did not survive its start."""
        episode_id = store.begin_episode(task, runtime=runtime.name, policy=str(policy), tier=runtime.tier)
        episode = cls(episode_id, task, store=store, runtime=runtime, policy=policy, ledger=Ledger())
        try:
            started = time.monotonic()
            episode._sandbox = episode._recovery.fresh()
            episode.telemetry.reset_s = time.monotonic() - started
            episode._checkpoint_if_due()
        except BaseException:
            episode.close()
            raise
        return episode

    @classmethod
    def resume(
        cls, episode_id: str, task: Task, *, store: Store, runtime: SandboxRuntime, policy: CheckpointPolicy
    ) -> Episode:
        """Go on with an open episode whose process died: what it left running is swept away, and its last
        consistent state is brought back from checkpoint and ledger.

        Raises:
            InvalidInput: it is unknown, closed, of another task, or its owner lives.
            RecoveryFailed, ContextDiverged: the state cannot be had again."""
        record = store.claim_episode(episode_id)
        if record.task_digest != task.digest:
            raise InvalidInput(f"episode {episode_id} is of another task: give the task it was begun with")
        for home in store.homes():
            if home.episode_id == episode_id:
                runtime.sweep(home.path)
        ledger = store.load_ledger(episode_id)
        episode = cls(episode_id, task, store=store, runtime=runtime, policy=policy, ledger=ledger)
        try:
            episode._recover()
        except BaseException:
            episode._drop_sandbox()  # the episode itself stays: its checkpoints may serve another try
            raise
        return episode

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox as it is now, perhaps dead: for reward functions, tools and fault drills.

        Raises:
            SandboxGone: a fault took it, and the next step will bring a new one."""
        if self._sandbox is None:
            raise SandboxGone("the sandbox was lost; the next step recovers it")
        return self._sandbox

    def step(self, action: str) -> Step:
        """Execute one action, whatever befalls the sandbox meanwhile; the ledger has it when this returns.

        Raises:
            InvalidInput: the action is no text, or holds NUL. Nothing ran.
            ContextDiverged: a fault, and the replay after it told another story.
            RecoveryFailed: a fault, and no way back; or the action itself takes its sandbox down each time.
                Then the state before it has been recovered, and another action may follow."""
        check_command(action)
        started = time.monotonic()
        step = self._run_through(action)
        self._store.append_step(self.id, step)
        self.ledger.append(step)
        self.terminated = step.terminated
        self._checkpoint_if_due()
        self.telemetry.steps.append(
            StepRecord(step=step.number, command_s=step.cost_s, total_s=time.monotonic() - started)
        )
        return step

    def checkpoint(self, *, pinned: bool = True) -> CheckpointRef:
        """A full checkpoint of now. ``pinned``: kept until the episode is closed.

        Raises:
            CheckpointRefused: the sandbox cannot be checkpointed as it is; it goes on unharmed.
            StoreFull: no room; it goes on unharmed.
            Fault: any other; the next step recovers."""
        sandbox = self._consistent_sandbox()
        started = time.monotonic()
        staging = self._store.staging(self.id)
        pause_s = 0.0
        try:
            saved = sandbox.save(staging)
            pause_s = saved.pause_s
            ref = self._store.publish(
                staging,
                episode_id=self.id,
                task_digest=self.task.digest,
                step=len(self.ledger),
                saved=saved,
                runtime=self._runtime.name,
                image_digest=saved.meta["image_digest"],
                criu_version=saved.meta["criu_version"],
                pinned=pinned,
            )
        except Fault as fault:
            self._note_checkpoint("", pause_s, started, error=str(fault))
            if not isinstance(fault, (CheckpointRefused, StoreFull)):
                self._note_fault(fault)
                self._drop_sandbox()
            elif not sandbox.is_alive():
                self._drop_sandbox()
            raise
        except BaseException:
            self._drop_sandbox()  # interrupted: nobody can say in what state
            raise
        self._note_checkpoint(ref.id, pause_s, started, size_bytes=ref.size_bytes)
        self._rests_on = ref
        return ref

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
        sandbox = self._recovery.restored(ref)
        self._drop_sandbox()
        self._sandbox = sandbox
        self._rests_on = ref
        self.ledger = self._store.rewind_ledger(ref)
        self.terminated = bool(self.ledger.steps and self.ledger.steps[-1].terminated)

    def close(self) -> None:
        """End it: the sandbox, its checkpoints and its ledger go. Idempotent, never raises."""
        self._drop_sandbox()
        with contextlib.suppress(Exception):
            self._store.end_episode(self.id)

    # -- one action
    # --------------------------------------------------------------------------------------------

    def _run_through(self, action: str) -> Step:
        """Run the action in a consistent sandbox, over faults; its step, not yet in the ledger."""
        for attempt in range(1, ACTION_ATTEMPTS + 1):
            sandbox = self._consistent_sandbox()
            try:
                return self._attempt(sandbox, action)
            except Fault as fault:
                self._note_fault(fault)
                self._drop_sandbox()
                if attempt == ACTION_ATTEMPTS:
                    self._recover()
                    raise RecoveryFailed(
                        f"the action took its sandbox down {attempt} times ({fault}); "
                        f"the state before it has been recovered: {action[:200]!r}"
                    ) from fault
            except BaseException:
                # The reward's own error, or an interrupt: the action had effects that no ledger holds.
                self._drop_sandbox()
                raise
        raise AssertionError("unreachable")

    def _attempt(self, sandbox: Sandbox, action: str) -> Step:
        result = sandbox.run(action)
        step = self._step_of(action, result)
        if self.task.reward is None:
            return step
        seen = Ledger((*self.ledger.steps, step))
        verdict = self.task.reward(sandbox, seen)
        reward, terminated = verdict if isinstance(verdict, tuple) else (verdict, False)
        return self._step_of(action, result, reward=float(reward), terminated=bool(terminated))

    def _step_of(
        self, action: str, result: ExecResult, *, reward: float = 0.0, terminated: bool = False
    ) -> Step:
        return Step(
            number=len(self.ledger) + 1,
            action=action,
            observation=result.output,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            output_truncated=result.output_truncated,
            shell_restarted=result.shell_restarted,
            cost_s=result.duration_s,
            checkpoint_id=self._rests_on.id if self._rests_on is not None else None,
            reward=reward,
            terminated=terminated,
        )

    # -- recovery
    # ----------------------------------------------------------------------------------------------

    def _consistent_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._recover()
        assert self._sandbox is not None
        return self._sandbox

    def _recover(self) -> None:
        recovered = self._recovery.recover(self.ledger)
        self._sandbox = recovered.sandbox
        self._rests_on = recovered.rung.checkpoint
        self.telemetry.recoveries.append(
            RecoveryRecord(
                step=len(self.ledger) + 1,
                rung=str(recovered.rung),
                tried=recovered.tried,
                num_replayed=recovered.num_replayed,
                total_s=recovered.total_s,
            )
        )

    def _drop_sandbox(self) -> None:
        if self._sandbox is not None:
            self._sandbox.destroy()
            self._sandbox = None

    def _note_fault(self, fault: Fault) -> None:
        self.telemetry.note_fault(len(self.ledger) + 1, fault)

    # -- checkpoints by policy
    # ---------------------------------------------------------------------------------

    def _checkpoint_if_due(self) -> None:
        """In the bubble after a step. What goes wrong here costs no step: it is noted, and recovery is the
        next step's business."""
        if self.terminated:
            return
        if self._bubbles_to_skip > 0:
            self._bubbles_to_skip -= 1
            return
        last_step = self._rests_on.step if self._rests_on is not None else None
        at_risk_s = sum(step.cost_s for step in self.ledger.since(last_step or 0))
        moment = Moment(step=len(self.ledger), last_checkpoint_step=last_step, at_risk_s=at_risk_s)
        if not self._policy.decide(moment).checkpoint:
            return
        try:
            self.checkpoint(pinned=False)
        except (CheckpointRefused, StoreFull):
            # Whatever refuses now (a debugger, a full disk) is likely to refuse in the next bubble too.
            self._refusals += 1
            self._bubbles_to_skip = min(2 ** (self._refusals - 1), MOST_SKIPPED_BUBBLES)
        except Fault:
            pass  # noted by checkpoint()
        else:
            self._refusals = 0
            self._store.prune(self.id, KEPT_CHECKPOINTS)

    def _note_checkpoint(
        self, checkpoint_id: str, pause_s: float, started: float, *, size_bytes: int = 0, error: str = ""
    ) -> None:
        self.telemetry.checkpoints.append(
            CheckpointRecord(
                step=len(self.ledger),
                id=checkpoint_id,
                pause_s=pause_s,
                total_s=time.monotonic() - started,
                size_bytes=size_bytes,
                error=error,
            )
        )
