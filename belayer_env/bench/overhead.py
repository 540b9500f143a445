"""What checkpoints cost while nothing fails: policies against `never`, side by side in one run. Seconds.

All arms (a policy, several envs) run at once: env n of each takes the same actions after the same waits, the
arms a third of a typical wait apart, so that they do not ask for the cores in step. The overhead of an arm is

    steps' waiting for checkpoints  +  steps' slowdown  over  the wall time of `never`

The waiting is counted whole, though the other arms' checkpoints lengthen it. The slowdown is that of the mean
time of each action, in the arm while no *other* arm was at a checkpoint, over that in `never` while nobody
was: so an arm pays for what its own checkpoints take from its own envs and from their neighbours, and for
nobody else's."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from belayer_bench.report import Target
from belayer_env.bench.swe import long_episode, swe_task
from belayer_env.env import ContainerEnv
from belayer_env.errors import RuntimeFailed
from belayer_env.store import Store
from belayer_env.telemetry import CheckpointRecord, Telemetry

__all__ = [
    "NOTES",
    "POLICIES",
    "TARGETS",
    "Arm",
    "Forgetful",
    "Overhead",
    "Span",
    "TimedStep",
    "at_risk_s",
    "decision_kind",
    "figures",
    "overhead_of",
    "race",
    "wait_s",
]

POLICIES = ("never", "adaptive", "every-step")

KILLED_ACTION = "git status --short"

TARGETS = {"overhead_adaptive_pct": Target(at_most=1.0)}

MEDIAN_WAIT_S, SIGMA = 4.0, 0.6
"""Of the log-normal from which the waits for the model are drawn; its mean is 4.8 s."""

NOTES = {
    "overhead_*_pct": "of the wall time of `never`: steps' waiting for checkpoints, and their slowdown (each "
    "action's mean beside other checkpoints of the same policy, over `never` beside none)",
    "hidden_*_pct": "checkpoints that no step waited for",
    "unchanged_*_pct": "bubbles in which the last checkpoint was moved up, as nothing had changed",
    "decisions_*": "how many bubbles ended so",
    "at_risk_*_s": "what a kill after a step would have to replay, the mean over all steps",
}

_DECISIONS = (
    ("nothing changed", "unchanged"),
    ("nothing at risk", "nothing_at_risk"),
    ("the bubble closed", "bubble_closed"),
    ("the host was busy", "host_busy"),
    ("does not hide", "would_not_hide"),
    ("hides a cost", "hidden"),
    ("outweigh a cost", "forced"),
)


class Forgetful(Store):
    """A store whose episodes learn nothing from one another: each run of a bench begins alike, and users'
    episodes learn nothing from benches."""

    def fact(self, name: str) -> Any:
        """Nothing."""
        return None

    def remember(self, name: str, value: Any) -> None:
        """Do not."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on from one instant to another, on the monotonic clock."""

    began: float
    ended: float

    def overlaps(self, other: Span) -> bool:
        """Whether both went on at one time."""
        return self.began < other.ended and other.began < self.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of one env, numbered from 1: all of ``env.step()``, and what of it was waiting."""

    number: int
    span: Span
    waited_s: float

    @property
    def busy_s(self) -> float:
        """All but the waiting."""
        return self.span.ended - self.span.began - self.waited_s


@dataclass(slots=True)
class Arm:
    """One policy's envs. ``wait_s``: all they waited for the model, added up. ``drilled``: the telemetry of
    the last to end, with a kill after its last step that is in no figure."""

    policy: str
    num_envs: int = 0
    wait_s: float = 0.0
    steps: list[TimedStep] = field(default_factory=list)
    telemetries: list[Telemetry] = field(default_factory=list)
    drilled: Telemetry | None = None

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        """Those that succeeded."""
        return [record for told in self.telemetries for record in told.checkpoints if not record.error]

    @property
    def checkpoint_spans(self) -> list[Span]:
        """When its envs were at checkpoints, publishing included."""
        return [
            Span(told.began + record.started_s, told.began + record.started_s + record.total_s)
            for told in self.telemetries
            for record in told.checkpoints
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Percent of the wall time of `never`."""

    waited_pct: float
    slowdown_pct: float

    @property
    def total_pct(self) -> float:
        """Both."""
        return self.waited_pct + self.slowdown_pct


