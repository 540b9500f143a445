"""What the rows of the catalogue mean: episodes, ledgers, checkpoints. Works in the caller's transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from belayer_env.checkpoint import CheckpointRef
from belayer_env.errors import ForeignCheckpoint, InvalidInput
from belayer_env.ledger import Ledger, Step
from belayer_env.ownership import Owner
from belayer_env.spec import Tier

__all__ = [
    "EpisodeRecord",
    "checkpoint_ref",
    "checkpoint_row",
    "covered_step",
    "episode_record",
    "episode_row",
    "head_at",
    "live_rows",
    "load_ledger",
    "steps_to",
]

LEDGER_LINE = """
WITH RECURSIVE line (id, parent, number) AS (
    SELECT steps.id, steps.parent, steps.number FROM steps, episodes
     WHERE episodes.id = ? AND steps.id = episodes.head
    UNION ALL
    SELECT steps.id, steps.parent, steps.number FROM steps JOIN line ON steps.id = line.parent)
"""
"""The steps of an episode's ledger, as table ``line``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """An episode as the catalogue has it. ``task`` is `Task.to_json`; ``state`` is "open" or "closed"."""

    id: str
    task: Mapping[str, Any]
    task_digest: str
    runtime: str
    policy: str
    tier: Tier
    state: str
    owner: Owner | None
    created_at: float


def episode_row(db: sqlite3.Connection, episode_id: str) -> sqlite3.Row:
    """The row of an episode.

    Raises:
        InvalidInput: there is none of this id."""
    row: sqlite3.Row | None = db.execute("SELECT * FROM episodes WHERE id = ?", (episode_id,)).fetchone()
    if row is None:
        raise InvalidInput(f"there is no episode {episode_id!r} in this store")
    return row


def episode_record(row: sqlite3.Row) -> EpisodeRecord:
    """What an episode's row says."""
    return EpisodeRecord(
        id=row["id"],
        task=json.loads(row["task"]),
        task_digest=row["task_digest"],
        runtime=row["runtime"],
        policy=row["policy"],
        tier=Tier(row["tier"]),
        state=row["state"],
        owner=Owner.parse(row["owner"]),
        created_at=row["created_at"],
    )


def load_ledger(db: sqlite3.Connection, episode_id: str) -> Ledger:
    """The steps of an episode, from the root to its head.

    Raises:
        InvalidInput: there is no such episode."""
    episode_row(db, episode_id)
    rows = db.execute(
        LEDGER_LINE + "SELECT data FROM steps JOIN line USING (id) ORDER BY line.number", (episode_id,)
    )
    return Ledger(Step.from_json(json.loads(row["data"])) for row in rows)


def head_at(db: sqlite3.Connection, episode_id: str, step: int) -> int | None:
    """The step of this number in an episode's ledger; None stands for the root, number 0.

    Raises:
        InvalidInput: the ledger has none."""
    episode_row(db, episode_id)
    if step == 0:
        return None
    row = db.execute(LEDGER_LINE + "SELECT id FROM line WHERE number = ?", (episode_id, step)).fetchone()
    if row is None:
        raise InvalidInput(f"the ledger of {episode_id} has no step {step}")
    head: int = row["id"]
    return head


def steps_to(db: sqlite3.Connection, head: int | None) -> list[sqlite3.Row]:
    """The steps from the root to ``head``, oldest first."""
    return db.execute(
        "WITH RECURSIVE line (id, parent) AS (SELECT id, parent FROM steps WHERE id = ? UNION ALL"
        " SELECT steps.id, steps.parent FROM steps JOIN line ON steps.id = line.parent)"
        " SELECT number, data FROM steps JOIN line USING (id) ORDER BY number",
        (head,),
    ).fetchall()


def live_rows(db: sqlite3.Connection, episode_id: str) -> list[sqlite3.Row]:
    """The checkpoints that an episode's ledger grew from, most steps first, of equals the newest."""
    return db.execute(
        LEDGER_LINE + "SELECT * FROM checkpoints WHERE episode_id = ? AND state = 'live'"
        " AND (head IS NULL OR head IN (SELECT id FROM line)) ORDER BY step DESC, seq DESC",
        (episode_id, episode_id),
    ).fetchall()


def covered_step(db: sqlite3.Connection, episode_id: str, row: sqlite3.Row) -> int:
    """How many steps of the episode's ledger the checkpoint's state equals: its own, and those after it that
    changed nothing and have not been cut."""
    if row["covers_head"] is None:
        step: int = row["step"]
        return step
    found = db.execute(
        LEDGER_LINE + "SELECT number FROM line WHERE id = ?", (episode_id, row["covers_head"])
    ).fetchone()
    return int(found["number"] if found else row["step"])


def checkpoint_row(db: sqlite3.Connection, checkpoint_id: str) -> sqlite3.Row:
    """The row of a published checkpoint, damaged or not.

    Raises:
        ForeignCheckpoint: there is none, or no more."""
    row: sqlite3.Row | None = db.execute(
        "SELECT * FROM checkpoints WHERE id = ? AND state IN ('live', 'damaged')", (checkpoint_id,)
    ).fetchone()
    if row is None:
        raise ForeignCheckpoint(f"checkpoint {checkpoint_id} has been dropped, or is not of this store")
    return row


def checkpoint_ref(row: sqlite3.Row) -> CheckpointRef:
    """What a checkpoint's row says."""
    return CheckpointRef(
        id=row["id"],
        episode_id=row["episode_id"],
        task_digest=row["task_digest"],
        step=row["step"],
        tier=Tier(row["tier"]),
        size_bytes=row["size_bytes"],
    )
