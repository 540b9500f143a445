"""The home of a sandbox on the host: a directory that says whose it is. Seconds since the epoch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from belayer_env.ownership import Owner

__all__ = ["HomeRecord", "read_home", "write_owner"]

OWNER_FILE = "owner.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeRecord:
    """A sandbox's home. ``is_owned``: the process that made it lives. Where ``owner.json`` cannot be read,
    ``runtime`` is empty and nobody owns it."""

    id: str
    path: Path
    runtime: str
    episode_id: str | None
    pid: int
    created_at: float
    is_owned: bool


def write_owner(home: Path, owner: Owner, *, runtime: str, episode_id: str | None) -> None:
    """Write down whose a home is, since now."""
    facts = {
        "owner": owner.token,
        "pid": owner.pid,
        "start_time": owner.start,
        "boot_id": owner.boot,
        "runtime": runtime,
        "episode_id": episode_id,
        "created_at": time.time(),
    }
    (home / OWNER_FILE).write_text(json.dumps(facts))


def read_home(path: Path) -> HomeRecord:
    """What a home says of itself."""
    try:
        facts = json.loads((path / OWNER_FILE).read_text())
        owner = Owner.parse(facts["owner"])
        return HomeRecord(
            id=path.name,
            path=path,
            runtime=facts["runtime"],
            episode_id=facts["episode_id"],
            pid=facts["pid"],
            created_at=facts["created_at"],
            is_owned=owner is not None and owner.is_alive(),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return HomeRecord(
            id=path.name, path=path, runtime="", episode_id=None, pid=0, created_at=0.0, is_owned=False
        )
