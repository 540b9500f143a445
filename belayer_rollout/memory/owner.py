"""The MemoryOwner: a small process that holds weights and the KV arena while workers come and go.

    python -m belayer_rollout.memory.owner --listen-fd 3 --lease-fd 4   (`launch.start_owner` does it)

It imports no torch and touches none of the memory that it holds, except to hash it. One thread per
connection; what it knows is in `book.Book`, behind one lock. It ends when the last lease is gone (a lease is
a connection that said so and whose process lives), and ``--linger-s`` later."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from belayer_rollout.errors import OwnerDamaged
from belayer_rollout.memory import digest, wire
from belayer_rollout.memory.base import OwnerMemory, Region
from belayer_rollout.memory.book import Book, Commit, Refused
from belayer_rollout.memory.memfd import HostMemory, HostRegion
from belayer_rollout.memory.orphans import end_orphans

__all__ = ["Owner", "main"]

Reply: TypeAlias = tuple[dict[str, Any], list[int]]
"""The fields of an answer, and the descriptors that go with it (closed once they are sent)."""

MOST_LAYOUT_BYTES = 256 * 1024 * 1024
"""A layout takes about 100 bytes per tensor; a million tensors are no model."""


class Owner:
    """The operations, one method each (``do_NAME``). Each returns the reply's fields and descriptors."""

    def __init__(self, memory: OwnerMemory, *, generation: str = "") -> None:
        self._memory = memory
        self._generation = generation or uuid.uuid4().hex
        self._lock = threading.Lock()
        self._book = Book()
        self._regions: dict[int, Region] = {}
        self._arena: Region | None = None

    def handle(self, holder: int, message: dict[str, Any], fds: list[int]) -> Reply:
        """Answer one message. What is refused is told, never raised."""
        do: Callable[..., Reply] | None
        do = getattr(self, f"do_{message.pop('op', '')}", None)
        try:
            if do is None:
                raise Refused("misuse", "no such operation")
            fields, out = do(holder, fds, **message)
        except Refused as error:
            return {"error": error.kind, "message": str(error)}, []
        except OwnerDamaged as error:
            return {"error": "damaged", "message": str(error)}, []
        except (TypeError, ValueError, OSError) as error:
            return {"error": "misuse", "message": f"{type(error).__name__}: {error}"}, []
        return fields, out

    def forget(self, holder: int) -> None:
        """A connection ended: the draft that it was filling is given up."""
        with self._lock:
            self._drop(self._book.give_up(holder))

    def do_health(self, _holder: int, _fds: list[int]) -> Reply:
        with self._lock:
            commit = self._book.in_force
            return {
                "generation": self._generation,
                "pid": os.getpid(),
                "epoch": self._book.epoch,
                "version": commit.version if commit else None,
                "buffer": commit.buffer if commit else None,
                "num_bytes": commit.num_bytes if commit else 0,
                "arena_bytes": self._arena.num_bytes if self._arena else 0,
                "filling": self._book.draft is not None,
            }, []

    def do_begin(self, holder: int, _fds: list[int], num_bytes: int) -> Reply:
        """A new buffer to fill: its handle, writable."""
        with self._lock:
            before = self._book.draft
            draft = self._book.begin(holder, num_bytes)
            if before is not None:
                self._drop(before.buffer)
            try:
                region = self._memory.allocate(f"weights-{draft.buffer}", num_bytes)
            except OwnerDamaged:
                self._book.give_up(holder)
                raise
            self._regions[draft.buffer] = region
            return {"buffer": draft.buffer}, [region.export(writable=True)]

    def do_commit(
        self, holder: int, fds: list[int], buffer: int, version: int, root: str | None = None
    ) -> Reply:
        """Freeze the draft, hash it, and put it in force in one step. ``fds`` holds the layout.

        ``root`` is what the filler means to have written."""
        layout = _read_all(fds[0]) if fds else b""
        with self._lock:
            draft = self._book.check_draft(holder, buffer, version)
            region = self._regions[buffer]
        # The hash takes seconds for a large model: the others are answered meanwhile. The draft can't go:
        # only this connection ends it, and its thread is here.
        region.freeze()
        with region.reading() as read:
            digests = tuple(digest.chunk_digests(read, draft.num_bytes))
        found = digest.root_digest(digests)
        if root is not None and root != found:
            raise OwnerDamaged(f"buffer {buffer} holds {found[:16]}, its filler wrote {root[:16]}")
        with self._lock:
            self._drop(self._book.commit(draft, version, digests, layout))
        return {"root": found}, []

    def do_attach(self, _holder: int, _fds: list[int]) -> Reply:
        """What is in force: handles of the weights (read-only) and of the layout."""
        with self._lock:
            commit = self._require_commit()
            fields = {"version": commit.version, "buffer": commit.buffer, "num_bytes": commit.num_bytes}
            weights = self._regions[commit.buffer].export(writable=False)
        try:
            layout = _memfd_of(commit.layout)
        except OSError:
            os.close(weights)
            raise
        return fields, [weights, layout]

    def do_fence(self, _holder: int, _fds: list[int], seen: int) -> Reply:
        with self._lock:
            return {"epoch": self._book.fence(seen)}, []

    def do_activate(self, _holder: int, _fds: list[int], epoch: int, num_bytes: int) -> Reply:
        """The arena's handle, for the worker of this epoch alone. The first one makes it."""
        with self._lock:
            self._book.check_epoch(epoch)
            if self._arena is None:
                self._arena = self._memory.allocate("arena", num_bytes)
            if self._arena.num_bytes < num_bytes:
                raise OwnerDamaged(f"the arena has {self._arena.num_bytes} bytes, not {num_bytes}")
            return {"num_bytes": self._arena.num_bytes}, [self._arena.export(writable=True)]

    def do_verify(self, _holder: int, _fds: list[int], sample: int | None, seed: int = 0) -> Reply:
        """Check ``sample`` chunks of the weights in force against their digests (None: all)."""
        with self._lock:
            commit = self._require_commit()
            region = self._regions[commit.buffer]
            chunks = digest.sample(len(commit.digests), sample, random.Random(seed))
            reading = contextlib.ExitStack()
            # Mapped under the lock: a commit by another connection may close the region right after.
            read = reading.enter_context(region.reading())
        with reading:
            wrong = digest.differing(read, commit.num_bytes, commit.digests, chunks)
        if wrong:
            raise OwnerDamaged(f"chunks {wrong[:8]} of buffer {commit.buffer} are not what was published")
        return {"chunks": len(chunks), "version": commit.version}, []

    def _require_commit(self) -> Commit:
        if self._book.in_force is None:
            raise Refused("empty", "nothing was published yet")
        return self._book.in_force

    def _drop(self, buffer: int | None) -> None:
        if buffer is not None and (region := self._regions.pop(buffer, None)) is not None:
            region.close()


