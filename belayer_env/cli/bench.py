"""`belayer bench checkpoint` and `belayer bench density`: run a bench, show its report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from belayer_bench.machine import Machine
from belayer_bench.show import show_report
from belayer_env import paths
from belayer_env.bench.checkpoint import compare, race
from belayer_env.bench.contender import Contender
from belayer_env.bench.density import measure, summarise
from belayer_env.bench.docker import Docker
from belayer_env.bench.ours import Ours
from belayer_env.bench.podman import Podman
from belayer_env.cli.interrupt import ended_by_sigterm
from belayer_env.cli.progress import Progress
from belayer_env.errors import InvalidInput
from belayer_env.host.store_mount import ensure_mounted
from belayer_env.sandbox.image import resolve_image
from belayer_env.store import Store

__all__ = ["checkpoint", "density", "register"]

PEERS: dict[str, Callable[[Path], Contender]] = {"podman": Podman, "docker": Docker}

ImageOption = Annotated[str, typer.Option(metavar="REF", help="Image to run on (the test image).")]
StoreOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Store to use (the default one).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")]


def register(app: typer.Typer) -> None:
    """Add them to `belayer bench`."""
    app.command()(checkpoint)
    app.command()(density)


def checkpoint(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each figure is their median.")] = 20,
    peers: Annotated[str, typer.Option(help="Who to measure against, or none.")] = ",".join(PEERS),
    image: ImageOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pause, restore and step of the runc runtime, against podman and the Docker Engine.

    One sandbox each, with a shell, an HTTP server in the background and 5 MB of changed files."""
    names = [name for name in peers.split(",") if name not in ("", "none")]
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidInput(f"no such peer: {', '.join(unknown)}; known are {', '.join(PEERS)}")
    image = image or f"rootfs:{paths.test_image()}"
    with ended_by_sigterm(), _open_store(store) as opened:
        root = resolve_image(image, opened.images).path
        contenders = [PEERS[name](root) for name in names]
        with _progress().step(f"Measuring {rounds} rounds") as step:
            figures = race(Ours(image, opened), contenders, rounds=rounds, report=step.report)
    show_report(compare(figures, Machine.here()), as_json)


def density(
    sandboxes: Annotated[int, typer.Option(min=2, help="How many at once.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each, with a checkpoint after every one.")] = 5,
    image: ImageOption = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Many sandboxes at once in one process: failures, memory on the host's side, waits.

    Exit code 1 when a sandbox failed."""
    image = image or f"rootfs:{paths.test_image()}"
    watched = _progress().step(f"Measuring {sandboxes} sandboxes")
    with ended_by_sigterm(), _open_store(store) as opened, watched as step:
        run = partial(measure, image, opened.root, sandboxes=sandboxes, steps=steps, report=step.report)
        crowd = anyio.run(run)
    report = summarise(crowd, Machine.here())
    show_report(report, as_json)
    if report.checks["failures"]:
        raise typer.Exit(1)


def _progress() -> Progress:
    return Progress(Console(stderr=True, highlight=False))


def _open_store(store: Path | None) -> Store:
    if store is None:
        ensure_mounted()
    return Store(store)
