"""A chaos run: the same actions again and again, first undisturbed, then under faults, and all compared.
Seconds; milliseconds in the report."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer_bench.machine import Machine
from belayer_env.chaos.faults import damage
from belayer_env.chaos.inject import ChaosRuntime, ChaosSandbox, ChaosStore, Injector
from belayer_env.chaos.leaks import Ours, find_leaks
from belayer_env.chaos.look import Outcome, differences, look
from belayer_env.chaos.strikes import Deck, Instant, Kind, Strike
from belayer_env.env import ContainerEnv
from belayer_env.errors import BelayerError, Fault, InvalidInput, SandboxGone, StoreFull
from belayer_env.runtimes import open_runtime
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.spec import Task
from belayer_env.telemetry import RecoveryRecord

__all__ = ["ChaosReport", "run_chaos"]

LAST_ACTION = "true"
"""Played after the others, undisturbed: it finds, and recovers, what a late fault has broken."""

STRIKE_SHARE = 0.85
"""Of the steps, how many are struck."""

_BUBBLE_S = 0.4
"""Long enough for the policy to checkpoint in."""

_LONGEST_BUBBLE_S = 0.05
_MOST_STEPS = 20
"""Steps per action after which an episode that is rolled back again and again counts as lost."""


@dataclass(slots=True, kw_only=True)
class ChaosReport:
    """What came of it. ``differences`` and ``lost``: a line each. ``surfaced``: the faults that the episodes
    noted, by type."""

    machine: Machine
    seed: int
    hits: list[Strike] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    rollbacks: list[str] = field(default_factory=list)
    episodes: int = 0
    surfaced: Counter[str] = field(default_factory=Counter)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether anything happened that must never happen."""
        return bool(self.differences or self.lost or self.leaks)

    def to_json(self) -> dict[str, Any]:
        """The whole of it."""
        faults = len(self.hits)
        return {
            "bench": "chaos",
            "machine": str(self.machine),
            "seed": self.seed,
            "faults": faults,
            "by_kind": {kind.value: sum(hit.kind is kind for hit in self.hits) for kind in Kind},
            "by_instant": {
                instant.value: sum(hit.instant is instant for hit in self.hits) for instant in Instant
            },
            "recovered": max(0, faults - len(self.rollbacks) - len(self.lost)),
            "rolled_back": len(self.rollbacks),
            "unnoticed_divergences": len(self.differences),
            "lost_episodes": len(self.lost),
            "leaks": len(self.leaks),
            "recovery_ms": _by_rung(self.recoveries),
            "surfaced": dict(sorted(self.surfaced.items())),
            "rollbacks": self.rollbacks,
            "episodes": self.episodes,
            "wall_s": round(self.wall_s, 1),
            "found": [*self.differences, *self.lost, *self.leaks],
        }


