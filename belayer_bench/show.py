"""A bench's report on the screen."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from belayer_bench.report import OURS, Report

__all__ = ["show_report"]


def show_report(report: Report, as_json: bool) -> None:
    """As JSON for programs, or as tables for people."""
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
        return
    console = Console(highlight=False)
    console.print(f"\n[bold]{report.bench}[/bold] on {escape(str(report.machine))}", soft_wrap=True)
    console.print(_medians(report))
    if report.checks:
        console.print(_checks(report))
    for name, peer in report.peers.items():
        found = f"version {peer.version}" if peer.version else f"left out: {peer.left_out}"
        console.print(f"[dim]{name}: {escape(found)}[/dim]", soft_wrap=True)
    for name, note in report.notes.items():
        console.print(f"[dim]{escape(name)}: {escape(note)}[/dim]", soft_wrap=True)


def _medians(report: Report) -> Table:
    """A column for each contender, where the figures are named after them."""
    columns = [
        name for name in (OURS, *report.peers) if any(key.startswith(f"{name}_") for key in report.medians)
    ]
    table = Table("median", *(columns or [""]), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    first = columns[0] + "_" if columns else ""
    for key in report.medians:
        if key.startswith(first):
            figure = key.removeprefix(first)
            keys = [f"{name}_{figure}" for name in columns] or [key]
            table.add_row(figure, *(_rounded(report.medians[key]) for key in keys))
    return table


def _rounded(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _checks(report: Report) -> Table:
    table = Table("check", "found", "target", "", box=None, pad_edge=False)
    for name, check in report.checks.items():
        if isinstance(check, dict):
            bound = "at_most" if "at_most" in check else "at_least"
            target = f"{bound.replace('_', ' ')} {check[bound]:.3f}"
            table.add_row(name, f"{check['value']:.3f}", target, _mark(check["met"]))
        elif isinstance(check, bool):
            table.add_row(name, "yes" if check else "no", "yes", _mark(check))
        else:
            table.add_row(name, str(check), "0", _mark(check == 0))
    return table


def _mark(met: Any) -> str:
    return "[green]met[/green]" if met else "[red]missed[/red]"