def race(
    image: str,
    store: Store,
    *,
    envs: int,
    steps: int,
    time_scale: float,
    seed: int,
    report: Callable[[str], None],
    policies: Sequence[str] = POLICIES,
) -> dict[str, Arm]:
    """Run all arms at once; by policy.

    Raises:
        BelayerError: a step failed, or met a fault, which this bench is not about."""
    arms = {policy: Arm(policy, envs) for policy in policies}
    runners = [(number, index, arms[p]) for index, p in enumerate(policies) for number in range(envs)]
    actions = long_episode(steps)
    everybody = threading.Barrier(len(runners))
    report(f"{len(runners)} envs, {steps} steps each")

    def play(number: int, index: int, arm: Arm, env: ContainerEnv) -> tuple[list[TimedStep], float]:
        try:
            env.reset()
        except BaseException:
            everybody.abort()
            raise
        everybody.wait()
        time.sleep(index * MEDIAN_WAIT_S * time_scale / len(policies))
        timed, slept_s = [], 0.0
        for step, action in enumerate(actions, start=1):
            pause_s = wait_s(seed, number, step) * time_scale
            time.sleep(pause_s)
            slept_s += pause_s
            began = time.monotonic()
            env.step(action)
            span = Span(began, time.monotonic())
            timed.append(TimedStep(number=step, span=span, waited_s=env.telemetry.steps[-1].waited_s))
        env.episode.settle()
        return timed, slept_s

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(runners), thread_name_prefix="belayer-bench"))
        opened = [
            ContainerEnv(swe_task(image), runtime="runc", policy=arm.policy, store=store, require="full")
            for _, _, arm in runners
        ]
        stack.callback(lambda: list(pool.map(ContainerEnv.close, opened)))
        for env in opened:
            stack.callback(env.close)
        playing = [pool.submit(play, *runner, env) for runner, env in zip(runners, opened, strict=True)]
        for (_, _, arm), env, future in zip(runners, opened, playing, strict=True):
            timed, slept_s = future.result()
            if env.telemetry.faults:
                raise RuntimeFailed(f"a fault in the bench without faults: {env.telemetry.faults[0]}")
            arm.steps += timed
            arm.wait_s += slept_s
            told = env.telemetry
            arm.telemetries.append(
                dataclasses.replace(told, checkpoints=[*told.checkpoints], decisions=[*told.decisions])
            )
        report("one kill for each policy")
        last = max(range(envs), key=lambda number: sum(wait_s(seed, number, n + 1) for n in range(steps)))
        for (number, _, arm), env in zip(runners, opened, strict=True):
            if number == last:
                env.episode.sandbox.kill()
                env.step(KILLED_ACTION)
                env.episode.settle()
                arm.drilled = env.telemetry
    return arms


def wait_s(seed: int, env: int, step: int) -> float:
    """The model's time before this step, the same for all arms."""
    return random.Random(f"{seed}/{env}/{step}").lognormvariate(math.log(MEDIAN_WAIT_S), SIGMA)


def overhead_of(arm: Arm, never: Arm, arms: Sequence[Arm]) -> Overhead:
    """What an arm's checkpoints cost its envs; see the module. Pure."""
    others = [span for other in arms if other is not arm for span in other.checkpoint_spans]
    everybodys = [span for other in arms for span in other.checkpoint_spans]
    alone, quiet = _mean_times(arm.steps, others), _mean_times(never.steps, everybodys)
    wall_s = never.wait_s + sum(step.busy_s for step in never.steps)
    slowdown_s = arm.num_envs * sum(alone[number] - quiet[number] for number in quiet)
    waited_s = sum(step.waited_s for step in arm.steps)
    return Overhead(waited_pct=100 * waited_s / wall_s, slowdown_pct=100 * slowdown_s / wall_s)


def figures(arms: Mapping[str, Arm]) -> dict[str, float]:
    """All figures, by name and policy. Pure."""
    found: dict[str, float] = {}
    never, everyone = arms["never"], list(arms.values())
    steps_s = [step.busy_s for step in never.steps]
    found["overhead_wall_s"] = (never.wait_s + sum(steps_s)) / never.num_envs
    found["overhead_never_step_ms"] = 1000 * statistics.median(steps_s)
    for policy, arm in arms.items():
        if arm is never:
            continue
        name = policy.replace("-", "_")
        cost = overhead_of(arm, never, everyone)
        found[f"overhead_{name}_pct"] = cost.total_pct
        found[f"overhead_{name}_waited_pct"] = cost.waited_pct
        found[f"overhead_{name}_slowdown_pct"] = cost.slowdown_pct
        found[f"checkpoints_{name}"] = len(arm.checkpoints)
        if arm.checkpoints:
            hidden = sum(record.hidden for record in arm.checkpoints)
            found[f"hidden_{name}_pct"] = 100 * hidden / len(arm.checkpoints)
            found[f"held_{name}_ms"] = 1000 * statistics.median(r.held_s for r in arm.checkpoints)
        found[f"at_risk_{name}_s"] = statistics.fmean(s for t in arm.telemetries for s in at_risk_s(t))
        # Of two in one bubble (wanted, and then the host was busy) the later one counts.
        reasons = [r for told in arm.telemetries for r in {d.step: d.reason for d in told.decisions}.values()]
        kinds = Counter(decision_kind(reason) for reason in reasons)
        if reasons and kinds.keys() != {"other"}:
            found[f"unchanged_{name}_pct"] = 100 * kinds["unchanged"] / len(reasons)
            found |= {f"decisions_{name}_{kind}": count for kind, count in sorted(kinds.items())}
    return found


def at_risk_s(telemetry: Telemetry) -> list[float]:
    """After each step: the seconds of commands that no checkpoint taken in the bubble, or before, contains.
    Pure."""
    contained = {record.step for record in telemetry.checkpoints if not record.error}
    contained |= {d.step for d in telemetry.decisions if decision_kind(d.reason) == "unchanged"}
    lost_s, found = 0.0, []
    for step in telemetry.steps:
        lost_s = 0.0 if step.step in contained else lost_s + step.command_s
        found.append(lost_s)
    return found


def decision_kind(reason: str) -> str:
    """A policy's sentence in one word."""
    return next((kind for sign, kind in _DECISIONS if sign in reason), "other")


def _mean_times(steps: Sequence[TimedStep], disturbances: Sequence[Span]) -> dict[int, float]:
    """By step number: the mean of those that ran beside no disturbance, or of all where there are none."""
    times: dict[int, tuple[list[float], list[float]]] = {}
    for step in steps:
        everything, undisturbed = times.setdefault(step.number, ([], []))
        everything.append(step.busy_s)
        if not any(step.span.overlaps(other) for other in disturbances):
            undisturbed.append(step.busy_s)
    return {
        number: statistics.fmean(undisturbed or everything)
        for number, (everything, undisturbed) in times.items()
    }
