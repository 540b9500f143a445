"""A client's handle to the owner. Every call has a deadline; sizes in bytes, times in seconds.

Blocking, and safe to use from several threads: workers call it from plain code, a pair through a thread."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from belayer_rollout.errors import Misuse, OwnerDamaged, OwnerGone, RolloutError, UpdateFailed
from belayer_rollout.memory import wire
from belayer_rollout.memory.layout import Layout

__all__ = ["Attachment", "Draft", "OwnerClient", "OwnerHealth"]

CALL_TIMEOUT_S = 5.0
"""For what takes the owner a millisecond."""

HASH_TIMEOUT_S = 300.0
"""For what makes it hash a whole model: 140 GB in host memory take a minute or two."""


@dataclass(frozen=True, slots=True)
class OwnerHealth:
    """What the owner says of itself."""

    generation: str
    """Of this process: another one has another, whatever its pid."""
    pid: int
    epoch: int
    version: int | None
    """Of the weights in force; None before the first were published."""
    buffer: int | None
    num_bytes: int
    arena_bytes: int
    filling: bool
    """A client is filling a draft."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Weights in force. ``handle`` is open until the caller closes it."""

    version: int
    buffer: int
    num_bytes: int
    layout: Layout
    handle: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A buffer to fill. ``handle`` is writable, and open until the caller closes it."""

    buffer: int
    num_bytes: int
    handle: int


class OwnerClient:
    """One connection to an owner, by the path of its socket or a connected socket.

    Raises:
        OwnerGone: nobody listens there."""

    def __init__(self, owner: Path | socket.socket, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        if isinstance(owner, socket.socket):
            self._socket = owner
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(os.fspath(owner))
        except OSError as error:
            self._socket.close()
            raise OwnerGone(f"no owner at {owner}: {error}") from error

    def __enter__(self) -> OwnerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. A draft that was begun over it is given up."""
        self._socket.close()

    def health(self) -> OwnerHealth:
        fields, _ = self._call("health")
        return OwnerHealth(**fields)

    def begin(self, num_bytes: int) -> Draft:
        """A new buffer, which this connection may fill and commit.

        Raises:
            UpdateFailed: another client fills one."""
        fields, fds = self._call("begin", num_bytes=num_bytes)
        return Draft(fields["buffer"], num_bytes, fds[0])

    def commit(self, draft: Draft, version: int, layout: Layout, root: str | None = None) -> str:
        """Put a filled buffer in force, in one step. Nobody may map it for writing any more.

        ``root`` is the digest of what was written (`digest.root_digest`). Returns the one found.

        Raises:
            UpdateFailed: the draft is no longer there, or the version is not a later one.
            OwnerDamaged: the buffer holds something else, or is still mapped for writing."""
        data = layout.to_json()
        fd = os.memfd_create("belayer-layout", os.MFD_CLOEXEC)
        try:
            os.pwrite(fd, data, 0)
            fields, _ = self._call(
                "commit", [fd], timeout_s=HASH_TIMEOUT_S, buffer=draft.buffer, version=version, root=root
            )
        finally:
            os.close(fd)
        return str(fields["root"])

    def attach(self) -> Attachment:
        """What is in force. The caller closes the handle.

        Raises:
            OwnerDamaged: nothing was published, or the layout can't be read."""
        fields, (weights, layout_fd) = self._call("attach")
        try:
            layout = Layout.from_json(os.pread(layout_fd, os.fstat(layout_fd).st_size, 0))
        except BaseException:
            os.close(weights)
            raise
        finally:
            os.close(layout_fd)
        return Attachment(fields["version"], fields["buffer"], fields["num_bytes"], layout, weights)

    def fence(self, seen: int) -> int:
        """Begin a new epoch, and return it. ``seen`` is the current one.

        Raises:
            OwnerDamaged: it is not."""
        fields, _ = self._call("fence", seen=seen)
        return int(fields["epoch"])

    def activate(self, epoch: int, num_bytes: int) -> int:
        """The writable handle of the KV arena, which the caller closes. The first call makes the arena.

        Raises:
            OwnerDamaged: the epoch is not the current one, or the arena is smaller."""
        _, fds = self._call("activate", epoch=epoch, num_bytes=num_bytes)
        return fds[0]

    def verify(self, sample: int | None = None, *, seed: int = 0) -> int:
        """Check the digests of ``sample`` chunks of the weights in force (None: of all); returns how many.

        Raises:
            OwnerDamaged: one differs, or nothing was published."""
        fields, _ = self._call(
            "verify", timeout_s=None if sample else HASH_TIMEOUT_S, sample=sample, seed=seed
        )
        return int(fields["chunks"])

    def lease(self) -> None:
        """Keep the owner alive for as long as this connection and this process are."""
        self._call("lease")

    def stop(self) -> None:
        """Ask the owner to end."""
        self._call("stop")

    def _call(
        self, op: str, fds: list[int] | None = None, *, timeout_s: float | None = None, **fields: Any
    ) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                self._socket.settimeout(timeout_s or self._timeout_s)
                wire.send(self._socket, {"op": op, **fields}, fds or ())
                reply, out = wire.receive(self._socket)
            except (OSError, EOFError, ValueError) as error:
                # A late answer would be taken for the next call's: this connection is of no more use.
                self._socket.close()
                what = "did not answer in time" if isinstance(error, TimeoutError) else f"is gone: {error}"
                raise OwnerGone(f"{op}: the owner {what}") from error
        if "error" in reply:
            wire.close_all(out)
            raise _fault(op, reply["error"], str(reply.get("message", "")))
        return reply, out


def _fault(op: str, kind: str, message: str) -> RolloutError:
    if kind == "misuse":
        return Misuse(f"{op}: {message}")
    if kind in ("busy", "lost", "version"):
        return UpdateFailed(f"{op}: {message}", version=-1)
    return OwnerDamaged(f"{op}: {message}")
