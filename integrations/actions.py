"""From what a model says to the command in it."""

from __future__ import annotations

import re

__all__ = ["last_command"]


def last_command(text: str) -> str | None:
    """The last fenced shell block of what a model said; None if there is none, or it was not finished."""
    found = re.findall(r"```(?:bash|sh)?\n(.*?)```", text, flags=re.DOTALL)
    return found[-1].strip() if found else None
