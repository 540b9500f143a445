"""Commands imported when they are called: `belayer ps` does not pay for what `belayer demo` needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

__all__ = ["add_lazy_command", "load_target"]


def add_lazy_command(app: typer.Typer, name: str, summary: str, load: Callable[[], Any]) -> None:
    """Give ``app`` the command ``name``, shown with its ``summary``.

    ``load`` returns what stands behind it: a function in typer's manner, or a Typer with its own commands."""

    class Lazy(TyperCommand):
        def make_context(
            self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
        ) -> Any:
            # The context belongs to the real command, and with it parsing, --help and the call.
            return _command(load()).make_context(info_name, args, parent=parent, **extra)

    def stand_in() -> None:
        raise AssertionError("a lazy command's stand-in is never called")

    app.command(name, cls=Lazy, help=summary)(stand_in)


def load_target(target: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _command(behind: Any) -> Any:
    if isinstance(behind, typer.Typer):
        return typer.main.get_command(behind)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(behind)
    return typer.main.get_command(app)
