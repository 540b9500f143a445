"""The recovery bench: replay, restore, standby swap and fork, of one episode in one run. Seconds.

A recovery is timed from the step that finds its sandbox killed: until the sandbox is back, and until the
step's command (`true`) has answered."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from belayer_bench.report import Target, quantile
from belayer_env.bench.swe import swe_task
from belayer_env.checkpoint import CheckpointRef
from belayer_env.env import ContainerEnv
from belayer_env.errors import RuntimeFailed
from belayer_env.store import Store

__all__ = ["FORKS", "NOTES", "TARGETS", "Comeback", "Comebacks", "Forked", "figures", "measure"]

FORKS = 8

TARGETS = {
    "replay_over_restore": Target(at_least=10),
    "replay_over_standby": Target(at_least=100),
    "standby_swap_ms": Target(at_most=10),
    "fork8_over_restore": Target(at_most=4),
}

NOTES = {
    "replay": "a fresh container, its setup, and all actions again; nothing was checkpointed",
    "restore": "the newest checkpoint, verified by hash, into a new container",
    "standby": "a swap with the paused clone, which is thawed and proven to answer",
    "..._answered": "the whole step that met the fault, its own command answered and in the ledger; the "
    "ratios are of these",
    "fork8": f"env.fork({FORKS}) in a bubble whose checkpoint is there, until all have answered a step",
    "fork8_with_checkpoint": "the same where the fork has to take that checkpoint first",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comeback:
    """One recovery; ``answered_s`` is all of the step that met the fault."""

    recovery_s: float
    answered_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """One fork: the checkpoint before it, the call, and from the call on until all forks had answered."""

    call_s: float
    checkpoint_s: float
    answered_s: float


@dataclass(slots=True)
class Comebacks:
    """What a run gave. ``episode_s``: all commands of the episode."""

    episode_s: float = 0.0
    replays: list[Comeback] = field(default_factory=list)
    restores: list[Comeback] = field(default_factory=list)
    swaps: list[Comeback] = field(default_factory=list)
    forks: list[Forked] = field(default_factory=list)


def measure(
    image: str,
    store: Store,
    actions: Sequence[str],
    *,
    rounds: int,
    replays: int,
    forks: int,
    report: Callable[[str], None],
) -> Comebacks:
    """Play the actions in an env with a standby and in one without; kill both again and again.

    Raises:
        BelayerError: a recovery went another way than the one that is measured."""
    found = Comebacks()
    with contextlib.ExitStack() as stack:
        plain, shadowed = (_opened(stack, image, store, standby=standby) for standby in (False, True))
        report(f"playing {len(actions)} actions")
        with ThreadPoolExecutor(2) as pool:
            times = list(pool.map(lambda env: _play(env, actions), (plain, shadowed)))
        found.episode_s = times[0]
        for number in range(replays):
            report(f"replay {number + 1} of {replays}")
            found.replays.append(_comeback(plain, "fresh"))
        marks = {env: env.checkpoint() for env in (plain, shadowed)}
        for env, ref in marks.items():
            _back_to(env, ref)  # the steps that the replays' own commands added are cut off again
        report(f"{rounds} restores and swaps, in turns")
        for _ in range(rounds):
            found.restores.append(_comeback(plain, "restore", marks[plain]))
            found.swaps.append(_comeback(shadowed, "standby", marks[shadowed]))
        shadowed.close()
        report(f"{forks} forks into {FORKS}")
        for _ in range(forks):
            found.forks.append(_fork(plain))
            found.restores.append(_comeback(plain, "restore", marks[plain]))
    return found


def figures(found: Comebacks) -> tuple[dict[str, float], dict[str, float]]:
    """Medians (milliseconds, where the name says so) and ratios. Pure."""
    medians: dict[str, float] = {"episode_s": found.episode_s}
    answered: dict[str, float] = {}
    for name, comebacks in (
        ("replay", found.replays),
        ("restore", found.restores),
        ("standby_swap", found.swaps),
    ):
        recoveries = [1000 * comeback.recovery_s for comeback in comebacks]
        medians[f"{name}_ms"] = statistics.median(recoveries)
        medians[f"{name}_p95_ms"] = quantile(recoveries, 0.95)
        answered[name] = statistics.median(comeback.answered_s for comeback in comebacks)
        medians[f"{name}_answered_ms"] = 1000 * answered[name]
    ratios = {
        "replay_over_restore": answered["replay"] / answered["restore"],
        "replay_over_standby": answered["replay"] / answered["standby_swap"],
    }
    if found.forks:
        whole = statistics.median(fork.answered_s for fork in found.forks)
        taken = statistics.median(fork.answered_s + fork.checkpoint_s for fork in found.forks)
        medians["fork8_ms"] = 1000 * whole
        medians["fork8_with_checkpoint_ms"] = 1000 * taken
        ratios["fork8_over_restore"] = whole / answered["restore"]
        ratios["fork8_with_checkpoint_over_restore"] = taken / answered["restore"]
    return medians, ratios


def _opened(stack: contextlib.ExitStack, image: str, store: Store, *, standby: bool) -> ContainerEnv:
    env = ContainerEnv(
        swe_task(image), runtime="runc", policy="never", standby=standby, store=store, require="full"
    )
    stack.callback(env.close)
    return env


def _play(env: ContainerEnv, actions: Sequence[str]) -> float:
    env.reset()
    for action in actions:
        env.step(action)
    return sum(record.command_s for record in env.telemetry.steps)


def _comeback(env: ContainerEnv, rung: str, mark: CheckpointRef | None = None) -> Comeback:
    """Kill the sandbox and step; then go back to ``mark``, so that nobody replays what this added."""
    env.episode.settle()
    env.episode.sandbox.kill()
    started = time.monotonic()
    _, _, _, _, info = env.step("true")
    answered_s = time.monotonic() - started
    recovery = env.telemetry.recoveries[-1]
    if not recovery.rung.startswith(rung) or "rollback" in info:
        raise RuntimeFailed(f"a recovery by {rung} was to be measured, and went otherwise: {recovery}")
    if mark is not None:
        _back_to(env, mark)
    return Comeback(recovery_s=recovery.total_s, answered_s=answered_s)


def _back_to(env: ContainerEnv, mark: CheckpointRef) -> None:
    env.restore(mark)
    env.episode.settle()


def _fork(env: ContainerEnv) -> Forked:
    env.episode.settle()
    env.checkpoint()
    checkpoint_s = env.telemetry.checkpoints[-1].total_s
    started = time.monotonic()
    forks = env.fork(FORKS)
    call_s = time.monotonic() - started
    with ThreadPoolExecutor(FORKS) as pool:
        try:
            for _, _, _, _, info in pool.map(lambda fork: fork.step("true"), forks):
                if info["exit_code"] != 0:
                    raise RuntimeFailed("a fork's shell cannot run `true`")
            answered_s = time.monotonic() - started
        finally:
            list(pool.map(ContainerEnv.close, forks))
    return Forked(call_s=call_s, checkpoint_s=checkpoint_s, answered_s=answered_s)