class Server:
    """Connections and leases around an `Owner`."""

    def __init__(self, owner: Owner, listener: socket.socket, *, linger_s: float) -> None:
        self._owner = owner
        self._listener = listener
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._leases: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = False
        self._names = 0
        self._users: set[int] = set()
        """Process ids of those who have had a lease."""

    def serve(self, starter: socket.socket) -> None:
        """Until the last lease is gone, starting with that of ``starter``, or until told to stop."""
        self._take(starter, lease=True)
        gone_at: float | None = None
        while not self._stopping:
            with self._lock:
                held = bool(self._leases)
            # Without a lease the owner waits for another one, in vain once the time is over.
            gone_at = None if held else (gone_at if gone_at is not None else time.monotonic())
            left = math.inf if gone_at is None else gone_at + self._linger_s - time.monotonic()
            if left <= 0:
                return
            for key, _ in self._selector.select(None if left == math.inf else left):
                if key.fileobj is self._listener:
                    self._take(self._listener.accept()[0], lease=False)
                elif key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                else:
                    self._end_lease(key.data)

    def end_orphans(self) -> None:
        """After `serve`: engines of users that were killed end."""
        for user in self._users:
            if not self._stopping:
                end_orphans(user, is_stopped=lambda: self._stopping)

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _take(self, sock: socket.socket, *, lease: bool) -> None:
        sock.setblocking(True)
        self._names += 1
        holder = self._names
        if lease:
            self._begin_lease(holder, sock)
        threading.Thread(target=self._talk, args=(holder, sock), daemon=True).start()

    def _talk(self, holder: int, sock: socket.socket) -> None:
        with sock:
            try:
                while True:
                    message, fds = wire.receive(sock)
                    reply: Reply = ({}, [])
                    try:
                        if message.get("op") == "lease":
                            self._begin_lease(holder, sock)
                        elif message.get("op") != "stop":
                            reply = self._owner.handle(holder, dict(message), fds)
                    finally:
                        wire.close_all(fds)
                    try:
                        wire.send(sock, *reply)
                    finally:
                        wire.close_all(reply[1])
                    if message.get("op") == "stop":
                        self.stop()
            except (EOFError, OSError, ValueError):
                # The client is gone, or speaks nonsense: to the owner it is the same.
                pass
            finally:
                self._owner.forget(holder)
                self._end_lease(holder)

    def _begin_lease(self, holder: int, sock: socket.socket) -> None:
        # The process is watched as well as the connection: a child that it forked may hold the socket, too.
        pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        with self._lock:
            if holder in self._leases:
                return
            self._leases[holder] = pidfd = os.pidfd_open(pid)
            self._users.add(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, data=holder)
        self._nudge()

    def _end_lease(self, holder: int) -> None:
        with self._lock:
            pidfd = self._leases.pop(holder, None)
            if pidfd is not None:
                self._selector.unregister(pidfd)
                os.close(pidfd)
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")


