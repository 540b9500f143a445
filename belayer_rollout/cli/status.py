"""`belayer rollout status`: what a served client and its workers are about, or what a journal holds."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["status"]

ANSWER_DEADLINE_S = 10.0


def status(
    url: Annotated[
        str, typer.Argument(help="Where `belayer rollout serve` listens.")
    ] = "http://127.0.0.1:8000",
    journal: Annotated[Path | None, typer.Option(help="Look into this journal instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show workers, their health and their load; or with --journal, sessions and their tokens."""
    found = _served(url) if journal is None else _journalled(journal)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    rows = found["workers"] if journal is None else found["sessions"]
    table = Table(box=None, pad_edge=False)
    for column in rows[0] if rows else ():
        table.add_column(column.removesuffix("_s").replace("_", " "))
    for row in rows:
        table.add_row(*(escape(_shown(value)) for value in row.values()))
    console.print(table if rows else "[dim]none[/dim]")
    rest = {key: value for key, value in found.items() if not isinstance(value, list)}
    console.print(
        "[dim]" + escape(", ".join(f"{key} {_shown(value)}" for key, value in rest.items())) + "[/dim]"
    )


def _served(url: str) -> dict[str, Any]:
    address = url.rstrip("/").removesuffix("/v1") + "/belayer/status"
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_DEADLINE_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError) as error:
        typer.secho(
            f"belayer: {address} does not answer: {error}; start it with: belayer rollout serve", err=True
        )
        raise typer.Exit(1) from error


def _journalled(path: Path) -> dict[str, Any]:
    from belayer_rollout.errors import RolloutError
    from belayer_rollout.journal import Journal

    async def read() -> list[dict[str, Any]]:
        journal = Journal(path)
        try:
            return [dataclasses.asdict(session) for session in await journal.sessions()]
        finally:
            await journal.close()

    try:
        # To open one that is not there would make it.
        return {"sessions": asyncio.run(read()) if path.exists() else []}
    except RolloutError as error:
        typer.secho(f"belayer: {error}", err=True)
        raise typer.Exit(1) from error


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return " ".join(f"{key}:{count}" for key, count in value.items()) or "-"
    return "-" if value is None else str(value)
