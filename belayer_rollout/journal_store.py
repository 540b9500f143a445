"""The journal's tables, and what one thread does to them.

    requests    one row each: how it ended, which writer runs it
    contents    prompt and parameters of each; apart, as SQLite writes a row anew when one column changes
    tokens      runs of tokens (see `journal_codec`), by request and index of their first
    log         what was committed since its writer last wrote runs: all requests of a commit in one row
    failovers   what each request survived
    writers     the journals that are open on the file, one row each

A request's tokens are its runs, and after them what the log of its writer adds. Order is that of row ids: no
wall clock is read or written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

from belayer_rollout.errors import InvalidRequest, JournalFull, UnknownRequest
from belayer_rollout.journal_codec import (
    ID_BYTES,
    LOGPROB_BYTES,
    LogRow,
    Run,
    Tail,
    TailPart,
    checksum,
    params_from_text,
    replay,
    to_bytes,
    unpack_ids,
    unpack_logprobs,
)
from belayer_rollout.journal_file import JournalFile, damage
from belayer_rollout.journal_owner import OwnerLock, is_alive, process_mark
from belayer_rollout.journal_records import JournalledRequest, RequestSummary, SessionSummary
from belayer_rollout.types import FinishReason

__all__ = ["JournalStore"]

T = TypeVar("T")

SCHEMA = """
CREATE TABLE writers (id INTEGER PRIMARY KEY AUTOINCREMENT, pid INTEGER NOT NULL, mark TEXT NOT NULL);
CREATE TABLE requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, session TEXT NOT NULL,
    owner INTEGER, finish_reason TEXT, stop_reason, length INTEGER);
CREATE TABLE contents (
    request INTEGER PRIMARY KEY, crc INTEGER NOT NULL, params TEXT NOT NULL, prompt BLOB NOT NULL);
CREATE INDEX requests_by_session ON requests (session);
CREATE TABLE tokens (
    request INTEGER NOT NULL, start INTEGER NOT NULL, worker TEXT NOT NULL, version INTEGER NOT NULL,
    crc INTEGER NOT NULL, ids BLOB NOT NULL, logprobs BLOB NOT NULL, PRIMARY KEY (request, start)
) WITHOUT ROWID;
CREATE TABLE log (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, writer INTEGER NOT NULL, sources TEXT NOT NULL,
    crc INTEGER NOT NULL, heads BLOB NOT NULL, ids BLOB NOT NULL, logprobs BLOB NOT NULL);
CREATE TABLE failovers (
    id INTEGER PRIMARY KEY, request INTEGER NOT NULL, worker TEXT NOT NULL, cause TEXT NOT NULL);
CREATE INDEX failovers_by_request ON failovers (request);
"""

# One statement for any number of runs, and so one release of the interpreter's lock: a statement for each row
# would have to win it back from a busy event loop a thousand times, up to 5 ms each.
INSERT_RUNS = f"""
INSERT OR REPLACE INTO tokens (request, start, worker, version, crc, ids, logprobs)
SELECT value->>0, value->>1, value->>2, value->>3, value->>4,
    substr(?2, 1 + {ID_BYTES} * (value->>5), {ID_BYTES} * (value->>6)),
    substr(?3, 1 + {LOGPROB_BYTES} * (value->>5), {LOGPROB_BYTES} * (value->>6))
