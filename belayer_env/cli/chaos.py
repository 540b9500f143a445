"""`belayer chaos`: faults into real episodes, and whether the agent could tell."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from belayer_env.chaos.run import ChaosReport, run_chaos
from belayer_env.chaos.strikes import Instant, Kind, parse_kinds
from belayer_env.chaos.task import ACTIONS, chaos_task
from belayer_env.cli.interrupt import ended_by_sigterm
from belayer_env.cli.progress import Progress
from belayer_env.errors import InvalidInput
from belayer_env.host.store_mount import ensure_mounted
from belayer_env.spec import Task

__all__ = ["chaos"]

_SHOWN_LINES = 40


def chaos(
    faults: Annotated[int, typer.Option(min=1, help="Faults that have to hit.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the choice of faults and instants.")] = 1,
    kinds: Annotated[str, typer.Option(help="Kinds of fault.")] = ",".join(Kind),
    task: Annotated[str, typer.Option(metavar="MODULE:ATTRIBUTE", help="Your Task (the bundled one).")] = "",
    actions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its actions: a JSON list, or one command a line."),
    ] = None,
    policy: Annotated[str, typer.Option(help="When to checkpoint.")] = "adaptive",
    standby: Annotated[bool, typer.Option("--standby", help="Keep a paused clone to swap in.")] = False,
    runtime: Annotated[str, typer.Option(help="auto, runc or docker.")] = "auto",
    store: Annotated[Path | None, typer.Option(metavar="DIR", help="Store to use (the default one).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Play episodes under faults, and compare each with an undisturbed run of the same actions.

    Observations, exit codes, files, processes and shell state must be equal, or the agent must have been told
    of a rollback. Exit code 1 when something differs, an episode is lost, or anything is left on the host."""
    chosen = parse_kinds(kinds)
    played, script = _script(task, actions)
    if store is None:
        ensure_mounted()
    progress = Progress(Console(stderr=True, highlight=False))
    with ended_by_sigterm(), progress.step(f"Playing until {faults} faults have hit") as step:
        report = run_chaos(
            played,
            script,
            faults=faults,
            seed=seed,
            kinds=chosen,
            policy=policy,
            standby=standby,
            runtime=runtime,
            store=store,
            report=step.report,
        )
        step.result = f"{report.episodes} episodes"
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show(report)
    if report.has_failed:
        raise typer.Exit(1)


def _script(task: str, actions: Path | None) -> tuple[Task, tuple[str, ...]]:
    if bool(task) != (actions is not None):
        raise InvalidInput("give --task and --actions together, or neither")
    if not task or actions is None:
        return chaos_task(), ACTIONS
    module, _, attribute = task.partition(":")
    sys.path.insert(0, "")  # as python -m has it: your module is likely to be here
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(f"--task names a Task as module:attribute, not {task!r}: {error}") from error
    if not isinstance(found, Task):
        raise InvalidInput(f"{task} is a {type(found).__name__}, not a belayer_env.Task")
    return found, _read_actions(actions)


def _read_actions(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--actions: {error}") from error
    try:
        lines = json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
    if not isinstance(lines, list) or not lines or not all(isinstance(line, str) for line in lines):
        raise InvalidInput(f"{path} must hold a JSON list of commands, or one command a line")
    return tuple(lines)


def _show(report: ChaosReport) -> None:
    console = Console(highlight=False)
    table = Table("", *(instant.value for instant in Instant), box=None, pad_edge=False)
    for kind in Kind:
        counts = [
            sum((hit.kind, hit.instant) == (kind, instant) for hit in report.hits) for instant in Instant
        ]
        table.add_row(kind.value, *(str(count) if count else "" for count in counts))
    console.print(table)
    found = report.to_json()
    for name in ("faults", "recovered", "rolled_back"):
        console.print(f"{name.replace('_', ' ')}: {found[name]}")
    for rung, times in found["recovery_ms"].items():
        console.print(f"recovery, {rung}: {times['count']}, median {times['median']:.0f} ms")
    for name in ("unnoticed_divergences", "lost_episodes", "leaks"):
        colour = "red" if found[name] else "green"
        console.print(f"[{colour}]{name.replace('_', ' ')}: {found[name]}[/{colour}]")
    for line in found["found"][:_SHOWN_LINES]:
        console.print(f"[red]✗[/red] {escape(line)}", soft_wrap=True)
