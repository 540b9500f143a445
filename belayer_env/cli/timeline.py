"""`belayer timeline`: what happened in an episode, as a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from belayer_env.errors import InvalidInput
from belayer_env.host.store_mount import ensure_mounted
from belayer_env.picture import draw_episode
from belayer_env.store import Store
from belayer_env.timeline import in_words, lanes, summary

__all__ = ["timeline"]


def timeline(
    episode: Annotated[
        str, typer.Argument(metavar="[EPISODE]", help="Its id; without one, list those there are.")
    ] = "",
    png: Annotated[Path, typer.Option(metavar="FILE", help="Where to draw it.")] = Path("timeline.png"),
    began_s: Annotated[float, typer.Option("--from", min=0, help="Draw from this second on.")] = 0.0,
    ended_s: Annotated[float | None, typer.Option("--to", help="Draw up to this second.")] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The store's directory; by default below $XDG_STATE_HOME."),
    ] = None,
) -> None:
    """Draw an episode's steps, bubbles, checkpoints, faults and recoveries on a time axis.

    Episodes under way can be drawn up to a few steps ago, ended ones until some 50 newer ones have come."""
    if store is None:
        ensure_mounted()
    with Store(store) as opened:
        if not episode:
            _list(opened)
            return
        found = opened.timelines.load(episode)
        record = opened.episode(episode)
    end_s = lanes(found.telemetry).end_s
    if not began_s < (ended_s or end_s):
        raise InvalidInput(f"nothing lies between {began_s:g} s and {ended_s or end_s:g} s of that episode")
    state = "" if found.is_closed else ", not closed when this was written"
    title = f"episode {episode} on {record.runtime}, policy {record.policy}{state}"
    draw_episode(found.telemetry, png, title=title, began_s=began_s, ended_s=ended_s)
    typer.echo(f"{summary(found.telemetry)}\n{png}")


def _list(store: Store) -> None:
    names = store.timelines.episode_ids()
    if not names:
        typer.echo("no episodes: one that has taken some steps is listed here")
        return
    table = Table("episode", "ago", "state", "what happened", box=None, pad_edge=False)
    for name in names:
        found = store.timelines.load(name)
        state = "closed" if found.is_closed else "open"
        table.add_row(
            name, in_words(max(0.0, time.time() - found.written_at)), state, summary(found.telemetry)
        )
    Console(highlight=False).print(table)
