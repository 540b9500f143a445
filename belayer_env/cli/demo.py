"""`belayer demo`: an agent's episode twice: undisturbed, and with its container killed on the way."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from belayer_env.cli.demo_play import Listener, Outcome, StepSeen, differences, play
from belayer_env.cli.demo_task import ACTIONS, DRILL, STATE_VARIABLES, demo_task
from belayer_env.cli.interrupt import ended_by_sigterm
from belayer_env.env import ContainerEnv
from belayer_env.telemetry import RecoveryRecord, Telemetry

__all__ = ["demo"]

TITLES = ("undisturbed", "killed twice")
_SHOWN_CHARS = 58


def demo(
    runtime: Annotated[str, typer.Option(help="auto, runc or docker.")] = "auto",
    policy: Annotated[str, typer.Option(help="When to checkpoint: every-step, every-N.")] = "every-3",
    store: Annotated[Path | None, typer.Option(metavar="DIR", help="Store to use (the default one).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the show.")] = False,
) -> None:
    """Play an agent's episode twice, once killing its container twice, and compare the two.

    Exit code 1 when they differ in anything that an agent could see."""
    console = Console(highlight=False, quiet=as_json)
    with ended_by_sigterm():
        outcomes = [_run(console, title, runtime, policy, store) for title in TITLES]
    found = differences(*outcomes)
    if as_json:
        typer.echo(json.dumps(_report(outcomes, found), indent=2))
    else:
        console.print(_table(outcomes, found))
        for line in found:
            console.print(f"[red]✗[/red] {escape(line)}", soft_wrap=True)
    if found:
        raise typer.Exit(1)


def _run(console: Console, title: str, runtime: str, policy: str, store: Path | None) -> Outcome:
    # FILES would lose the agent's server, and with it the comparison: better to hear at once what is missing.
    env = ContainerEnv(demo_task(), runtime=runtime, policy=policy, store=store, require="full")
    with contextlib.closing(env):
        console.print(f"\n[bold]{title}[/bold] (runtime {env.runtime.name}, checkpoints {escape(policy)})")
        show = _Show(console, env)
        return play(
            env,
            ACTIONS,
            clock=time.monotonic,
            variables=STATE_VARIABLES,
            drill=None if title == TITLES[0] else DRILL,
            listener=Listener(on_kill=show.kill, on_step=show.step),
        )


class _Show:
    """What happens, a line each, as it happens."""

    def __init__(self, console: Console, env: ContainerEnv) -> None:
        self._console = console
        self._env = env
        self._num_recoveries = 0

    def kill(self, where: str) -> None:
        self._line(f"   [bold red]✗ SIGKILL to the container, {where}[/bold red]")

    def step(self, step: StepSeen) -> None:
        for recovery in self._env.telemetry.recoveries[self._num_recoveries :]:
            self._line(f"   [bold green]✓ {escape(_in_words(recovery))}[/bold green]")
        self._num_recoveries = len(self._env.telemetry.recoveries)
        colour = "green" if step.exit_code == 0 else "yellow"
        self._line(
            f"{step.number:2d} {escape(_shortened(step.action)):{_SHOWN_CHARS}} "
            f"[{colour}]exit {step.exit_code}[/{colour}] {step.wall_s * 1000:5.0f} ms  "
            f"[dim]{escape(_last_line(step.observation))}[/dim]"
        )

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _in_words(recovery: RecoveryRecord) -> str:
    return (
        f"{recovery.rung}, {recovery.num_replayed} steps replayed and equal, {recovery.total_s * 1000:.0f} ms"
    )


def _shortened(action: str) -> str:
    first, newline, _ = action.partition("\n")
    if newline or len(first) > _SHOWN_CHARS:
        return first[: _SHOWN_CHARS - 2].rstrip() + " …"
    return first


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:_SHOWN_CHARS] if lines else ""


def _table(outcomes: list[Outcome], found: list[str]) -> Table:
    table = Table(Column(no_wrap=True), *TITLES, box=None, pad_edge=False)
    columns = [_figures(outcome) for outcome in outcomes]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    observed = any(line.startswith(("observation", "action", "number")) for line in found)
    left = any(not line.startswith(("observation", "action", "number")) for line in found)
    table.add_row("observations", "", _verdict(observed))
    table.add_row("files, processes, variables, cwd", "", _verdict(left))
    return table


def _verdict(differs: bool) -> str:
    return "[bold red]they differ[/bold red]" if differs else "[bold green]equal[/bold green]"


def _figures(outcome: Outcome) -> dict[str, str]:
    telemetry = outcome.telemetry
    pauses = _pauses_ms(telemetry)
    recoveries = ", ".join(f"{record.total_s * 1000:.0f} ms" for record in telemetry.recoveries)
    return {
        "steps": str(len(outcome.steps)),
        "faults": str(len(telemetry.faults)),
        "recoveries": recoveries or "none",
        "steps replayed": str(sum(record.num_replayed for record in telemetry.recoveries)),
        "checkpoints": str(len(pauses)),
        "checkpoint pause": f"median {statistics.median(pauses):.0f}, max {max(pauses):.0f} ms"
        if pauses
        else "none",
        "whole run": f"{outcome.wall_s:.1f} s",
    }


def _pauses_ms(telemetry: Telemetry) -> list[float]:
    return [record.pause_s * 1000 for record in telemetry.checkpoints if not record.error]


def _report(outcomes: list[Outcome], found: list[str]) -> dict[str, Any]:
    runs = [
        {
            "steps": len(outcome.steps),
            "faults": [
                {"step": fault.step, "kind": fault.kind, "message": fault.message}
                for fault in outcome.telemetry.faults
            ],
            "recoveries": [
                {
                    "step": record.step,
                    "rung": record.rung,
                    "replayed": record.num_replayed,
                    "ms": round(record.total_s * 1000, 1),
                }
                for record in outcome.telemetry.recoveries
            ],
            "pauses_ms": [round(pause, 1) for pause in _pauses_ms(outcome.telemetry)],
            "exit_codes": [step.exit_code for step in outcome.steps],
            "wall_s": round(outcome.wall_s, 2),
        }
        for outcome in outcomes
    ]
    return {"equal": not found, "differences": found, "undisturbed": runs[0], "disturbed": runs[1]}
