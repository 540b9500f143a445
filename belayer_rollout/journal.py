"""The durable token journal: what every request asked and got, kept in one SQLite file (WAL).

The event loop packs tokens into the batch that is open; one writer thread takes all of it, commits it as one
row and tells the loop. There is no timer: while a commit is on its way to the disk, the next batch gathers.
What a batch costs the loop does not grow with the number of requests in it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from belayer_rollout.errors import (
    ClientClosed,
    InvalidRequest,
    JournalFault,
    Misuse,
    UnknownRequest,
)
from belayer_rollout.journal_batch import Batch, Commit, Pending, again, nothing, tell
from belayer_rollout.journal_codec import (
    LogRow,
    Tail,
    TailPart,
    pack_ids,
    pack_logprobs,
    params_text,
    to_bytes,
)
from belayer_rollout.journal_records import JournalledRequest, RequestSummary, SessionSummary
from belayer_rollout.journal_store import JournalStore
from belayer_rollout.types import FinishReason, SamplingParams, TokenChunk

__all__ = ["Durability", "Journal", "JournalledRequest", "RequestSummary", "SessionSummary"]

T = TypeVar("T")
Durability = Literal["strict", "relaxed"]

GATHER_S: Final = 0.02
"""How long tokens are gathered before a commit; beginnings and ends of requests wait for nothing. A commit
takes half a millisecond of processor time with its sync, and an engine that steps every 3 ms on all cores
would pay for each of its steps. In relaxed mode, with a commit of up to 30 ms, that makes the 50 ms it
says."""
LOG_BYTES: Final = 2 * 2**20
"""So much log is written as runs. It bounds what a take-over has to replay (about 0.1 s), and the tails in
memory; a run then has the tokens that its request got in that time."""


class Journal:
    """Keeps requests and tokens, for any number of requests in one event loop.

    What a setting survives:

    - ``durability="strict"``: a token whose future is done survives the end of this process (kill -9) and a
      power cut (each commit is synced to the disk).
    - ``durability="relaxed"``: nobody waits. Tokens are committed and synced within 50 ms where the disk
      needs at most 30 ms for that; those of the last 50 ms may be lost, to a kill as to a power cut.

    In both, `open_request`, `finish`, `cut` and `note_failover` are on disk when they return. Disks that lie
    about a sync can lose more than that.

    Many processes may have one file open. A request belongs to the one that opened or last loaded it, as long
    as that one lives.

    After a fault (disk full, say) every future that was pending has it, and so does every later append:
    nothing is called durable that is not. The requests that ran then go on by `load`, which, like
    `open_request`, first tries to `reopen` the journal; once there is room that succeeds.

    ``max_bytes`` bounds the database file. The oldest sessions of which every request is finished are pruned
    to make room; when there is none, the journal is full. (The ``-wal`` file beside it comes on top, about
    8 MiB.)

    Raises:
        JournalFault: the file cannot be opened.
        JournalDamaged: it is no journal."""

    def __init__(
        self, path: Path | str, *, durability: Durability = "strict", max_bytes: int | None = None
    ) -> None:
        if durability not in ("strict", "relaxed"):
            raise InvalidRequest(f"durability must be 'strict' or 'relaxed', not {durability!r}")
        self.path = Path(path)
        self._strict = durability == "strict"
        self._store = JournalStore(self.path, max_bytes=max_bytes)
        # Guards all below: the loop adds to the batch, the writer takes it.
        self._lock = threading.Lock()
        self._batch: Batch | None = None
        self._tails: dict[str, Tail] = {}
        self._interrupted: set[str] = set()
        self._failure: JournalFault | None = None
        self._closed = False
        self._shut = False
        """Failed or closed."""
        self._log_bytes = 0
        self._batches: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._thread: threading.Thread | None = None

    async def open_request(
        self, request_id: str, session: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Begin a request; durable on return. One of the very same content goes on where it was; a finished
        one stays finished.

        Raises:
            InvalidRequest: the id is taken by a request of other content, or by a live process; or a value
                cannot be journalled.
            JournalFault: it is not in the journal."""
        prompt, text = to_bytes(pack_ids(prompt_token_ids)), params_text(params)
        await self._recover()
        tail = await self._do(lambda store: store.open_request(request_id, session, prompt, text))
        if tail is not None:
            self._adopt(request_id, tail)

    def append(self, request_id: str, start: int, chunk: TokenChunk) -> asyncio.Future[None] | None:
        """Add the chunk's tokens, the first of which is token ``start`` of its request.

        The future is done once they are durable. It is shared by everything in one commit, so cancelling a
        task that waits for it does not cancel it: the task ends with the commit. None in relaxed mode.

        Raises:
            InvalidRequest: they do not follow on what is there, or are no tokens with a logprob each.
            UnknownRequest: it is not open here: open or load it first.
            JournalFault: the journal has failed."""
        ids, logprobs = pack_ids(chunk.token_ids), pack_logprobs(chunk.logprobs)
        if len(ids) != len(logprobs):
            raise InvalidRequest(f"{len(ids)} token ids with {len(logprobs)} logprobs")
        with self._lock:
            tail = self._tails.get(request_id)
            if tail is None or self._shut:
                raise self._not_open(request_id)
            if start != tail.length:
                raise InvalidRequest(f"{request_id!r} has {tail.length} tokens: none can be added at {start}")
            batch = self._batch or self._new_batch()
            if ids:
                worker, version = chunk.worker, chunk.weight_version
                batch.entries.add(tail.request, start, ids, logprobs, worker, version)
                tail.add(start, ids, logprobs, worker, version)
        return batch.commit if self._strict else None

    async def finish(
        self, request_id: str, finish_reason: FinishReason, stop_reason: int | str | None, length: int
    ) -> None:
        """The request has ended with ``length`` tokens (those after are cut); durable on return.

        Raises:
            InvalidRequest: it has fewer.
            UnknownRequest, JournalFault: see `append`."""
        with self._lock:
            tail = self._open_tail(request_id)
            if length > tail.length:
                raise InvalidRequest(f"{request_id!r} has {tail.length} tokens, not {length}")
            tail.cut(length)
            part = tail.take()
            del self._tails[request_id]
            row = tail.request

            def work(store: JournalStore) -> None:
                if part is not None:
                    store.write_parts([part])
                store.finish(row, finish_reason, stop_reason, length)

            pending = self._enqueue(work)
        await pending.wait()

    async def cut(self, request_id: str, length: int) -> None:
        """Void the request's tokens from ``length`` on; durable on return.

        Raises:
            UnknownRequest, JournalFault: see `append`."""
        with self._lock:
            tail = self._open_tail(request_id)
            tail.cut(length)
            pending = self._enqueue(nothing)
            pending.batch.entries.add_cut(tail.request, length)
        await pending.wait()

    async def note_failover(self, request_id: str, worker: str, cause: str) -> None:
        """Record that the request had to leave ``worker``; durable on return.

        Raises:
            UnknownRequest, JournalFault: see `append`."""
        with self._lock:
            row = self._open_tail(request_id).request
            pending = self._enqueue(lambda store: store.note_failover(row, worker, cause))
        await pending.wait()

    async def load(self, request_id: str) -> JournalledRequest:
        """All of a request. An unfinished one then belongs to this journal, and can be appended to; a dead
        process's is taken over.

        Raises:
            UnknownRequest: there is none.
            InvalidRequest: a live process, which the message names, runs it.
            JournalDamaged: its rows are not what was written."""
        await self._recover()
        # First whether there is one: callers ask for ids that are new, and rows for nothing are dear.
        await self._do(lambda store: store.require(request_id))
        tail, found = await self._do(lambda store: store.load(request_id), needs_rows=True)
        if found.finish_reason is None:
            self._adopt(request_id, tail)
        return found

    async def sessions(self) -> list[SessionSummary]:
        """Every session, in the order in which they began."""
        return await self._do(lambda store: store.sessions())

    async def requests(self, session: str | None = None) -> list[RequestSummary]:
        """Every request (of one session), in the order in which they began, with the tokens that are
        durable."""
        return await self._do(lambda store: store.requests(session))

    async def prune(self, session: str) -> int:
        """Remove a session and give its space back to the file system; how many requests it had.

        Raises:
            InvalidRequest: one of them is running, here or in another live process."""
        removed = await self._do(lambda store: store.prune(session))
        await self._do(lambda store: store.shrink(), after=True)
        return removed

    async def reopen(self) -> None:
        """Try a journal that has failed again: a new connection, and a write to the disk. One that has not
        failed stays as it is. Requests that ran at the fault are then loaded to go on.

        Raises:
            JournalFault: it fails still."""
        if self._failure is not None:
            await self._do(lambda store: None, revives=True)

    async def close(self) -> None:
        """Commit what is pending and let go of the requests. Idempotent, never raises; appends that could not
        be committed have their fault in their futures."""
        if self._closed:
            return
        with self._lock:
            self._closed = self._shut = True
            release = None
            if self._thread is not None and self._failure is None:
                release = self._enqueue(lambda store: store.release(), needs_rows=True, last=True)
        try:
            if release is not None:
                with contextlib.suppress(JournalFault):
                    await release.wait()
        finally:
            if self._thread is None:
                self._store.close()
            else:
                self._batches.put(None)
                # It ends at once: the batch before this was its last.
                self._thread.join()

    # Private: on the loop

    async def _recover(self) -> None:
        if self._failure is not None:
            await self.reopen()

    async def _do(
        self,
        work: Callable[[JournalStore], T],
        *,
        needs_rows: bool = False,
        after: bool = False,
        revives: bool = False,
    ) -> T:
        with self._lock:
            if self._failure is not None and not revives:
                raise again(self._failure)
            pending = self._enqueue(work, needs_rows=needs_rows, after=after, revives=revives)
        return await pending.wait()

    def _enqueue(
        self,
        work: Callable[[JournalStore], T],
        *,
        needs_rows: bool = False,
        after: bool = False,
        revives: bool = False,
        last: bool = False,
    ) -> Pending[T]:
        batch = self._batch or self._new_batch(last=last)
        pending = Pending(work, batch)
        (batch.after if after else batch.works).append(pending)
        batch.needs_rows |= needs_rows
        batch.revives |= revives
        self._urgent.set()
        return pending

    def _new_batch(self, *, last: bool = False) -> Batch:
        if self._closed and not last:
            raise ClientClosed(f"the journal {self.path} is closed")
        batch = self._batch = Batch(Commit(loop=asyncio.get_running_loop()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="belayer-journal", daemon=True)
            self._thread.start()
        self._batches.put(None)
        return batch

    def _adopt(self, request_id: str, tail: Tail) -> None:
        with self._lock:
            # One that is open here already goes on with what it has in memory.
            self._tails.setdefault(request_id, tail)
            self._interrupted.discard(request_id)

    def _open_tail(self, request_id: str) -> Tail:
        tail = self._tails.get(request_id)
        if tail is None or self._shut:
            raise self._not_open(request_id)
        return tail

    def _not_open(self, request_id: str) -> Exception:
        if self._closed:
            return ClientClosed(f"the journal {self.path} is closed")
        if self._failure is not None:
            return again(self._failure)
        if request_id in self._interrupted:
            return JournalFault(f"the journal failed while {request_id!r} ran: load it to go on")
        return UnknownRequest(f"request {request_id!r} is not open in this journal: open or load it first")

    # Private: on the writer thread

    def _write(self) -> None:
        try:
            while True:
                self._batches.get()
                self._urgent.wait(GATHER_S)
                with self._lock:
                    batch, self._batch = self._batch, None
                    self._urgent.clear()
                    if batch is None:
                        # Only `close` wakes the writer without a batch.
                        return
                    parts = self._take_parts(batch)
                    failure = None if batch.revives else self._failure
                if failure is None:
                    failure = self._commit(batch, parts)
                tell(batch, failure)
        finally:
            self._store.close()

    def _take_parts(self, batch: Batch) -> list[TailPart] | None:
        """The tails of all requests, when it is time to write them as runs. Under the lock, in one go with
        the batch: they are then what the log, with this batch, says."""
        if not batch.needs_rows and self._log_bytes < LOG_BYTES:
            return None
        return [part for tail in self._tails.values() if (part := tail.take())]

    def _commit(self, batch: Batch, parts: list[TailPart] | None) -> JournalFault | None:
        entries = batch.entries.row()
        try:
            if batch.revives:
                self._store.reopen()
                with self._lock:
                    self._failure, self._shut, self._log_bytes = None, self._closed, 0
            if batch.works or parts is not None:
                self._store.run(lambda: self._apply(batch, parts, entries))
            elif entries is not None:
                self._store.append_log(entries)
            for pending in batch.after:
                pending.apply(self._store, (Misuse, JournalFault))
        except JournalFault as exc:
            self._fail(exc)
            return exc
        except Exception as exc:  # noqa: BLE001 - a fault of ours must not leave the futures open for ever
            fault = JournalFault(f"{self.path}: {type(exc).__name__}: {exc}")
            fault.__cause__ = exc
            self._fail(fault)
            return fault
        if parts is not None:
            self._log_bytes = 0
        elif entries is not None:
            self._log_bytes += entries.num_bytes
        return None

    def _apply(self, batch: Batch, parts: list[TailPart] | None, entries: LogRow | None) -> None:
        store = self._store
        if parts is not None:
            # In this order, the runs can have the pages of the log.
            store.clear_log()
            store.write_parts(parts)
        elif entries is not None:
            store.append_log(entries)
        for pending in batch.works:
            pending.apply(store)

    def _fail(self, fault: JournalFault) -> None:
        with self._lock:
            self._failure, self._shut = fault, True
            self._interrupted.update(self._tails)
            self._tails.clear()
