"""An episode on a time axis, as bars in lanes: what was hidden behind the model's thinking, and what was not.
Pure. Seconds since the episode began."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from belayer_env.telemetry import CheckpointRecord, Telemetry

__all__ = ["LANES", "Bar", "Kind", "Lanes", "in_words", "lanes", "rows", "summary"]

STEPS_A_ROW, MOST_ROWS = 110, 3
"""A step and its bubble are then about 12 of 1400 pixels wide; longer episodes are shown closer by part."""

LEAST_WAIT_S = 0.001
"""What a step takes to see that it need not wait."""


class Kind(enum.Enum):
    """What a bar stands for, in words for the legend."""

    BUBBLE = "the model thinks"
    RESET = "fresh start and setup"
    COMMAND = "a command runs"
    WAIT = "a step waits for a checkpoint"
    HIDDEN = "checkpoint holds the sandbox: hidden in a bubble"
    EXPOSED = "checkpoint holds the sandbox: a step waits"
    PAUSE = "processes frozen"
    PUBLISH = "hashed and published beside"
    FAULT = "fault"
    RECOVERY = "recovery"


LANES: dict[str, tuple[Kind, ...]] = {
    "model": (Kind.BUBBLE,),
    "steps": (Kind.RESET, Kind.COMMAND, Kind.WAIT),
    "checkpoints": (Kind.HIDDEN, Kind.EXPOSED, Kind.PAUSE),
    "publishing": (Kind.PUBLISH,),
    "faults": (Kind.RECOVERY, Kind.FAULT),
}
"""Name -> what lies in it; in a lane, later kinds are drawn over earlier ones."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that went on for a while; a fault has no length. ``label`` is for those that bear one."""

    kind: Kind
    began_s: float
    ended_s: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Lanes:
    """All bars of an episode, and when the last of them ended."""

    bars: tuple[Bar, ...]
    num_steps: int
    end_s: float

    def of(self, *kinds: Kind) -> tuple[Bar, ...]:
        """The bars of these kinds, in the order in which they began."""
        return tuple(sorted((bar for bar in self.bars if bar.kind in kinds), key=lambda bar: bar.began_s))


def lanes(telemetry: Telemetry) -> Lanes:
    """The bars of one episode."""
    bars = [
        *_step_bars(telemetry),
        *(bar for record in telemetry.checkpoints for bar in _checkpoint_bars(record, _waits(telemetry))),
        *(Bar(Kind.FAULT, fault.at_s, fault.at_s, fault.kind) for fault in telemetry.faults),
        *_recovery_bars(telemetry),
    ]
    return Lanes(tuple(bars), len(telemetry.steps), max((bar.ended_s for bar in bars), default=0.0))


def rows(episode: Lanes, began_s: float, ended_s: float) -> list[tuple[float, float]]:
    """The stretches of time, all equally long, in which an episode is best shown one below the other."""
    commands = episode.of(Kind.COMMAND)
    num_steps = sum(began_s <= bar.began_s < ended_s for bar in commands)
    count = min(MOST_ROWS, max(1, math.ceil(num_steps / STEPS_A_ROW)))
    length_s = (ended_s - began_s) / count
    return [(began_s + number * length_s, began_s + (number + 1) * length_s) for number in range(count)]


def summary(telemetry: Telemetry) -> str:
    """The episode in a line."""
    episode = lanes(telemetry)
    made = [record for record in telemetry.checkpoints if not record.error]
    refused = len(telemetry.checkpoints) - len(made)
    waited_s = sum(step.waited_s for step in telemetry.steps if step.waited_s >= LEAST_WAIT_S)
    share = f" ({100 * waited_s / episode.end_s:.2g} %)" if episode.end_s and waited_s else ""
    words = [
        f"{_counted(len(telemetry.steps), 'step')} in {in_words(episode.end_s)}",
        f"{_counted(len(made), 'checkpoint')}, {sum(record.hidden for record in made)} hidden"
        + (f", {refused} failed" if refused else ""),
        f"steps waited {in_words(waited_s)} for checkpoints{share}" if waited_s else "no step waited for one",
        _counted(len(telemetry.faults), "fault"),
    ]
    if telemetry.recoveries:
        lost_s = sum(record.total_s for record in telemetry.recoveries)
        words.append(f"{_counted(len(telemetry.recoveries), 'recovery')} in {in_words(lost_s)}")
    return "; ".join(words)


def in_words(seconds: float) -> str:
    """A time of any length, in two or three digits."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 100 else f"{minutes} min {rest:02} s"


def _step_bars(telemetry: Telemetry) -> Iterator[Bar]:
    free_s = telemetry.reset_s
    if telemetry.reset_s:
        yield Bar(Kind.RESET, 0.0, telemetry.reset_s)
    for step in telemetry.steps:
        ended_s = step.started_s + step.total_s
        if step.started_s > free_s:
            yield Bar(Kind.BUBBLE, free_s, step.started_s)
        # The command that counts is the last thing a step does: after its waiting, and after any recovery.
        yield Bar(Kind.COMMAND, max(step.started_s, ended_s - step.command_s), ended_s, str(step.step))
        free_s = ended_s
    yield from (Bar(Kind.WAIT, began_s, ended_s) for began_s, ended_s in _waits(telemetry))


def _waits(telemetry: Telemetry) -> list[tuple[float, float]]:
    return [
        (step.started_s, step.started_s + step.waited_s)
        for step in telemetry.steps
        if step.waited_s >= LEAST_WAIT_S
    ]


def _checkpoint_bars(record: CheckpointRecord, waits: Sequence[tuple[float, float]]) -> Iterator[Bar]:
    held_from, held_to = record.started_s, record.started_s + record.held_s
    label = record.error or record.id
    # The step that came while it was held waited for the end of it.
    seen_from = held_to
    if not record.hidden:
        seen_from = max(
            held_from,
            min(
                (began for began, ended in waits if began < held_to and ended > held_from), default=held_from
            ),
        )
    if seen_from > held_from:
        yield Bar(Kind.HIDDEN, held_from, seen_from, label)
    if seen_from < held_to:
        yield Bar(Kind.EXPOSED, seen_from, held_to, label)
    if record.pause_s:
        # Thawed, it has to answer before it is let go: a few milliseconds.
        yield Bar(Kind.PAUSE, max(held_from, held_to - record.pause_s), held_to, label)
    if record.total_s > record.held_s:
        yield Bar(Kind.PUBLISH, held_to, record.started_s + record.total_s, label)


def _recovery_bars(telemetry: Telemetry) -> Iterator[Bar]:
    earlier_s = 0.0
    for record in telemetry.recoveries:
        ended_s = record.started_s + record.total_s
        causes = [fault.kind for fault in telemetry.faults if earlier_s <= fault.at_s <= ended_s]
        back = f", rolled back to step {record.rolled_back_to}" if record.rolled_back_to is not None else ""
        cause = f"{causes[0]}: " if causes else ""
        label = f"{cause}{record.rung.partition(' ')[0]}, {in_words(record.total_s)}{back}"
        yield Bar(Kind.RECOVERY, record.started_s, ended_s, label)
        earlier_s = ended_s


def _counted(count: int, what: str) -> str:
    several = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{count} {what if count == 1 else several}"
