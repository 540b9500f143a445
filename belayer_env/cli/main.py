"""The `belayer` command: the subcommands of every installed package, and how an error leaves it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from belayer_env.errors import BelayerError

__all__ = ["main", "make_app"]

GROUP = "belayer.commands"
"""Entry points `register(app: typer.Typer) -> None`."""


@dataclass(slots=True)
class Settings:
    """What the options before the subcommand say."""

    debug: bool = False


def main() -> None:
    """Run the command line. A BelayerError ends it with its message and exit code 1, without a traceback."""
    settings = Settings()
    try:
        make_app(settings)()
    except BelayerError as error:
        if settings.debug:
            raise
        typer.secho(f"belayer: {error}", err=True, fg=typer.colors.RED)
        sys.exit(1)


def make_app(settings: Settings) -> typer.Typer:
    """The application with all subcommands; its options are written into ``settings``."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def belayer(
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
        show_version: Annotated[
            bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
        ] = False,
    ) -> None:
        """Reinforcement learning of LLM agents that survives faults."""
        settings.debug = debug

    for entry in entry_points(group=GROUP):
        try:
            register = entry.load()
        except ImportError as error:
            # One package's missing dependency must not take `belayer doctor` away.
            typer.secho(f"belayer: the commands of {entry.value} are left out: {error}", err=True)
            continue
        register(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"belayer {version('belayer')}")
        raise typer.Exit


if __name__ == "__main__":
    main()
