"""The telemetry of recent episodes on disk, a small file each, kept when the episode has ended: for
`belayer timeline`. Seconds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from belayer_env.disk import disk_errors
from belayer_env.errors import InvalidInput
from belayer_env.telemetry import Telemetry

__all__ = ["MOST_KEPT", "Timeline", "Timelines"]

MOST_KEPT = 50
"""The newest so many stay. One takes about 0.5 kB a step."""


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
