"""The books of one actor's samples, on disk: written turn by turn, read by the actor that is started in a
dead one's place, and removed some time after their call was answered. Seconds."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
from belayer_integrations.openrlhf.book import Past, read_records, seed_record
from belayer_integrations.openrlhf.calls import Call

from belayer_env.errors import BelayerError

__all__ = ["Book", "Books", "no_book"]

KEEP_ANSWERED_S = 120.0
"""An answered call's books stay so long: the actor may die while its answer is on its way."""

KEEP_UNANSWERED_S = 7 * 86400.0
"""Those of calls that never were, of trainings that were given up."""

TIDY_EVERY_S = 30.0
"""A batch has a thousand calls, and each of them would look at the books of all."""

SEED_BITS = 31
_ANSWERED = "answered"

log = logging.getLogger(__name__)


class Book:
    """One sample's. What it cannot write (a full disk) it tells the log, and is then no book any more: the
    sample goes on, and is begun afresh after a death."""

    def __init__(self, path: Path | None, past: Past) -> None:
        self.past = past
        """What had happened when it was opened."""
        self._path = path

    @property
    def is_kept(self) -> bool:
        """Whether anything is written down."""
        return self._path is not None

    async def write(self, record: Mapping[str, Any]) -> None:
        """When this returns the record outlives this process, and its machine's power."""
        if self._path is not None:
            await anyio.to_thread.run_sync(self._append, record)

    def _append(self, record: Mapping[str, Any]) -> None:
        path = self._path
        if path is None:
            return
        try:
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._path = None
            log.warning("a sample's book ends here, as it cannot be written: %s", error)
            with contextlib.suppress(OSError):
                path.unlink()  # one with a gap would tell another story


def no_book(seed: int | None) -> Book:
    """For a sample that nobody would come back to."""
    return Book(None, Past(seed=seed))


class Books:
    """Those of one rollout actor, below ``root``, a directory that its successor on this node has too. It is
    asked for when there is a book to open: its disk may have to be mounted first."""

    def __init__(self, root: Callable[[], Path]) -> None:
        self._find_root = root
        self._tidied_at = 0.0

    async def open(self, call: Call, member: int, seed: int | None) -> Book:
        """The book of one sample of a call, which has a seed in its ``past``: the given one, or else one that
        is drawn now and stays. A book that cannot be read is begun anew."""
        return await anyio.to_thread.run_sync(self._open, call, member, seed)

    async def close(self, call: Call) -> None:
        """The call is about to be answered; what of others is no longer wanted goes."""
        await anyio.to_thread.run_sync(self._close, call)

    @functools.cached_property
    def _root(self) -> Path:
        return self._find_root()

    def _open(self, call: Call, member: int, seed: int | None) -> Book:
        try:
            path = self._root / call.actor / call.task / f"{member}.jsonl"
            self._tidy()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            past = _read(path)
        except (OSError, BelayerError) as error:
            log.warning("a sample has no book: %s", error)
            return no_book(seed)
        book = Book(path, past)
        if past.seed is None:
            past.seed = seed if seed is not None else random.SystemRandom().getrandbits(SEED_BITS)
            book._append(seed_record(past.seed))
        return book

    def _close(self, call: Call) -> None:
        with contextlib.suppress(OSError, BelayerError):
            (self._root / call.actor / call.task / _ANSWERED).touch()
        with contextlib.suppress(OSError, BelayerError):
            self._tidy()

    def _tidy(self) -> None:
        now = time.time()
        if now - self._tidied_at < TIDY_EVERY_S:
            return
        self._tidied_at = now
        for folder in self._root.glob("*/*/"):
            with contextlib.suppress(OSError):
                answered = folder / _ANSWERED
                if is_stale(
                    now,
                    answered_at=_mtime(answered),
                    touched_at=max(map(_mtime, folder.iterdir()), default=0),
                ):
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.parent.rmdir()  # with its last call; else it is not empty, and stays


def is_stale(now: float, *, answered_at: float, touched_at: float) -> bool:
    """Whether a call's books are no longer wanted. Pure; seconds of one clock, 0 for never."""
    if answered_at:
        return now - answered_at > KEEP_ANSWERED_S
    return now - touched_at > KEEP_UNANSWERED_S


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _read(path: Path) -> Past:
    """What it says; a last line that a death cut short goes, or the next one would be written behind it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Past()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        past = Past.of(read_records(whole.decode()))
    except (ValueError, KeyError, TypeError) as error:
        log.warning("a sample's book cannot be read, and it is begun afresh: %s: %s", path, error)
        path.unlink()
        return Past()
    if whole != data:
        os.truncate(path, len(whole))
    return past
