"""Gymnasium spaces for commands and their output: any valid Unicode text, of a bounded length."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

__all__ = ["ActionSpace", "UnicodeText"]

HARMLESS = ("true", "pwd", "echo hello", "ls", "cat /etc/hostname", "test -d /tmp", ":", "echo 'a b' | wc -w")


class UnicodeText(spaces.Text):
    """Every str that can be encoded as UTF-8, of at most ``max_length`` characters.

    Gymnasium's own Text lists its characters; all of Unicode would be a million."""

    def __init__(self, max_length: int, *, seed: int | None = None) -> None:
        super().__init__(max_length=max_length, min_length=0, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether it is such a text."""
        if not isinstance(x, str) or len(x) > self.max_length:
            return False
        try:
            x.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate
            return False
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_length={self.max_length})"

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and bool(self.max_length == other.max_length)

    __hash__ = None  # type: ignore[assignment]


class ActionSpace(UnicodeText):
    """Commands of at most ``max_length`` bytes. A sample is harmless in any container, and quick."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """One of a few commands; masks are not supported, as there are no characters to mask."""
        return HARMLESS[int(self.np_random.integers(len(HARMLESS)))]

    def contains(self, x: Any) -> bool:
        """Whether it is a text that a shell can read: no NUL."""
        return super().contains(x) and "\0" not in x and len(x.encode("utf-8")) <= self.max_length
