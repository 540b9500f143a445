"""The journal's file as such: opening it, transactions, its bound, and what its errors mean.

SQLite in WAL mode with synchronous=FULL: a commit is synced to the disk before it is one."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from belayer_rollout.errors import JournalDamaged, JournalFault, JournalFull

__all__ = ["JournalFile", "damage"]

T = TypeVar("T")

APPLICATION_ID = 0x42454C4A
"""'BELJ': tells a journal from another program's database."""
SCHEMA_VERSION = 1
BUSY_S = 30.0
"""How long another process may hold the write lock. A commit takes milliseconds; a vacuum of gigabytes
longer."""
KEEP_WAL_BYTES = 8 * 2**20
"""A longer WAL is cut back at the next checkpoint."""
ROOM = 0.9
"""A full journal is pruned down to this part of its bound, so that not every commit prunes."""
FULL_BYTES = 64 * 1024
"""A disk with less room is full, whatever else SQLite calls its error: it grows files by so much at once."""


class JournalFile:
    """One connection to a SQLite file with the tables of ``schema``. To be used by one thread at a time.

    Raises:
        JournalFault: it cannot be opened.
        JournalDamaged: it is not a journal."""

    def __init__(self, path: Path, schema: str, *, max_bytes: int | None = None) -> None:
        self.path = path
        self._schema = schema
        self._max_bytes = max_bytes
        self._db = self._connect()

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._db.in_transaction

    def execute(self, statement: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        """One statement; inside `run`, or by itself. Its errors are SQLite's: see `translated`."""
        return self._db.execute(statement, values)

    def rows(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        """All rows of a query."""
        return self._db.execute(statement, values).fetchall()

    def run(self, work: Callable[[], T], make_room: Callable[[Callable[[], bool]], bool]) -> T:
        """Do ``work`` in one transaction that is on disk when this returns. When the file has reached its
        bound, ``make_room(is_enough)`` is to delete something, and more until ``is_enough()``; then work is
        done anew.

        Raises:
            JournalFault: nothing of it is in the file. JournalFull: nothing was left to delete, or it is the
                disk that is full."""
        while True:
            try:
                with self.translated():
                    return self._transact(work)
            except JournalFull:
                with self.translated():
                    if not self._is_at_bound() or not self._transact(lambda: make_room(self._has_room)):
                        raise

    def shrink(self) -> None:
        """Give free pages back to the file system."""
        with self.translated():
            # It gives a row without a column for each page; `execute` would stop at the first.
            self._db.executescript("PRAGMA incremental_vacuum")
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def reconnect(self) -> None:
        """Close the connection, whatever state it is in, and make another."""
        self._db.close()
        self._db = self._connect()

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """SQLite's errors and the system's as ours."""
        try:
            yield
        except sqlite3.Error as exc:
            raise self._fault(exc) from exc
        except OSError as exc:
            raise JournalFault(f"{self.path}: {exc}") from exc

    def _connect(self) -> sqlite3.Connection:
        with self.translated():
            # isolation_level None: transactions are begun here, not guessed by the sqlite3 module.
            db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._set_up(db)
            except BaseException:
                db.close()
                raise
            return db

    def _set_up(self, db: sqlite3.Connection) -> None:
        # Takes effect before the first table only.
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        # SQLite does not wait for other processes when the mode changes: two may make the file at once.
        for attempt in Retrying(
            retry=retry_if_exception(_is_busy),
            stop=stop_after_delay(BUSY_S),
            wait=wait_random(0.001, 0.05),
            reraise=True,
        ):
            with attempt:
                db.execute("PRAGMA journal_mode = WAL")
        # Not NORMAL, in relaxed mode either: it would lose more than 50 ms to a power cut.
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {KEEP_WAL_BYTES}")
        db.execute("BEGIN IMMEDIATE")
        try:
            self._check_schema(db)
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        if self._max_bytes is not None:
            (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
            db.execute(f"PRAGMA max_page_count = {max(self._max_bytes // page_bytes, 1)}")

    def _check_schema(self, db: sqlite3.Connection) -> None:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables:
            for statement in self._schema.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            raise JournalDamaged(
                f"{self.path} is no journal of this version of Belayer (application id {application:#x}, "
                f"schema {version}): name another file for the journal"
            )

    def _transact(self, work: Callable[[], T]) -> T:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            result = work()
            self._db.execute("COMMIT")
        except BaseException:
            # SQLite may have rolled back by itself.
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise
        return result

    def _fault(self, exc: sqlite3.Error) -> JournalFault:
        primary = _primary_code(exc)
        if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and self._is_disk_full()):
            return JournalFull(
                f"no room for the journal {self.path}: free some disk, raise max_bytes, or prune sessions; "
                "then resume the requests"
            )
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return damage(self.path, str(exc))
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return JournalFault(f"{self.path}: another process kept it locked for {BUSY_S:.0f} s")
        return JournalFault(f"{self.path}: {exc}")

    def _is_disk_full(self) -> bool:
        try:
            found = os.statvfs(self.path.parent)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < FULL_BYTES

    def _is_at_bound(self) -> bool:
        # Otherwise it is the disk that is full, and pruning is the user's decision.
        return self._max_bytes is not None and not self._is_disk_full()

    def _has_room(self) -> bool:
        (pages,), (free,), (page_bytes,) = (
            self._db.execute(f"PRAGMA {name}").fetchone()
            for name in ("page_count", "freelist_count", "page_size")
        )
        return cast(bool, (pages - free) * page_bytes < cast(int, self._max_bytes) * ROOM)


def damage(path: Path, what: str) -> JournalDamaged:
    """What to raise when the file is not what was written."""
    return JournalDamaged(
        f"the journal {path} is damaged: {what}. Keep a copy; `sqlite3 {path} .recover | sqlite3 NEW` saves "
        "what can be read, or name another file for the journal and begin its unfinished requests anew"
    )


def _primary_code(exc: BaseException) -> int:
    return int(getattr(exc, "sqlite_errorcode", 0) or 0) & 0xFF


def _is_busy(exc: BaseException) -> bool:
    return _primary_code(exc) in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )
