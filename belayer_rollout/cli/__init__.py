"""What the rollout package adds to the `belayer` command. Imports nothing heavy until a command is called."""

from __future__ import annotations

import typer

__all__ = ["register", "register_benches"]


def register(app: typer.Typer) -> None:
    """Add `belayer rollout ...`."""
    from belayer_rollout.cli.serve import serve
    from belayer_rollout.cli.status import status

    rollout = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        help="Serve a model through faults, and look at it.",
    )  # fmt: skip
    rollout.command()(serve)
    rollout.command()(status)
    app.add_typer(rollout, name="rollout")


def register_benches(app: typer.Typer) -> None:
    """Add `belayer bench failover`."""
    from belayer_rollout.cli.bench import failover

    app.command()(failover)