def main(argv: list[str] | None = None) -> int:
    """Serve until the last lease is gone."""
    parser = argparse.ArgumentParser(prog="belayer_rollout.memory.owner", description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True, help="a listening SOCK_SEQPACKET socket")
    parser.add_argument("--lease-fd", type=int, required=True, help="the starter's connection, its lease")
    parser.add_argument("--memory", default="host", help="host, host-unsealed, or cuda:N")
    parser.add_argument("--linger-s", type=float, default=0.0, help="how long to stay without a lease")
    args = parser.parse_args(argv)
    listener = socket.socket(fileno=args.listen_fd)
    starter = socket.socket(fileno=args.lease_fd)
    for sock in (listener, starter):
        sock.set_inheritable(False)
    path = Path(listener.getsockname())
    server = Server(Owner(_memory(args.memory)), listener, linger_s=args.linger_s)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server.serve(starter)
    finally:
        # The socket and its directory are the owner's to remove: its starter may be long gone.
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    server.end_orphans()
    return 0


def _memory(name: str) -> OwnerMemory:
    kind, _, device = name.partition(":")
    if kind == "cuda":
        from belayer_rollout.memory.cuda import CudaMemory

        return CudaMemory(int(device or 0))
    if name not in ("host", "host-unsealed"):
        raise SystemExit(f"no memory of the kind {name!r}: host, host-unsealed, or cuda:N")
    return HostMemory(can_seal=name == "host")


def _read_all(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if size > MOST_LAYOUT_BYTES:
        raise Refused("misuse", f"a layout of {size} bytes")
    return os.pread(fd, size, 0)


def _memfd_of(data: bytes) -> int:
    region = HostRegion("layout", len(data), can_seal=False)
    try:
        fd = region.export(writable=True)
        os.pwrite(fd, data, 0)
        return fd
    finally:
        region.close()


if __name__ == "__main__":
    sys.exit(main())
