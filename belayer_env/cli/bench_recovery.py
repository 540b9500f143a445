"""`belayer bench recovery`: what a recovery takes, and what its checkpoints cost while nothing fails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from belayer_bench.machine import Machine
from belayer_bench.report import Report
from belayer_bench.show import show_report
from belayer_env import paths
from belayer_env.bench import overhead
from belayer_env.bench import recovery as comebacks
from belayer_env.bench.recovery_plot import draw_recoveries
from belayer_env.bench.swe import ACTIONS
from belayer_env.cli.interrupt import ended_by_sigterm
from belayer_env.cli.progress import Progress
from belayer_env.host.store_mount import ensure_mounted
from belayer_env.picture import new_figure

__all__ = ["recovery", "register", "summarise"]

MOST_REPLAYS, MOST_FORKS = 2, 10


def register(app: typer.Typer) -> None:
    """Add it to `belayer bench`."""
    app.command()(recovery)


def recovery(
    rounds: Annotated[int, typer.Option(min=1, help="Restores and swaps; figures are medians.")] = 20,
    actions: Annotated[
        int, typer.Option(min=1, max=len(ACTIONS), help="How many of the episode's actions to play.")
    ] = len(ACTIONS),
    steps: Annotated[
        int, typer.Option(min=0, help="Steps of each env in the run without faults; 0: no such run.")
    ] = 50,
    envs: Annotated[int, typer.Option(min=1, help="Envs of each policy in it, all at once.")] = 8,
    time_scale: Annotated[
        float, typer.Option(min=0.0, help="Shrinks the waits for the model; figures are of scale 1.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the waits.")] = 1,
    image: Annotated[str, typer.Option(metavar="REF", help="Image to run on (the test image).")] = "",
    store: Annotated[Path | None, typer.Option(metavar="DIR", help="Store to use (the default one).")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, as a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Replay, restore, standby swap and fork of one episode; and the cost of checkpoints without faults.

    About 30 s of commands are lost and recovered; then 24 envs, a third for each policy, take 50 steps each
    with waits for a model (log-normal, median 4 s) in between. Takes about 7 minutes."""
    image = image or f"rootfs:{paths.test_image()}"
    if plot is not None:
        new_figure(1)  # better to hear now than in seven minutes that it cannot be drawn
    if store is None:
        ensure_mounted()
    with ended_by_sigterm(), overhead.Forgetful(store) as opened:
        progress = Progress(Console(stderr=True, highlight=False))
        with progress.step("Measuring recoveries") as step:
            found = comebacks.measure(
                image,
                opened,
                ACTIONS[:actions],
                rounds=rounds,
                replays=min(rounds, MOST_REPLAYS),
                forks=min(rounds, MOST_FORKS),
                report=step.report,
            )
        arms: dict[str, overhead.Arm] = {}
        if steps:
            with progress.step("Measuring the overhead without faults") as step:
                arms = overhead.race(
                    image,
                    opened,
                    envs=envs,
                    steps=steps,
                    time_scale=time_scale,
                    seed=seed,
                    report=step.report,
                )
    if plot is not None:
        draw_recoveries(found, arms, plot)
    show_report(summarise(found, arms, Machine.here(), time_scale=time_scale), as_json)


def summarise(
    found: comebacks.Comebacks, arms: dict[str, overhead.Arm], machine: Machine, *, time_scale: float = 1.0
) -> Report:
    """The report; figures of shrunk waits are held against no target. Pure."""
    medians, ratios = comebacks.figures(found)
    targets, notes = dict(comebacks.TARGETS), dict(comebacks.NOTES)
    if arms:
        medians |= overhead.figures(arms)
        notes |= overhead.NOTES
        if time_scale == 1:
            targets |= overhead.TARGETS
    values = medians | ratios
    return Report(
        bench="recovery",
        machine=machine,
        medians=medians,
        ratios=ratios,
        checks={name: target.check(values[name]) for name, target in targets.items() if name in values},
        notes=notes,
    )
