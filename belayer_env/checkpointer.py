"""Takes an episode's checkpoints: in the bubbles, by its policy, in a thread of its own; or now, when asked.

A bubble opens when a step has ended and closes when the next one begins. What touches the sandbox
(fingerprint, freeze, dump, snapshot) must be over before that step runs; hashing and publishing go on beside
it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from belayer_env.checkpoint import CheckpointRef
from belayer_env.errors import CheckpointRefused, Fault, RuntimeFailed, StoreFull
from belayer_env.ledger import Ledger
from belayer_env.limiter import CheckpointLimiter
from belayer_env.policy import CheckpointPolicy, Decision, EveryN, EveryStep, Moment, Never
from belayer_env.predict import BubblePredictor, CostPredictor, FaultRate
from belayer_env.sandbox.base import Sandbox, SandboxRuntime, Saved
from belayer_env.spec import Task
from belayer_env.store import Store
from belayer_env.telemetry import CheckpointRecord, DecisionRecord, Telemetry

__all__ = ["Checkpointer", "Foothold"]

KEPT_CHECKPOINTS = 2
"""Of those the policy made: the newest, and one to fall back on should it be damaged."""

MOST_SKIPPED_BUBBLES = 16
_COSTS, _FAULTS = "checkpoint_costs", "faults"
_KEPT_FACTS = 64
_LOG = logging.getLogger("belayer")
FORCED_PATIENCE_S = 30.0
"""How long a checkpoint that must be waits for its turn on a busy host."""


@dataclass(frozen=True, slots=True)
class Foothold:
    """The newest checkpoint, and the step whose state it is (later than its own where nothing changed
    since)."""

    ref: CheckpointRef
    step: int


class Checkpointer:
    """One episode's. `close` is owed. Its methods are called by one thread at a time."""

    def __init__(
        self,
        episode_id: str,
        task: Task,
        *,
        store: Store,
        runtime: SandboxRuntime,
        policy: CheckpointPolicy,
        telemetry: Telemetry,
        limiter: CheckpointLimiter | None = None,
        on_published: Callable[[CheckpointRef], None] = lambda ref: None,
    ) -> None:
        """``on_published`` is called, in the background, with each new checkpoint."""
        self._episode_id = episode_id
        self._task = task
        self._store = store
        self._runtime = runtime
        self._policy = policy
        self._telemetry = telemetry
        self._limiter = limiter or CheckpointLimiter()
        self._on_published = on_published
        self.foothold: Foothold | None = None
        self.sandbox_lost = False
        # Of this task only: a test's bubbles of no length say nothing about an agent's.
        self._bubbles_fact = f"bubbles {task.digest}"
        self.bubbles = BubblePredictor(store.fact(self._bubbles_fact) or ())
        self._costs = CostPredictor()
        for size_bytes, seconds in store.fact(_COSTS) or ():
            self._costs.observe(size_bytes, seconds)
        self._new_costs: list[tuple[int, float]] = []
        self._known_faults: dict[str, Any] = store.fact(_FAULTS) or {}
        self._reference: str | None = None  # fingerprint of the foothold's state
        self._worker: threading.Thread | None = None
        self._free = threading.Event()
        self._free.set()
        self._wanted = threading.Event()
        self._is_awaited = False  # by a step, or by who asked for a checkpoint; not by the end of the episode
        self._opened_s: float | None = None
        self._bubbles_to_skip = 0
        self._refusals = 0
        self._is_closed = False

    # -- the bubble

    def open_bubble(self, sandbox: Sandbox, ledger: Ledger) -> None:
        """A step has ended: decide, and if it is worth it, checkpoint in the background."""
        self._opened_s = self._telemetry.now_s()
        self._wanted.clear()
        self._is_awaited = False
        if self._bubbles_to_skip > 0:
            self._bubbles_to_skip -= 1
            return
        self._consider(sandbox, ledger)

    def hint(self, seconds: float, sandbox: Sandbox | None, ledger: Ledger) -> None:
        """The bubble that is open will last so many seconds from now: the decision is made again.

        Raises:
            InvalidInput: not a finite number of seconds, 0 or more."""
        self.bubbles.hint(seconds)
        if self._opened_s is not None and self._weighs_facts and sandbox is not None:
            self._consider(sandbox, ledger)

    def _consider(self, sandbox: Sandbox, ledger: Ledger) -> None:
        """Ask the policy; what it wants to weigh is gathered in the background."""
        moment = self._moment(ledger)
        decision = None
        if not self._weighs_facts:
            decision = self._policy.decide(moment)
            self._note_decision(moment.step, decision)
            if not decision.checkpoint:
                return
        previous, self._free = self._worker, threading.Event()
        self._worker = threading.Thread(
            target=self._work,
            args=(sandbox, ledger, moment, decision, previous, self._free, self._wanted),
            name=f"belayer-checkpoint-{self._episode_id}",
            daemon=True,
        )
        self._worker.start()

    def close_bubble(self) -> float:
        """A step wants the sandbox: returns once it is free, and how many seconds that took."""
        began = self._telemetry.now_s()
        if self._opened_s is not None:
            self.bubbles.observe(began - self._opened_s)
            self._opened_s = None
        self._is_awaited = True
        self._wanted.set()
        self._free.wait()
        return self._telemetry.now_s() - began

    def settle(self) -> None:
        """Wait for what is being published, too."""
        if self._worker is not None:
            self._worker.join()

    # -- now

    def take(self, sandbox: Sandbox, step: int, *, pinned: bool) -> CheckpointRef:
        """A checkpoint of now, in the calling thread.

        Raises:
            Fault: see `Sandbox.save` and `Store.publish`; ``sandbox_lost`` says whether the sandbox is
            usable."""
        self.settle()
        return self._save_and_publish(sandbox, step, pinned=pinned, free=threading.Event())

    def stand_on(self, ref: CheckpointRef | None, step: int) -> None:
        """The sandbox has just been restored from this checkpoint (None: is fresh), which is the state of
        ``step``; steps may have been replayed on top."""
        self.foothold = Foothold(ref, step) if ref is not None else None
        self._reference = None
        self.sandbox_lost = False

    def close(self) -> None:
        """End what runs in the background, and leave to later episodes what was learnt. Never raises."""
        self.settle()
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):
            store = self._store
            known = store.fact(self._bubbles_fact) or ()
            store.remember(self._bubbles_fact, [*known, *self.bubbles.recent][-_KEPT_FACTS:])
            store.remember(_COSTS, [*(store.fact(_COSTS) or ()), *self._new_costs][-_KEPT_FACTS:])
            watched = store.fact(_FAULTS) or {"faults": 0, "seconds": 0.0}
            watched["faults"] += len(self._telemetry.faults)
            watched["seconds"] += self._telemetry.now_s()
            store.remember(_FAULTS, watched)

    # -- private

    @property
    def _weighs_facts(self) -> bool:
        """Whether the policy asks for more than counts of steps: then those facts are gathered in the
        bubble."""
        return not isinstance(self._policy, (Never, EveryStep, EveryN))

    def _fault_rate(self) -> float:
        """Faults per second, this episode's own so far included."""
        rate = FaultRate()
        rate.observe(**(self._known_faults))
        rate.observe(faults=len(self._telemetry.faults), seconds=self._telemetry.now_s())
        return rate.per_s

    def _moment(self, ledger: Ledger) -> Moment:
        last_step = self.foothold.step if self.foothold is not None else None
        at_risk_s = sum(step.cost_s for step in ledger.since(min(last_step or 0, len(ledger))))
        return Moment(
            step=len(ledger),
            last_checkpoint_step=last_step,
            at_risk_s=at_risk_s,
            setup_s=self._telemetry.reset_s,
            faults_per_s=self._fault_rate(),
        )

    def _work(
        self,
        sandbox: Sandbox,
        ledger: Ledger,
        moment: Moment,
        decision: Decision | None,
        previous: threading.Thread | None,
        free: threading.Event,
        wanted: threading.Event,
    ) -> None:
        """The background of one bubble. Sets ``free`` on every way out."""
        try:
            if previous is not None:
                previous.join()
            if decision is None:
                # Anew: the previous worker may just have taken the checkpoint that this one would.
                moment = self._with_facts(self._moment(ledger), sandbox)
                decision = self._policy.decide(moment)
                if moment.is_unchanged and self.foothold is not None:
                    self._store.cover(self.foothold.ref.id, moment.step)
                    self.foothold = Foothold(self.foothold.ref, moment.step)
                if decision.checkpoint and not decision.forced and wanted.is_set():
                    decision = Decision(
                        checkpoint=False, reason="the bubble closed before the checkpoint began"
                    )
                self._note_decision(moment.step, decision)
            if decision.checkpoint:
                self._checkpoint_by_turn(sandbox, moment, decision, free, wanted)
        except (CheckpointRefused, StoreFull):
            # Whatever refuses now (a debugger, a full disk) is likely to refuse in the next bubble too.
            self._refusals += 1
            self._bubbles_to_skip = min(2 ** (self._refusals - 1), MOST_SKIPPED_BUBBLES)
        except Fault:
            pass  # noted; recovery is the next step's business
        except Exception as error:  # noqa: BLE001 - nobody is there to catch it, and the episode can go on
            self._refusals += 1
            self._bubbles_to_skip = min(2 ** (self._refusals - 1), MOST_SKIPPED_BUBBLES)
            what = f"the checkpoint of step {moment.step} failed: {type(error).__name__}: {error}"
            _LOG.warning("%s: %s", self._episode_id, what, exc_info=True)
            self._telemetry.note_fault(moment.step, RuntimeFailed(what))
        finally:
            free.set()

    def _with_facts(self, moment: Moment, sandbox: Sandbox) -> Moment:
        """What a policy may weigh, gathered in the bubble: some milliseconds."""
        now = sandbox.fingerprint() if self._reference is not None else None
        return dataclasses.replace(
            moment,
            is_unchanged=None if now is None else now == self._reference,
            predicted_bubble_s=self.bubbles.predict(getattr(self._policy, "quantile", 0.25)),
            predicted_cost_s=self._costs.predict(sandbox.memory_bytes()),
        )

    def _checkpoint_by_turn(
        self,
        sandbox: Sandbox,
        moment: Moment,
        decision: Decision,
        free: threading.Event,
        wanted: threading.Event,
    ) -> None:
        """One checkpoint when the host has a turn for it; the slot is held while the sandbox is."""
        must = decision.forced or not self._weighs_facts
        patience_s = FORCED_PATIENCE_S if must else moment.predicted_bubble_s
        slot = self._limiter.acquire(patience_s, cancelled=(lambda: False) if must else wanted.is_set)
        if slot is None and not must:
            skipped = Decision(checkpoint=False, reason="the host was busy with other checkpoints")
            self._note_decision(moment.step, skipped)
            return
        with slot or contextlib.nullcontext():
            self._save_and_publish(sandbox, moment.step, pinned=False, free=free)
        self._refusals = 0
        self._store.prune(self._episode_id, KEPT_CHECKPOINTS)

    def _save_and_publish(
        self, sandbox: Sandbox, step: int, *, pinned: bool, free: threading.Event
    ) -> CheckpointRef:
        started_s = self._telemetry.now_s()
        saved: Saved | None = None
        held_s = 0.0
        size_bytes = sandbox.memory_bytes()
        staging = self._store.staging(self._episode_id)
        previous = self._store.directory_of(self.foothold.ref) if self.foothold else None
        try:
            try:
                saved = sandbox.save(staging, previous=previous, with_fingerprint=self._weighs_facts)
            except Fault:
                raise
            except BaseException:
                self.sandbox_lost = True  # interrupted: nobody can say in what state
                raise
            finally:
                held_s = self._telemetry.now_s() - started_s
                hidden = not self._is_awaited
                self.sandbox_lost = self.sandbox_lost or not sandbox.is_alive()
                free.set()
            ref = self._store.publish(
                staging,
                episode_id=self._episode_id,
                task_digest=self._task.digest,
                step=step,
                saved=saved,
                runtime=self._runtime.name,
                image_digest=saved.meta["image_digest"],
                criu_version=saved.meta["criu_version"],
                pinned=pinned,
            )
        except Fault as fault:
            self._note(step, "", saved, started_s, held_s, hidden=False, error=str(fault))
            if not isinstance(fault, (CheckpointRefused, StoreFull)):
                self._telemetry.note_fault(step, fault)
            raise
        self._costs.observe(size_bytes, held_s)
        self._new_costs.append((size_bytes, held_s))
        self.foothold = Foothold(ref, step)
        self._reference = saved.fingerprint
        self._note(step, ref.id, saved, started_s, held_s, hidden=hidden, size_bytes=ref.size_bytes)
        self._on_published(ref)
        return ref

    def _note(
        self,
        step: int,
        checkpoint_id: str,
        saved: Saved | None,
        started_s: float,
        held_s: float,
        *,
        hidden: bool,
        size_bytes: int = 0,
        error: str = "",
    ) -> None:
        self._telemetry.checkpoints.append(
            CheckpointRecord(
                step=step,
                id=checkpoint_id,
                pause_s=saved.pause_s if saved is not None else 0.0,
                held_s=held_s,
                total_s=self._telemetry.now_s() - started_s,
                hidden=hidden,
                size_bytes=size_bytes,
                error=error,
                started_s=started_s,
            )
        )

    def _note_decision(self, step: int, decision: Decision) -> None:
        self._telemetry.decisions.append(
            DecisionRecord(step=step, checkpoint=decision.checkpoint, reason=decision.reason)
        )
