"""One commit of the journal: what it takes, who waits for it, and how they are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from belayer_rollout.errors import JournalDamaged, JournalFault, Misuse
from belayer_rollout.journal_codec import LogEntries
from belayer_rollout.journal_store import JournalStore

__all__ = ["Batch", "Commit", "Pending", "again", "nothing", "tell"]

T = TypeVar("T")


class Commit(asyncio.Future[None]):
    """Done when a batch is on disk."""

    def cancel(self, msg: Any = None) -> bool:
        """Never: hundreds of tasks wait for the same commit, and a task that is cancelled cancels what it
        waits for. It ends when the commit does."""
        return False


class Batch:
    """What one commit takes."""

    __slots__ = ("after", "commit", "entries", "needs_rows", "revives", "works")

    def __init__(self, commit: Commit) -> None:
        self.commit = commit
        self.entries = LogEntries()
        self.works: list[Pending[Any]] = []
        self.after: list[Pending[Any]] = []
        """What is done after the commit, outside of its transaction."""
        self.needs_rows = False
        self.revives = False


class Pending(Generic[T]):
    """One piece of work in a batch, and what came of it."""

    __slots__ = ("batch", "error", "result", "work")

    def __init__(self, work: Callable[[JournalStore], T], batch: Batch) -> None:
        self.work = work
        self.batch = batch
        self.error: Exception | None = None

    def apply(
        self, store: JournalStore, kept: tuple[type[Exception], ...] = (Misuse, JournalDamaged)
    ) -> None:
        """Do it. What concerns this piece alone is kept for its caller: the others of the batch go on."""
        try:
            self.error = None
            self.result = self.work(store)
        except kept as exc:
            self.error = exc

    async def wait(self) -> T:
        """What came of it, once it is durable."""
        await self.batch.commit
        if self.error is not None:
            raise self.error
        return self.result


def nothing(_: JournalStore) -> None:
    """The work of a cut, which is an entry of the log."""


def tell(batch: Batch, failure: JournalFault | None) -> None:
    """Settle the batch's future in its loop; to be called from any thread."""
    # The loop may be closed, with nobody left to tell.
    with contextlib.suppress(RuntimeError):
        batch.commit.get_loop().call_soon_threadsafe(_settle, batch.commit, failure)


def _settle(commit: Commit, failure: JournalFault | None) -> None:
    if failure is None:
        commit.set_result(None)
    else:
        commit.set_exception(again(failure))
        # Asked for, so that a batch whose callers are all gone makes no noise.
        commit.exception()


def again(failure: JournalFault) -> JournalFault:
    """The same fault to raise once more: an exception of its own, with a traceback of its own."""
    fresh = type(failure)(str(failure))
    fresh.__cause__ = failure
    return fresh
