"""The subcommands of the env package: a new one is a line in `COMMANDS`."""

from __future__ import annotations

from functools import partial
from importlib.metadata import entry_points

import typer

from belayer_env.cli.lazy import add_lazy_command, load_target

__all__ = ["COMMANDS", "register"]

COMMANDS = {
    "setup": (
        "belayer_env.cli.setup:setup",
        "Install what sandboxes need on this host, once.",
    ),
    "doctor": (
        "belayer_env.cli.doctor:doctor",
        "Show what this host has, and what mends it.",
    ),
    "ps": (
        "belayer_env.cli.ps:ps",
        "List the sandboxes there are, and whose they are.",
    ),
    "gc": (
        "belayer_env.cli.ps:gc",
        "Remove what dead processes left behind.",
    ),
    "timeline": (
        "belayer_env.cli.timeline:timeline",
        "Draw what happened in an episode.",
    ),
    "demo": (
        "belayer_env.cli.demo:demo",
        "Play an agent's episode twice, once through two kills, and compare.",
    ),
    "chaos": (
        "belayer_env.cli.chaos:chaos",
        "Inject faults into episodes, and prove that nobody could tell.",
    ),
}
"""Name -> ("module:object", its line in --help). The object: a function in typer's manner, or a Typer."""

BENCHES = "belayer.benches"
"""Entry points `register(bench_app: typer.Typer) -> None`, by which each package adds its benches."""


def register(app: typer.Typer) -> None:
    """Add them all to the `belayer` command; nothing of theirs is imported yet."""
    for name, (target, summary) in COMMANDS.items():
        add_lazy_command(app, name, summary, partial(load_target, target))
    add_lazy_command(app, "bench", "Measure Belayer against its peers on this machine.", bench_app)


def bench_app() -> typer.Typer:
    """`belayer bench` with the benches of every package that is installed."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def bench() -> None:
        """Measure Belayer against its peers on this machine."""

    for entry in entry_points(group=BENCHES):
        entry.load()(app)
    return app
