"""Digests of a buffer, chunk by chunk, so that a sample of it can be checked in a millisecond. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from blake3 import blake3

__all__ = ["CHUNK_BYTES", "Read", "chunk_digests", "differing", "root_digest", "sample"]

Read: TypeAlias = Callable[[int, int], "memoryview | bytearray"]
"""The bytes from one offset to another. Memory of a device is copied from there, chunk by chunk."""

CHUNK_BYTES = 256 * 1024
"""Small enough that eight of them take a millisecond, large enough that 140 GB need only 18 MB of digests."""


def chunk_digests(read: Read, num_bytes: int) -> list[bytes]:
    """One per chunk of the first ``num_bytes``."""
    return [_digest_of(read, num_bytes, i) for i in range(-(-num_bytes // CHUNK_BYTES))]


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


def differing(read: Read, num_bytes: int, digests: Sequence[bytes], chunks: Iterable[int]) -> list[int]:
    """Those of ``chunks`` whose bytes are not what their digest says."""
    return [i for i in chunks if _digest_of(read, num_bytes, i) != digests[i]]


def _digest_of(read: Read, num_bytes: int, chunk: int) -> bytes:
    start = chunk * CHUNK_BYTES
    return blake3(read(start, min(start + CHUNK_BYTES, num_bytes))).digest()
