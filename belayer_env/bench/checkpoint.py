"""The checkpoint bench: pause, restore and step, ours and the peers', in one run.

Rounds are interleaved, each starting with another contender: what the machine does meanwhile hits all alike.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from belayer_bench.machine import Machine
from belayer_bench.report import OURS, Peer, Report, Target
from belayer_env.bench.contender import Contender, LeftOut, Sample
from belayer_env.bench.timing import PeerFailed

__all__ = ["TARGETS", "Figures", "compare", "race"]

TARGETS = {
    "pause_vs_podman": Target(at_most=1 / 3),
    "pause_vs_docker": Target(at_most=1 / 4),
    "restore_vs_podman": Target(at_most=1 / 2),
    "restore_vs_docker": Target(at_most=1 / 4),
    "step_vs_docker_exec": Target(at_most=1 / 10),
}

NOTES = {
    "pause": "ours: freeze to thaw; the peers': their checkpoint command, the most it can be "
    "(docker: with the copy of the writable layer)",
    "checkpoint": "until the checkpoint can be used; ours is hashed, synced and published by then",
    "restore": "into a new container, until its first command has answered",
    "step": "`true`; ours is all of env.step() with its ledger on disk, the peers' is `exec CONTAINER true`",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What a race gave: samples by contender, and the peers with their versions or why they are missing."""

    samples: Mapping[str, Sequence[Sample]]
    peers: Mapping[str, Peer]


def race(
    ours: Contender, peers: Sequence[Contender], *, rounds: int, report: Callable[[str], None]
) -> Figures:
    """Start all, and measure them in turns. A peer that cannot run, or breaks, is left out with the reason.

    Raises:
        BelayerError: ours broke."""
    with contextlib.ExitStack() as stack:
        runners: list[Contender] = []
        seen: dict[str, Peer] = {}
        for contender in (ours, *peers):
            report(f"starting {contender.name}")
            stack.callback(contender.close)
            try:
                contender.start()
            except LeftOut as reason:
                seen[contender.name] = Peer(left_out=str(reason))
            else:
                runners.append(contender)
                seen[contender.name] = Peer(version=contender.version)
        samples: dict[str, list[Sample]] = {runner.name: [] for runner in runners}
        for number in range(rounds):
            report(f"round {number + 1} of {rounds}")
            first = number % len(runners)
            for runner in (*runners[first:], *runners[:first]):
                try:
                    samples[runner.name].append(runner.round())
                except PeerFailed as failed:
                    runners = [other for other in runners if other is not runner]
                    seen[runner.name] = Peer(left_out=f"it broke in round {number + 1}: {failed}")
                    del samples[runner.name]
        del seen[ours.name]
        return Figures(samples, seen)


def compare(figures: Figures, machine: Machine) -> Report:
    """The report: medians in milliseconds, ratios of those that took part, each beside its target."""
    medians = {
        name: {
            field.name.removesuffix("_s"): 1000 * statistics.median(getattr(s, field.name) for s in samples)
            for field in fields(Sample)
        }
        for name, samples in figures.samples.items()
    }
    mine = medians[OURS]
    ratios = {
        f"{what}_vs_{peer}": mine[what] / medians[peer][what]
        for peer in ("podman", "docker")
        if peer in medians
        for what in ("pause", "restore")
    }
    if "docker" in medians:
        ratios["step_vs_docker_exec"] = mine["step"] / medians["docker"]["step"]
    return Report(
        bench="checkpoint",
        machine=machine,
        peers=figures.peers,
        medians={f"{name}_{what}_ms": ms for name, row in medians.items() for what, ms in row.items()},
        ratios=ratios,
        checks={name: TARGETS[name].check(ratio) for name, ratio in ratios.items()},
        notes=NOTES,
    )
