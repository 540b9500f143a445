"""`belayer ps` and `belayer gc`: what is there, and away with what nobody owns."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from belayer_env.garbage import Collected, collect_garbage
from belayer_env.host.store_mount import ensure_mounted
from belayer_env.store import Store

__all__ = ["gc", "ps"]

_WIDE = 160  # where the table goes to a log or a pipe: ids whole

StoreOption = Annotated[
    Path | None, typer.Option("--store", help="The store's directory; by default below $XDG_STATE_HOME.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def ps(
    store: StoreOption = None,
    episodes: Annotated[
        bool, typer.Option("--episodes", help="List open episodes, which can be resumed, instead.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List this store's sandboxes: who owns each, and whether that process still lives."""
    with _opened(store) as opened:
        rows = _episode_rows(opened) if episodes else _sandbox_rows(opened)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo("no open episodes" if episodes else "no sandboxes")
        return
    table = Table()
    for name in rows[0]:
        table.add_column(name, overflow="fold" if name == "image" else "ellipsis", no_wrap=name != "image")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console(width=_WIDE if not sys.stdout.isatty() else None).print(table)
    orphaned = sum(row["state"] == "orphaned" for row in rows)
    if orphaned:
        remedy = "belayer gc --episodes" if episodes else "belayer gc"
        typer.echo(f"{orphaned} without a living owner; remove with: {remedy}")


def gc(
    store: StoreOption = None,
    episodes: Annotated[
        bool,
        typer.Option("--episodes", help="Also end open episodes of dead processes, for good."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove sandboxes, mounts, namespaces, cgroups and half-made checkpoints without a living owner."""
    with _opened(store) as opened:
        collected = collect_garbage(opened, episodes=episodes)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(collected), indent=2))
    else:
        _report(collected)
    if collected.failed:
        raise typer.Exit(1)


def _opened(store: Path | None) -> Store:
    if store is None:
        ensure_mounted()
    return Store(store)


def _sandbox_rows(store: Store) -> list[dict[str, Any]]:
    return [
        {
            "sandbox": home.id,
            "runtime": home.runtime,
            "episode": home.episode_id,
            "pid": home.pid,
            "state": "owned" if home.is_owned else "orphaned",
            "age_s": round(time.time() - home.created_at),
        }
        for home in store.homes()
    ]


def _episode_rows(store: Store) -> list[dict[str, Any]]:
    return [
        {
            "episode": record.id,
            "runtime": record.runtime,
            "image": record.task["sandbox"]["image"],
            "steps": len(store.load_ledger(record.id)),
            "checkpoints": len(store.checkpoints(record.id)),
            "state": "owned" if record.owner is not None and record.owner.is_alive() else "orphaned",
            "age_s": round(time.time() - record.created_at),
        }
        for record in store.episodes()
        if record.state == "open"
    ]


def _cell(name: str, value: Any) -> str:
    if name == "age_s":
        return f"{value // 3600}:{value % 3600 // 60:02}:{value % 60:02}"
    return "" if value is None else str(value)


def _report(collected: Collected) -> None:
    counts = {
        "sandboxes": collected.sandboxes,
        "half-made files": collected.partials,
        "episodes": collected.episodes,
    }
    removed = ", ".join(f"{len(ids)} {what}" for what, ids in counts.items() if ids)
    typer.echo(f"removed {removed}" if removed else "nothing to remove")
    if collected.resumable:
        typer.echo(
            f"{len(collected.resumable)} open episodes of dead processes stay: ContainerEnv.resume(ID) goes "
            "on with one (list: belayer ps --episodes), belayer gc --episodes ends them"
        )
    for failure in collected.failed:
        typer.secho(f"not removed: {failure}", err=True, fg=typer.colors.RED)