def run_chaos(
    task: Task,
    actions: Sequence[str],
    *,
    faults: int,
    seed: int,
    kinds: Sequence[Kind],
    policy: str = "adaptive",
    standby: bool = False,
    runtime: str | SandboxRuntime = "auto",
    store: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> ChaosReport:
    """Play episodes of ``actions`` until ``faults`` have hit.

    Raises:
        InvalidInput: two undisturbed runs of the actions differ: then nothing can be said of a disturbed one.
        SetupError: the host or the task will not do; checkpoints must be FULL."""
    clock = time.monotonic
    began = clock()
    with contextlib.closing(ChaosStore(store)) as opened:
        rng = random.Random(seed)
        player = _Player(task, actions, opened, rng, clock)
        before = None
        player.runtime = ChaosRuntime(open_runtime(runtime, opened, require="full"), player.injector)
        found = ChaosReport(machine=Machine.here(), seed=seed, hits=player.injector.hits)
        try:
            report(f"{len(actions)} actions, undisturbed")
            reference = player.reference(policy)
            before = Ours()
            deck = Deck(rng, kinds)
            while len(found.hits) < faults and not (found.differences or found.lost):
                player.play(found, reference, deck=deck, policy=policy, standby=standby, faults=faults)
                report(f"{len(found.hits)} of {faults} faults, {len(found.rollbacks)} rollbacks")
        finally:
            found.leaks += find_leaks(player.runtime, opened, before)
    found.wall_s = clock() - began
    return found


class _Player:
    """Plays episodes, one at a time."""

    runtime: ChaosRuntime

    def __init__(
        self,
        task: Task,
        actions: Sequence[str],
        store: ChaosStore,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._task = task
        self._actions = (*actions, LAST_ACTION)
        self._store = store
        self._rng = rng
        self._clock = clock
        self._env: ContainerEnv | None = None
        self._costs: tuple[float, ...] = ()
        self.injector = store.injector = Injector(self._damage_newest, clock)

    def reference(self, policy: str) -> Outcome:
        """An undisturbed run.

        Raises:
            InvalidInput: a second one differs from it."""
        first, second = (self._undisturbed(policy), self._undisturbed(policy))
        if found := differences(first, second):
            lines = "\n  ".join(found[:10])
            raise InvalidInput(
                f"two undisturbed runs of these actions differ:\n  {lines}\n"
                "make the actions print and leave the same each time, or declare Task(volatile=[...])"
            )
        self._costs = tuple(step.cost_s for step in second.steps)
        return first

    def play(
        self,
        found: ChaosReport,
        reference: Outcome,
        *,
        deck: Deck,
        policy: str,
        standby: bool,
        faults: int,
    ) -> None:
        """One episode under faults, into ``found``."""
        found.episodes += 1
        hits_before = len(found.hits)
        env = self._open(policy, standby)
        with contextlib.closing(env):
            env.reset()
            try:
                self._act(env, found, deck, faults)
                env.episode.settle()
                state = look(_inner(env), reference.state)
                outcome = Outcome(steps=env.episode.ledger.steps, state=state)
            except BelayerError as error:
                found.lost.append(f"episode {found.episodes}: {type(error).__name__}: {error}")
            else:
                hits = ", ".join(f"{hit.kind} {hit.instant}" for hit in found.hits[hits_before:])
                found.differences += [
                    f"episode {found.episodes} ({hits}): {line}" for line in differences(reference, outcome)
                ]
            finally:
                self.injector.disarm()
                found.surfaced.update(fault.kind for fault in env.telemetry.faults)
                found.recoveries += env.telemetry.recoveries

    # -- one episode

    def _act(self, env: ContainerEnv, found: ChaosReport, deck: Deck, faults: int) -> None:
        done = 0
        for _ in range(_MOST_STEPS * len(self._actions)):
            if done == len(self._actions):
                return
            is_last = done == len(self._actions) - 1
            strike = None
            if not is_last and len(found.hits) < faults and self._rng.random() < STRIKE_SHARE:
                strike = self._prepare(env, deck.draw(), done)
            try:
                *_, info = env.step(self._actions[done])
            except StoreFull:
                continue  # told: nothing of this action has happened, and the agent tries again
            if strike is not None:
                self._conclude(env, strike)
            if "rollback" in info:
                found.rollbacks.append(f"episode {found.episodes}: {info['rollback'].reason}")
                done = info["rollback"].to_step
            else:
                done += 1
            if len(env.episode.ledger) != done:
                found.differences.append(
                    f"the ledger holds {len(env.episode.ledger)} steps, told were {done}"
                )
                return
        raise SandboxGone(f"rolled back again and again; {done} of {len(self._actions)} actions are done")

    def _prepare(self, env: ContainerEnv, strike: Strike, done: int) -> Strike | None:
        """Arrange for a strike to hit in the coming step or before it; None once it has, or cannot."""
        match strike.instant:
            case Instant.BETWEEN:
                self._strike_between(env, strike)
                return None
            case Instant.COMMAND:
                self.injector.arm(strike, expected_s=self._costs[done])
            case Instant.CHECKPOINT if self._rng.random() < 0.5:
                # The policy's own, in the bubble that follows the step.
                env.hint_bubble(_BUBBLE_S)
                self.injector.arm(strike)
            case Instant.CHECKPOINT:
                self.injector.arm(strike)
                with contextlib.suppress(Fault):
                    env.episode.checkpoint(pinned=False)
                self.injector.disarm()
                return None
            case Instant.RESTORE:
                self._ensure_checkpoint(env)
                self.injector.arm(strike)
                self._kill(env)
            case Instant.RECOVERY:
                replay_s = sum(self._costs[self._num_kept(env) : done])
                if replay_s:
                    self.injector.arm(strike, expected_s=replay_s)
                    self._kill(env)
        return strike

    def _conclude(self, env: ContainerEnv, strike: Strike) -> None:
        """The step is over: wait for the checkpoint that was to be struck, and let nothing hit later."""
        if strike.instant is Instant.CHECKPOINT:
            time.sleep(_BUBBLE_S)  # all of it: the policy learns how far it can trust what it is told
        self.injector.disarm()

    def _strike_between(self, env: ContainerEnv, strike: Strike) -> None:
        if strike.kind is Kind.CORRUPT:
            self._ensure_checkpoint(env)
        time.sleep(self._rng.random() * _LONGEST_BUBBLE_S)
        with contextlib.suppress(SandboxGone):
            sandbox = env.episode.sandbox
            assert isinstance(sandbox, ChaosSandbox)
            self.injector.strike_now(strike, sandbox)
            if strike.kind is Kind.CORRUPT:
                sandbox.kill()  # or nobody would want the checkpoint

    def _ensure_checkpoint(self, env: ContainerEnv) -> None:
        env.episode.settle()
        if not self._store.checkpoints(env.episode.id):
            with contextlib.suppress(Fault):
                env.episode.checkpoint(pinned=False)

    def _num_kept(self, env: ContainerEnv) -> int:
        """Steps that the newest checkpoint holds."""
        env.episode.settle()
        refs = self._store.checkpoints(env.episode.id)
        return self._store.covered_step(refs[0]) if refs else 0

    def _kill(self, env: ContainerEnv) -> None:
        with contextlib.suppress(SandboxGone):
            env.episode.sandbox.kill()

    def _damage_newest(self) -> bool:
        if self._env is None:
            return False
        refs = self._store.checkpoints(self._env.episode.id)
        directory = self._store.directory_of(refs[0]) if refs else None
        return directory is not None and damage(directory, self._rng)

    # -- the rest

    def _undisturbed(self, policy: str) -> Outcome:
        env = self._open(policy, standby=False)
        with contextlib.closing(env):
            env.reset()
            for action in self._actions:
                env.step(action)
            env.episode.settle()
            return Outcome(steps=env.episode.ledger.steps, state=look(_inner(env)))

    def _open(self, policy: str, standby: bool) -> ContainerEnv:
        self._env = ContainerEnv(
            self._task, runtime=self.runtime, policy=policy, standby=standby, store=self._store
        )
        return self._env


def _inner(env: ContainerEnv) -> Any:
    sandbox = env.episode.sandbox
    assert isinstance(sandbox, ChaosSandbox)
    return sandbox.inner


def _by_rung(recoveries: Sequence[RecoveryRecord]) -> Mapping[str, Mapping[str, float]]:
    found: dict[str, list[float]] = {}
    for record in recoveries:
        found.setdefault(record.rung.partition(" ")[0], []).append(record.total_s * 1000)
    return {
        rung: {
            "count": len(times),
            "median": round(statistics.median(times), 1),
            "max": round(max(times), 1),
        }
        for rung, times in sorted(found.items())
    }
