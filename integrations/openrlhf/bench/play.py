"""The rows of the table: each fault on each side, on actors that are still good. Seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from belayer_integrations.openrlhf.bench.faults import Fault
from belayer_integrations.openrlhf.bench.outcome import Outcome, Row, Side, row_of
from belayer_integrations.openrlhf.bench.stage import Stage

__all__ = ["SPOILING", "play_belayer", "play_openrlhf"]

CUT_S = 30.0
"""A batch of OpenRLHF's that has not come back by then hangs; an undisturbed one takes a fraction."""

PATIENCE_S = 240.0
"""Belayer's may have a new actor to wait for."""

SPOILING = (Fault.ENDLESS, Fault.STOPPED, Fault.ENGINE, Fault.ACTOR)
"""After these an actor of OpenRLHF's is no good for another batch."""


def play_openrlhf(stage: Stage, faults: Sequence[Fault], say: Callable[[str], object]) -> Side:
    """Upstream's own agent function."""
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    rows: list[Row] = []
    actor: Any = None
    calm: Outcome | None = None
    for fault in faults:
        say(f"OpenRLHF: {fault}")
        if actor is None:
            actor = stage.actor(RolloutRayActor, "plain_agent.py")
            warm = stage.batch(actor, Fault.NONE, limit_s=PATIENCE_S)
            calm = calm or _undisturbed(stage, actor, warm)
        assert calm is not None
        rows.append(row_of(fault, calm, stage.batch(actor, fault, limit_s=CUT_S)))
        if fault in SPOILING:
            stage.end(actor)
            actor = None
    if actor is not None:
        stage.end(actor)
    assert calm is not None
    return Side(undisturbed_s=calm.wall_s, rows=rows)


def play_belayer(stage: Stage, faults: Sequence[Fault], say: Callable[[str], object]) -> Side:
    """`agent_executor`, in actors that are started again; with a shadow engine where the engine dies."""
    import ray
    from belayer_integrations.openrlhf.kept_actor import KeptRolloutActor

    kept = ray.remote(max_restarts=-1)(KeptRolloutActor)
    rows: dict[Fault, Row] = {}
    walls: list[float] = []
    for agent, theirs in (
        ("our_agent.py", [fault for fault in faults if fault is not Fault.ENGINE]),
        ("shadow_agent.py", [fault for fault in faults if fault is Fault.ENGINE]),
    ):
        if not theirs:
            continue
        say(f"Belayer: {agent}")
        actor = stage.actor(kept, agent)
        calm = _undisturbed(stage, actor, stage.batch(actor, Fault.NONE, limit_s=PATIENCE_S))
        walls.append(calm.wall_s)
        for fault in theirs:
            say(f"Belayer: {fault}")
            rows[fault] = row_of(fault, calm, stage.batch(actor, fault, limit_s=PATIENCE_S))
        stage.end(actor)
    return Side(undisturbed_s=walls[0], rows=[rows[fault] for fault in faults])


def _undisturbed(stage: Stage, actor: Any, warm: Outcome) -> Outcome:
    """The second one's time, if its tokens are the first one's: else nothing could be compared.

    Raises:
        RuntimeError: they are not."""
    calm = stage.batch(actor, Fault.NONE, limit_s=PATIENCE_S)
    if calm.error or calm.was_cut or calm.samples != warm.samples:
        raise RuntimeError(f"two undisturbed batches differ: {calm.error or 'other tokens'}")
    return calm
