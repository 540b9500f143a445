"""What an executor was told, as plain data. Seconds, tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer_env import ContainerEnv
from belayer_env.errors import InvalidInput

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """See `agent_executor`.

    Raises:
        InvalidInput: a bound that is not positive."""

    make_env: Callable[[str, Any], ContainerEnv]
    resume_env: Callable[[str, Any, str, Path], ContainerEnv]
    """Of a prompt, its label, an episode's id and its store."""
    books_root: Callable[[], Path]
    """Where the books of samples are kept."""
    max_turns: int
    max_turn_tokens: int | None
    parse_action: Callable[[str], str | None]
    encode_observation: Callable[[Any, str], Sequence[int]]
    total: Callable[[Sequence[float]], float]
    attempts: int
    reset_timeout_s: float
    step_timeout_s: float
    most_lost_in_a_row: int

    def __post_init__(self) -> None:
        for name in (
            "max_turns",
            "max_turn_tokens",
            "attempts",
            "reset_timeout_s",
            "step_timeout_s",
            "most_lost_in_a_row",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"{name} must be positive, not {value!r}")
