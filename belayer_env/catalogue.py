"""The catalogue's SQLite connection: opened, guarded, kept out of forks, its errors turned into faults."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from belayer_env.errors import InvalidInput, RuntimeFailed, SetupError, StoreFull

__all__ = ["Catalogue"]

BUSY_TIMEOUT_S = 30.0
"""How long a transaction waits for those of other processes, which take milliseconds each."""

SCHEMA_VERSION = 2

SCHEMA = """
CREATE TABLE episodes (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, task_digest TEXT NOT NULL, runtime TEXT NOT NULL,
    policy TEXT NOT NULL, tier TEXT NOT NULL, state TEXT NOT NULL, owner TEXT NOT NULL,
    created_at REAL NOT NULL, head INTEGER);
-- Steps form a tree: an episode's ledger is the way from its head back to the root. Cutting moves the head.
CREATE TABLE steps (
    id INTEGER PRIMARY KEY, episode_id TEXT NOT NULL, parent INTEGER, number INTEGER NOT NULL,
    data TEXT NOT NULL);
CREATE INDEX steps_by_episode ON steps (episode_id);
-- head: the step whose state it holds. owner: who publishes it. directory: of the checkpoint whose files
-- these are (a forked episode shares them). covers, covers_head: a later step that changed nothing, or NULL.
CREATE TABLE checkpoints (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, episode_id TEXT NOT NULL,
    task_digest TEXT NOT NULL, step INTEGER NOT NULL, tier TEXT NOT NULL, size_bytes INTEGER NOT NULL,
    manifest_digest TEXT NOT NULL, state TEXT NOT NULL, pinned INTEGER NOT NULL, head INTEGER,
    owner TEXT NOT NULL, directory TEXT NOT NULL, covers INTEGER, covers_head INTEGER);
CREATE INDEX checkpoints_by_episode ON checkpoints (episode_id);
-- What one episode learnt and others start from, as JSON.
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Catalogue:
    """One SQLite file, one connection, used by any number of threads and processes.

    The connection is closed before a fork and opened again by whoever needs it: SQLite's own state must not
    cross a fork, not even to be closed (https://www.sqlite.org/howtocorrupt.html, 2.6)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        _FORK_GUARD.protect(self)
        with self.transaction():
            pass  # so that a file that cannot be used is found now

    @contextlib.contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction that sees no other's half: done for every process when the block ends, undone when it
        raises. The death of this process, however, takes nothing back; a power cut may take the newest ones,
        always from the end.
        One that does not ``write`` waits for no other process.

        Raises:
            StoreFull: no room.
            RuntimeFailed: SQLite cannot work with the file."""
        with self._lock, self._errors():
            if self._is_closed:
                raise InvalidInput(f"the store of {self._path} is closed")
            if self._connection is None:
                self._connection = self._open()
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # A full disk may have ended the transaction already.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close for good. Idempotent, never raises."""
        with self._lock:
            self._is_closed = True
            self.disconnect()

    def disconnect(self) -> None:
        """Close the connection; the next transaction opens another. Never raises."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def hold(self) -> None:
        """Keep every other thread out until `release`, and the connection closed."""
        self._lock.acquire()
        self.disconnect()

    def release(self) -> None:
        """End a `hold`."""
        self._lock.release()

    def _open(self) -> sqlite3.Connection:
        # Under a lock of our own: switching to WAL and making the tables are no matter for two at once.
        with (self._path.parent / "catalogue.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                # No fsync a commit (2/3 of a step's time): what needs to outlive a power cut, a checkpoint's
                # files, is synced before its row, and a ledger that is shorter by its end is a true prefix.
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.row_factory = sqlite3.Row
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    connection.executescript(
                        f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                    )
                elif version != SCHEMA_VERSION:
                    raise SetupError(
                        f"{self._path} is of version {version}, and this Belayer knows {SCHEMA_VERSION}: "
                        "use the Belayer that made it, or another store"
                    )
            except BaseException:
                connection.close()
                raise
        return connection

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0)
            # Some of SQLite's helper files fail as an I/O error when the disk is full.
            if code & 0xFF == sqlite3.SQLITE_FULL or (
                code & 0xFF == sqlite3.SQLITE_IOERR and _free_bytes(self._path.parent) < 1 << 20
            ):
                raise StoreFull(f"{self._path}: {error}") from error
            raise RuntimeFailed(f"{self._path}: {error}") from error


class _ForkGuard:
    """Closes every catalogue before a fork, as threads other than the forking one are then kept out."""

    def __init__(self) -> None:
        self._catalogues: weakref.WeakSet[Catalogue] = weakref.WeakSet()
        self._held: list[Catalogue] = []
        self._is_registered = False
        self._lock = threading.Lock()

    def protect(self, catalogue: Catalogue) -> None:
        with self._lock:
            self._catalogues.add(catalogue)
            if not self._is_registered:
                self._is_registered = True
                os.register_at_fork(
                    before=self._before, after_in_parent=self._after, after_in_child=self._after
                )

    def _before(self) -> None:
        self._lock.acquire()
        self._held = list(self._catalogues)
        for catalogue in self._held:
            catalogue.hold()

    def _after(self) -> None:
        for catalogue in self._held:
            catalogue.release()
        self._held = []
        self._lock.release()


_FORK_GUARD = _ForkGuard()


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
