"""How owner and clients talk: one JSON object per SOCK_SEQPACKET message, with file descriptors attached."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["MOST_BYTES", "MOST_FDS", "close_all", "receive", "send"]

MOST_BYTES = 64 * 1024
"""Of one message: well below the kernel's default socket buffer. What is longer goes in a memfd."""

MOST_FDS = 4


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay the caller's.

    Raises:
        OSError: the peer is gone, or the socket's time-out is over."""
    socket.send_fds(sock, [json.dumps(message).encode()], list(fds))


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors, which the caller closes.

    Raises:
        EOFError: the peer closed its end.
        ValueError: not a JSON object, or too long.
        OSError: the connection broke, or the socket's time-out is over."""
    data, fds, flags, _ = socket.recv_fds(sock, MOST_BYTES, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            raise EOFError("the peer closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a message was longer than it may be")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError(f"not an object: {data[:80]!r}")
    except BaseException:
        close_all(fds)
        raise
    return message, fds


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a message, or were sent with one."""
    for fd in fds:
        os.close(fd)