FROM json_each(?1)
"""
INSERT_LOG = "INSERT INTO log (writer, sources, heads, ids, logprobs, crc) VALUES (?, ?, ?, ?, ?, ?)"
WHOLE = "requests JOIN contents ON contents.request = requests.id"


class JournalStore:
    """One connection to a journal's file. To be used by one thread at a time.

    Raises:
        JournalFault: the file cannot be opened; `JournalDamaged`: it is not a journal."""

    def __init__(self, path: Path, *, max_bytes: int | None = None) -> None:
        self.path = path
        self._writer: int | None = None
        self._lock: OwnerLock | None = None
        self._db = JournalFile(path, SCHEMA, max_bytes=max_bytes)

    def run(self, work: Callable[[], T]) -> T:
        """Do ``work`` in one transaction that is on disk when this returns. It may be done twice: again,
        after old sessions were pruned to make room.

        Raises:
            JournalFault: nothing of it is in the file."""
        known = self._writer
        try:
            return self._db.run(work, self._prune_oldest)
        except BaseException:
            if known is None:
                # The row of this writer was rolled back with the rest.
                self._unlock()
            raise

    def append_log(self, row: LogRow) -> None:
        """Add to this writer's log. By itself it is a transaction of its own, in one call into SQLite."""
        if self._db.in_transaction:
            self._db.execute(INSERT_LOG, (self.writer, *row))
            return
        if self._writer is not None:
            with contextlib.suppress(JournalFull), self._db.translated():
                self._db.execute(INSERT_LOG, (self._writer, *row))
                return
        # `run` prunes where there is something to prune.
        self.run(lambda: self._db.execute(INSERT_LOG, (self.writer, *row)))

    @property
    def writer(self) -> int:
        """The row id of this connection among the writers; made at its first write."""
        if self._writer is None:
            mark = process_mark(os.getpid())
            insert = "INSERT INTO writers (pid, mark) VALUES (?, ?) RETURNING id"
            ((self._writer,),) = self._db.execute(insert, (os.getpid(), mark)).fetchall()
            self._lock = OwnerLock(self._lock_path(self._writer))
        return self._writer

    # Requests

    def open_request(self, request_id: str, session: str, prompt: bytes, params: str) -> Tail | None:
        """Begin a request, or take up one of the very same content. Its tail says how long it is; None: it is
        finished.

        Raises:
            InvalidRequest: the id is taken by another request, or a live process runs it."""
        select = f"SELECT id, finish_reason, session, prompt, params FROM {WHOLE} WHERE request_id = ?"
        known = self._db.execute(select, (request_id,)).fetchone()
        if known is None:
            insert = "INSERT INTO requests (request_id, session, owner) VALUES (?, ?, ?)"
            row = cast(int, self._db.execute(insert, (request_id, session, self.writer)).lastrowid)
            insert = "INSERT INTO contents (request, crc, params, prompt) VALUES (?, ?, ?, ?)"
            self._db.execute(insert, (row, checksum(params.encode(), prompt), params, prompt))
            return Tail(row, 0)
        row, finish_reason, *content = known
        if content != [session, prompt, params]:
            raise InvalidRequest(f"request id {request_id!r} is taken: by a request with other content")
        if finish_reason is not None:
            return None
        self._claim(row, request_id)
        return Tail(row, self._length(row))

    def require(self, request_id: str) -> None:
        """Nothing, for a request that there is.

        Raises:
            UnknownRequest: there is none."""
        if not self._db.rows("SELECT 1 FROM requests WHERE request_id = ?", (request_id,)):
            raise UnknownRequest(f"the journal {self.path} has no request {request_id!r}")

    def load(self, request_id: str) -> tuple[Tail, JournalledRequest]:
        """All of a request; an unfinished one is from now on this writer's. The writer's own log must be
        empty.

        Raises:
            UnknownRequest: there is none.
            InvalidRequest: a live process runs it.
            JournalDamaged: its rows are not what was written."""
        columns = "id, session, crc, prompt, params, finish_reason, stop_reason, length"
        found = self._db.execute(
            f"SELECT {columns} FROM {WHOLE} WHERE request_id = ?", (request_id,)
        ).fetchone()
        if found is None:
            raise UnknownRequest(f"the journal {self.path} has no request {request_id!r}")
        row, session, crc, prompt, params, finish_reason, stop_reason, length = found
        if checksum(params.encode(), prompt) != crc:
            raise damage(self.path, f"the prompt of request {request_id!r} does not have its checksum")
        if finish_reason is None:
            self._claim(row, request_id)
        runs = self._runs(row)
        end = 0
        for run in runs:
            if run.start != end:
                raise damage(self.path, f"request {request_id!r} has no tokens {end} to {run.start}")
            end = run.stop
        if length is not None and length != end:
            raise damage(self.path, f"request {request_id!r} has {end} of its {length} tokens")
        (failovers,) = self._db.execute("SELECT count(*) FROM failovers WHERE request = ?", (row,)).fetchone()
        return Tail(row, end), JournalledRequest(
            request_id=request_id,
            session=session,
            prompt_token_ids=tuple(unpack_ids(prompt)),
            params=params_from_text(params),
            chunks=tuple((run.start, run.chunk()) for run in runs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            failovers=failovers,
        )

    def finish(
        self, row: int, finish_reason: FinishReason, stop_reason: int | str | None, length: int
    ) -> None:
        """Close a request whose tokens are all in runs."""
        self._db.execute(
            "UPDATE requests SET finish_reason = ?, stop_reason = ?, length = ?, owner = NULL WHERE id = ?",
            (finish_reason, stop_reason, length, row),
        )

    def note_failover(self, row: int, worker: str, cause: str) -> None:
        """Record that a request had to leave a worker."""
        self._db.execute(
            "INSERT INTO failovers (request, worker, cause) VALUES (?, ?, ?)", (row, worker, cause)
        )

    def write_parts(self, parts: Sequence[TailPart]) -> None:
        """Write tails as runs."""
        index: list[tuple[int, int, str, int, int, int, int]] = []
        ids, logprobs, first = [], [], 0
        for request, cut, runs in parts:
            if cut is not None:
                self._cut_rows(request, cut)
            for run in runs:
                packed = to_bytes(run.ids), to_bytes(run.logprobs)
                crc, count = checksum(*packed), len(run.ids)
                index.append((request, run.start, run.worker, run.weight_version, crc, first, count))
                ids.append(packed[0])
                logprobs.append(packed[1])
                first += count
        if index:
            self._db.execute(INSERT_RUNS, (json.dumps(index), b"".join(ids), b"".join(logprobs)))

    def clear_log(self) -> None:
        """Forget this writer's log, once its runs are written."""
        self._db.execute("DELETE FROM log WHERE writer = ?", (self.writer,))

    # Upkeep

    def prune(self, session: str) -> int:
        """Remove a session; how many requests it had.

        Raises:
            InvalidRequest: one of them is running in a live process."""
        rows = self._db.rows("SELECT id, request_id, owner FROM requests WHERE session = ?", (session,))
        for _, request_id, owner in rows:
            if (pid := self._live_pid(owner)) is not None:
                raise InvalidRequest(
                    f"session {session!r} is not pruned: process {pid} runs {request_id!r} of it"
                )
        self._delete_requests([row for row, _, _ in rows])
        return len(rows)

    def shrink(self) -> None:
        """Give free pages back to the file system."""
        self._db.shrink()

    def requests(self, session: str | None) -> list[RequestSummary]:
        """Every request, or those of one session, in the order in which they began."""
        select = """
            SELECT r.id, request_id, session, length(c.prompt), owner, finish_reason,
                (SELECT count(*) FROM failovers f WHERE f.request = r.id),
                (SELECT coalesce(sum(length(ids)), 0) FROM tokens t WHERE t.request = r.id)
            FROM requests r JOIN contents c ON c.request = r.id
            WHERE ?1 IS NULL OR session = ?1 ORDER BY r.id"""
        rows = self._db.rows(select, (session,))
        lengths = {row[0]: row[7] // ID_BYTES for row in rows}
        unfinished = {row[0] for row in rows if row[5] is None}
        self._replay_logs({row: Tail(row, lengths[row]) for row in unfinished}, lengths)
        pids = {owner: self._live_pid(owner) for owner in {row[4] for row in rows}}
        return [
            RequestSummary(
                request_id=request_id,
                session=of,
                prompt_tokens=prompt_bytes // ID_BYTES,
                tokens=lengths[row],
                finish_reason=finish_reason,
                failovers=failovers,
                owner_pid=pids[owner],
            )
            for row, request_id, of, prompt_bytes, owner, finish_reason, failovers, _ in rows
        ]

    def sessions(self) -> list[SessionSummary]:
        """Every session, in the order in which they began."""
        of: dict[str, list[RequestSummary]] = {}
        for request in self.requests(None):
            of.setdefault(request.session, []).append(request)
        return [
            SessionSummary(
                session=session,
                requests=len(requests),
                unfinished=sum(request.finish_reason is None for request in requests),
                tokens=sum(request.tokens for request in requests),
            )
            for session, requests in of.items()
        ]

    def release(self) -> None:
        """Let go of every request of this writer, whose log must be empty."""
        if self._writer is not None:
            self._forget_writer(self._writer)

    def reopen(self) -> None:
        """A new connection and a new writer; what the old one had committed is kept as runs. It writes, and
        so proves that writing works again.

        Raises:
            JournalFault: it does not."""
        old, self._writer = self._writer, None
        try:
            self._db.reconnect()
            self.run(lambda: self.absorb(old))
        except BaseException:
            self._unlock()
            self._writer = old
            raise

    def absorb(self, writer: int | None) -> None:
        """Turn the log of a writer that is no more into runs."""
        if writer is not None:
            select = "SELECT id FROM requests WHERE owner = ? AND finish_reason IS NULL"
            rows = [row for (row,) in self._db.rows(select, (writer,))]
            tails = {row: Tail(row, self._length(row)) for row in rows}
            replay(self._log_rows(writer), tails)
            self.write_parts([part for tail in tails.values() if (part := tail.take())])
            self._forget_writer(writer)
        elif self._writer is None:
            _ = self.writer

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._unlock()
        self._db.close()

    # Private

    def _prune_oldest(self, is_enough: Callable[[], bool]) -> bool:
        """Delete the oldest sessions of which every request is finished. False: there is none."""
        select = """
            SELECT session FROM requests GROUP BY session
            HAVING count(*) = count(finish_reason) ORDER BY min(id)"""
        pruned = False
        for (session,) in self._db.rows(select):
            rows = self._db.rows("SELECT id FROM requests WHERE session = ?", (session,))
            self._delete_requests([row for (row,) in rows])
            pruned = True
            if is_enough():
                break
        return pruned

    def _delete_requests(self, rows: list[int]) -> None:
        chosen = json.dumps(rows)
        for table, column in (
            ("tokens", "request"),
            ("failovers", "request"),
            ("contents", "request"),
            ("requests", "id"),
        ):
            self._db.execute(
                f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (chosen,)
            )

    def _claim(self, row: int, request_id: str) -> None:
        (owner,) = self._db.execute("SELECT owner FROM requests WHERE id = ?", (row,)).fetchone()
        if owner is not None and owner != self._writer:
            if (pid := self._live_pid(owner)) is not None:
                raise InvalidRequest(
                    f"request {request_id!r} is running in process {pid}, which is alive: it can be resumed "
                    "elsewhere once that process has ended or closed its journal"
                )
            self.absorb(owner)
        self._db.execute(
            "UPDATE requests SET owner = ? WHERE id = ? AND finish_reason IS NULL", (self.writer, row)
        )

    def _live_pid(self, owner: int | None) -> int | None:
        found = self._db.execute("SELECT pid, mark FROM writers WHERE id = ?", (owner,)).fetchone()
        if found is None:
            return None
        pid, mark = found
        return pid if is_alive(pid, mark, self._lock_path(cast(int, owner))) else None

    def _forget_writer(self, writer: int) -> None:
        self._db.execute("UPDATE requests SET owner = NULL WHERE owner = ?", (writer,))
        self._db.execute("DELETE FROM log WHERE writer = ?", (writer,))
        self._db.execute("DELETE FROM writers WHERE id = ?", (writer,))
        with contextlib.suppress(OSError):
            self._lock_path(writer).unlink()

    def _replay_logs(self, tails: dict[int, Tail], lengths: dict[int, int]) -> None:
        for (writer,) in self._db.rows("SELECT DISTINCT writer FROM log"):
            owned = self._db.rows("SELECT id FROM requests WHERE owner = ?", (writer,))
            own = {row: tails[row] for (row,) in owned if row in tails}
            replay(self._log_rows(writer), own)
            lengths.update({row: tail.length for row, tail in own.items()})

    def _log_rows(self, writer: int) -> list[LogRow]:
        select = "SELECT sources, heads, ids, logprobs, crc FROM log WHERE writer = ? ORDER BY seq"
        return [LogRow(*row) for row in self._db.rows(select, (writer,))]

    def _length(self, row: int) -> int:
        select = "SELECT start, length(ids) FROM tokens WHERE request = ? ORDER BY start DESC LIMIT 1"
        last = self._db.execute(select, (row,)).fetchone()
        return 0 if last is None else last[0] + last[1] // ID_BYTES

    def _runs(self, row: int) -> list[Run]:
        select = (
            "SELECT start, worker, version, crc, ids, logprobs FROM tokens WHERE request = ? ORDER BY start"
        )
        runs: list[Run] = []
        for start, worker, version, crc, ids, logprobs in self._db.rows(select, (row,)):
            if checksum(ids, logprobs) != crc or len(ids) * LOGPROB_BYTES != len(logprobs) * ID_BYTES:
                raise damage(self.path, f"tokens from {start} on of row {row} do not have their checksum")
            last = runs[-1] if runs else None
            if last and (last.stop, last.worker, last.weight_version) == (start, worker, version):
                last.ids.extend(unpack_ids(ids))
                last.logprobs.extend(unpack_logprobs(logprobs))
            else:
                runs.append(Run(start, worker, version, unpack_ids(ids), unpack_logprobs(logprobs)))
        return runs

    def _cut_rows(self, row: int, length: int) -> None:
        self._db.execute("DELETE FROM tokens WHERE request = ? AND start >= ?", (row, length))
        runs = self._runs(row)
        if runs and runs[-1].stop > length:
            # `_runs` joins neighbours: the whole of the last one is written anew, as one row.
            last = runs[-1]
            del last.ids[length - last.start :]
            del last.logprobs[length - last.start :]
            self._db.execute("DELETE FROM tokens WHERE request = ? AND start >= ?", (row, last.start))
            self.write_parts([TailPart(row, None, [last])])

    def _lock_path(self, writer: int) -> Path:
        return self.path.with_name(f"{self.path.name}-owner-{writer}")

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock, self._writer = None, None
