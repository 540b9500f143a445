"""Which weights drew which tokens of a stream. Pure: no vLLM.

vLLM labels each step's output with the version in force, and keeps per request where each label starts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pieces"]


def pieces(start: int, stop: int, starts: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Cut tokens ``start:stop`` of a stream where the version changes: (version, start, stop) each.

    ``starts`` holds (version, index of its first token) in order of the index; the first is 0.

    >>> pieces(18, 22, [(3, 0), (4, 20)])
    [(3, 18, 20), (4, 20, 22)]"""
    cuts = []
    for i, (version, begins) in enumerate(starts):
        ends = starts[i + 1][1] if i + 1 < len(starts) else stop
        piece = (version, max(start, begins), min(stop, ends))
        if piece[1] < piece[2]:
            cuts.append(piece)
    return cuts
