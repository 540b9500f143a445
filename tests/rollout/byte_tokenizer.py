"""A tokenizer whose token is a byte: every character outside ASCII is several tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ByteTokenizer"]

SPECIAL = 256
"""Ids from here on are special tokens."""


class ByteTokenizer:
    """Counts how many tokens it was ever asked to decode."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(token_ids)
        text = bytearray()
        for token in token_ids:
            if token < SPECIAL:
                text.append(token)
            elif not skip_special_tokens:
                text += f"<{token}>".encode()
        return text.decode("utf-8", errors="replace")
