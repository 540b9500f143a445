"""Server-sent events out of bytes as they come in. Pure. Only what engines send: `data:` lines and
comments."""

from __future__ import annotations

__all__ = ["EventParser"]

MOST_BYTES = 64 * 2**20
"""Of one event. No engine sends more; a peer that never ends one must not fill the memory."""


class EventParser:
    """Cuts a stream into the data of its events.

    Lines end in LF or CRLF; an event is ended by an empty line. Comments (`: keep-alive`) and other fields
    are passed over; several `data:` lines of one event are joined by a newline."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that these bytes complete.

        Raises:
            ValueError: an event that does not end."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            if data.endswith(b"\r"):
                # Its newline is still to come.
                self._rest = data
                return []
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        if len(self._rest) > MOST_BYTES:
            raise ValueError(f"an event of more than {MOST_BYTES} bytes")
        return [event for block in blocks if (event := _data_of(block)) is not None]

    @property
    def is_between_events(self) -> bool:
        """Whether all bytes so far belonged to whole events."""
        return not self._rest.strip()


def _data_of(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
