"""`belayer doctor`: what this host has, what mends what is missing, and the tier each runtime can give."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from belayer_env.host.facts import HostFacts
from belayer_env.host.gather import gather_host
from belayer_env.host.verdict import Row, Status, Verdict, judge_docker, judge_rows, judge_runc
from belayer_env.spec import Tier

__all__ = ["doctor", "print_tiers", "report_json"]

PLAIN_WIDTH = 200

COLOURS = {Status.OK: "green", Status.MISSING: "yellow", Status.BROKEN: "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show what this host has, what is broken, and what mends it.

    Exit code 1 when no runtime can give full checkpoints."""
    facts = gather_host()
    if as_json:
        typer.echo(json.dumps(report_json(facts), indent=2))
    else:
        _console().print(_table(judge_rows(facts)))
        print_tiers(facts)
    if not _any_full(_verdicts(facts)):
        raise typer.Exit(1)


def report_json(facts: HostFacts) -> dict[str, Any]:
    """The report as plain data; ``tiers`` holds "full", "files" or "none" by runtime."""
    verdicts = _verdicts(facts)
    return {
        "rows": [
            {"name": row.name, "status": row.status.value, "found": row.found, "remedy": row.remedy}
            for row in judge_rows(facts)
        ],
        "tiers": {name: str(verdict) for name, verdict in verdicts.items()},
        "reasons": {name: verdict.reason for name, verdict in verdicts.items()},
        "full": _any_full(verdicts),
    }


def print_tiers(facts: HostFacts) -> None:
    """The last lines of the report: what each runtime can save here."""
    console = _console()
    for name, verdict in _verdicts(facts).items():
        colour = {Tier.FULL: "green", Tier.FILES: "yellow", None: "red"}[verdict.tier]
        reason = f" ({verdict.reason})" if verdict.reason else ""
        console.print(f"{name}: [{colour}]{verdict}[/{colour}]{escape(reason)}", soft_wrap=True)


def _verdicts(facts: HostFacts) -> dict[str, Verdict]:
    return {"runc": judge_runc(facts.runc), "docker": judge_docker(facts.engine)}


def _any_full(verdicts: dict[str, Verdict]) -> bool:
    return any(verdict.tier is Tier.FULL for verdict in verdicts.values())


def _table(rows: list[Row]) -> Table:
    table = Table("", "", box=None, pad_edge=False)
    table.add_column("found", overflow="fold")
    table.add_column("what mends it", overflow="fold")
    for row in rows:
        colour = COLOURS[row.status]
        table.add_row(row.name, f"[{colour}]{row.status}[/{colour}]", escape(row.found), escape(row.remedy))
    return table


def _console() -> Console:
    console = Console(highlight=False)
    # In a log nobody sees a table's right edge: whole paths and commands are worth more.
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
