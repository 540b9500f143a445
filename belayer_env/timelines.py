"""The telemetry of recent episodes on disk, a small file each, kept when the episode has ended: for
`belayer timeline`. Seconds."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from belayer_env.disk import disk_errors
from belayer_env.errors import InvalidInput
from belayer_env.telemetry import Telemetry

__all__ = ["MOST_KEPT", "Recorder", "Timeline", "Timelines"]

MOST_KEPT = 50
"""The newest so many stay. One takes about 0.5 kB a step."""

FIRST_WRITE_STEPS = 8
_WRITE_DEADLINE_S = 5.0
GROWTH = 4
"""Written again once an episode has grown by a quarter: so a step costs the same however long it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What was last written of one episode. ``written_at`` is in seconds since the epoch."""

    episode_id: str
    is_closed: bool
    written_at: float
    telemetry: Telemetry


class Timelines:
    """One store's, in a directory of their own. Safe to use from many threads and processes; for one episode
    from one thread at a time."""

    def __init__(self, directory: Path, scratch: Callable[[], Path]) -> None:
        """``scratch`` gives a new path on the same disk, where a file can be made ready."""
        self._directory = directory
        self._scratch = scratch

    def keep(self, episode_id: str, telemetry: Telemetry, *, is_closed: bool) -> None:
        """Write down what an episode has been through so far, in place of what was written before. Not
        synced: it explains, and recovers nothing.

        Raises:
            StoreFull, RuntimeFailed: the disk."""
        path = self._directory / f"{episode_id}.json"
        making = self._scratch()
        with disk_errors(f"writing {path}"):
            is_new = not path.exists()
            try:
                making.write_text(json.dumps({"is_closed": is_closed, "telemetry": telemetry.to_json()}))
                making.rename(path)
            except BaseException:
                making.unlink(missing_ok=True)
                raise
            if is_new:
                self._drop_oldest()

    def load(self, episode_id: str) -> Timeline:
        """What was kept of an episode.

        Raises:
            InvalidInput: nothing was, or the file cannot be read."""
        path = self._directory / f"{episode_id}.json"
        if "/" in episode_id or not path.is_file():
            raise InvalidInput(f"nothing is kept of an episode {episode_id!r}; see: belayer timeline")
        try:
            data = json.loads(path.read_text())
            telemetry = Telemetry.from_json(data["telemetry"])
            return Timeline(
                episode_id=episode_id,
                is_closed=data["is_closed"],
                written_at=path.stat().st_mtime,
                telemetry=telemetry,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read by this version: {error}") from error

    def episode_ids(self) -> list[str]:
        """Of all that are kept, the last written first."""
        return [path.stem for path in reversed(self._by_age())]

    def _by_age(self) -> list[Path]:
        aged = []
        for path in self._directory.glob("ep-*.json"):
            with contextlib.suppress(FileNotFoundError):
                aged.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(aged)]

    def _drop_oldest(self) -> None:
        for path in self._by_age()[:-MOST_KEPT]:
            path.unlink(missing_ok=True)


class Recorder:
    """Keeps one episode's telemetry as it grows, where no step waits for it. `close` is owed; used by one
    thread at a time."""

    def __init__(self, timelines: Timelines, episode_id: str, telemetry: Telemetry) -> None:
        self._timelines = timelines
        self._episode_id = episode_id
        self._telemetry = telemetry
        self._due_at_step = FIRST_WRITE_STEPS
        self._num_faults = 0
        self._written = threading.Event()
        self._written.set()
        self._is_closed = False

    def look(self) -> None:
        """A step has ended: have it written soon if there was a fault, or enough has been done. Never
        raises."""
        num_steps, num_faults = len(self._telemetry.steps), len(self._telemetry.faults)
        if num_steps < self._due_at_step and num_faults == self._num_faults:
            return
        if not self._written.is_set():
            return
        self._due_at_step = num_steps + max(FIRST_WRITE_STEPS, num_steps // GROWTH)
        self._num_faults = num_faults
        self._written.clear()
        _WRITER.do(self._write_now_and_then)

    def settle(self) -> None:
        """Wait until what `look` began is written."""
        self._written.wait(_WRITE_DEADLINE_S)

    def close(self) -> None:
        """Write it a last time, if anything happened at all. Idempotent, never raises."""
        self.settle()
        if not self._is_closed and (self._telemetry.steps or self._telemetry.faults):
            self._write(is_closed=True)
        self._is_closed = True

    def _write_now_and_then(self) -> None:
        self._write(is_closed=False)
        self._written.set()

    def _write(self, *, is_closed: bool) -> None:
        with contextlib.suppress(Exception):  # a full disk must not end an episode over its picture
            self._timelines.keep(self._episode_id, self._telemetry, is_closed=is_closed)


class _Writer:
    """One thread for all episodes of a process. To start one each time makes the step wait until it runs: a
    millisecond, and dozens of them while a standby is being made beside it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def do(self, work: Callable[[], None]) -> None:
        """Some time soon; ``work`` raises nothing."""
        # Not there yet, or left behind in the parent by a fork. Two at once start two: that harms nobody.
        if self._thread is None or not self._thread.is_alive():
            self._queue = SimpleQueue()
            self._thread = threading.Thread(
                target=_serve, args=(self._queue,), name="belayer-timelines", daemon=True
            )
            self._thread.start()
        self._queue.put(work)


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


_WRITER = _Writer()
