"""Digests of a buffer, chunk by chunk, so that a sample of it can be checked in a millisecond. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from blake3 import blake3

__all__ = ["CHUNK_BYTES", "chunk_digest", "chunk_digests", "differing", "root_digest", "sample"]

CHUNK_BYTES = 256 * 1024
"""Small enough that eight of them take a millisecond, large enough that 140 GB need only 18 MB of digests."""


def chunk_digest(chunk: memoryview | bytes) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(chunk).digest()


def chunk_digests(buffer: memoryview) -> list[bytes]:
    """One per chunk of ``buffer``, which is of bytes."""
    starts = range(0, len(buffer), CHUNK_BYTES)
    return [chunk_digest(buffer[start : start + CHUNK_BYTES]) for start in starts]


def root_digest(digests: Iterable[bytes]) -> str:
    """One digest for the whole: hex."""
    return blake3(b"".join(digests)).hexdigest()


def sample(count: int, size: int | None, draw: random.Random) -> list[int]:
    """Which of ``count`` chunks to look at: the first, the last, and others by chance; all for None."""
    if size is None or size >= count:
        return list(range(count))
    if size < 2:
        return draw.sample(range(count), size)
    return sorted({0, count - 1, *draw.sample(range(1, count - 1), size - 2)})


def differing(buffer: memoryview, digests: Sequence[bytes], chunks: Iterable[int]) -> list[int]:
    """Those of ``chunks`` whose bytes are not what their digest says."""
    return [i for i in chunks if chunk_digest(buffer[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]) != digests[i]]
