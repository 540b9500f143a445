"""The output of one command: head and tail kept, the middle dropped, bytes turned into valid Unicode.
Pure."""

from __future__ import annotations

import codecs
from collections import deque

__all__ = ["OutputBuffer", "decode_output"]


class OutputBuffer:
    """Keeps the first and the last half of at most ``limit`` bytes, whatever flows through it.

    Memory is bounded by ``limit`` plus one chunk fed."""

    def __init__(self, limit: int) -> None:
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.num_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        self.num_bytes += len(chunk)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if not chunk:
            return
        if len(chunk) > self._tail_room:
            chunk = chunk[len(chunk) - self._tail_room :]
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._tail_room:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        """Whether bytes were dropped."""
        return self.num_bytes > self._head_room + self._tail_room

    def text(self) -> str:
        """What was kept, as valid Unicode; a cut is marked, and never falls inside a character."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return decode_output(bytes(self._head) + tail)
        tail = tail[len(tail) - self._tail_room :]
        head = _without_partial_end(bytes(self._head))
        tail = _without_partial_start(tail)
        cut = self.num_bytes - len(head) - len(tail)
        return f"{decode_output(head)}\n[... {cut} bytes cut ...]\n{decode_output(tail)}"


def decode_output(data: bytes) -> str:
    """UTF-8 to text; bytes that are not valid UTF-8, and NUL, come out escaped (``\\xff``, ``\\x00``)."""
    return data.decode("utf-8", errors="backslashreplace").replace("\0", "\\x00")


def _without_partial_end(data: bytes) -> bytes:
    """Drop a character that the end of ``data`` cuts in two (not bytes that could never become one)."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    decoder.decode(data)
    pending = decoder.getstate()[0]
    return data[: len(data) - len(pending)]


def _without_partial_start(data: bytes) -> bytes:
    """Drop up to three continuation bytes at the start: the rest of a character that the cut has split."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
