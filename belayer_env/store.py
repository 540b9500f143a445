"""What Belayer keeps on disk: episodes, their steps, their checkpoints, and the homes of running sandboxes.

    catalogue.db    SQLite: episodes, steps, checkpoints
    sandboxes/ID/   a sandbox's home; its owner.json names the process it belongs to
    checkpoints/ID/ a published checkpoint (see checkpoint.py); .partial-* is one in the making
    images/         root file systems
    timelines/      the telemetry of recent episodes, a file each
    tmp/            what is being made; every name there ends in its maker's token

Bytes; times of day in seconds since the epoch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from belayer_env import paths
from belayer_env.catalogue import Catalogue
from belayer_env.checkpoint import CheckpointRef, Manifest, host_fingerprint, read_manifest, seal, verify
from belayer_env.disk import disk_errors, sync_path
from belayer_env.errors import (
    BelayerError,
    CheckpointCorrupt,
    ForeignCheckpoint,
    InvalidInput,
    RuntimeFailed,
)
from belayer_env.homes import HomeRecord, read_home, write_owner
from belayer_env.ledger import Ledger, Step
from belayer_env.ownership import Owner
from belayer_env.rows import (
    EpisodeRecord,
    checkpoint_ref,
    checkpoint_row,
    covered_step,
    episode_record,
    episode_row,
    head_at,
    live_rows,
    load_ledger,
    steps_to,
)
from belayer_env.sandbox.base import Saved
from belayer_env.sandbox.layers import LayerStore, open_layers
from belayer_env.spec import Task, Tier
from belayer_env.timelines import Timelines

__all__ = ["EpisodeRecord", "HomeRecord", "Store"]

PARTIAL = ".partial-"


class Store:
    """One store directory. Safe to use from many threads, many processes and after a fork.

    Every method raises StoreFull when the disk is full and RuntimeFailed when it does not work otherwise."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or paths.default_store()).absolute()
        self.images = self.root / "images"
        self._sandboxes = self.root / "sandboxes"
        self._checkpoints = self.root / "checkpoints"
        self._tmp = self.root / "tmp"
        timelines = self.root / "timelines"
        try:
            with disk_errors(f"making the store {self.root}"):
                for directory in (
                    self.root,
                    self.images,
                    self._sandboxes,
                    self._checkpoints,
                    timelines,
                    self._tmp,
                ):
                    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.root.chmod(0o700)  # checkpoints hold memory, and memory holds secrets
        except RuntimeFailed as error:
            raise InvalidInput(f"{self.root} cannot be the store: {error.__cause__}") from error
        self.layers: LayerStore = open_layers(self._tmp)
        self.timelines = Timelines(timelines, lambda: self.scratch("timeline"))
        self._catalogue = Catalogue(self.root / "catalogue.db")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the catalogue. Idempotent, never raises."""
        self._catalogue.close()

    def free_bytes(self) -> int:
        """Room left for us on the store's disk."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def scratch(self, what: str) -> Path:
        """A path in tmp/, not yet existing, that `sweep_partials` removes once this process is dead."""
        return self._tmp / f"{what}-{_new_name()}.{Owner.here().token}"

    # Episodes

    def begin_episode(self, task: Task, *, runtime: str, policy: str, tier: Tier) -> str:
        """A new episode, owned by this process; returns its id."""
        episode_id = f"ep-{_new_name()}"
        row = (
            episode_id,
            json.dumps(task.to_json()),
            task.digest,
            runtime,
            policy,
            tier,
            Owner.here().token,
            time.time(),
        )
        try:
            with self._catalogue.transaction() as db:
                db.execute("INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, 'open', ?, ?, NULL)", row)
        except BaseException:
            # An interrupt may come when the row is there already, and nobody will know its id.
            with contextlib.suppress(BelayerError), self._catalogue.transaction() as db:
                db.execute("DELETE FROM episodes WHERE id = ?", (episode_id,))
            raise
        return episode_id

    def episode(self, episode_id: str) -> EpisodeRecord:
        """One episode.

        Raises:
            InvalidInput: there is none of this id."""
        with self._catalogue.transaction(write=False) as db:
            return episode_record(episode_row(db, episode_id))

    def episodes(self) -> list[EpisodeRecord]:
        """All episodes, oldest first."""
        with self._catalogue.transaction(write=False) as db:
            return [
                episode_record(row) for row in db.execute("SELECT * FROM episodes ORDER BY created_at, id")
            ]

    def claim_episode(self, episode_id: str) -> EpisodeRecord:
        """Make this process the owner of an open episode whose owner is dead, or which it owns already.

        Raises:
            InvalidInput: it is unknown or closed, or another living process owns it."""
        here = Owner.here()
        with self._catalogue.transaction() as db:
            record = episode_record(episode_row(db, episode_id))
            if record.state != "open":
                raise InvalidInput(f"episode {episode_id} is closed: begin a new one")
            if record.owner and record.owner != here and record.owner.is_alive():
                raise InvalidInput(
                    f"episode {episode_id} belongs to process {record.owner.pid}, which lives: end that first"
                )
            db.execute("UPDATE episodes SET owner = ? WHERE id = ?", (here.token, episode_id))
            return episode_record(episode_row(db, episode_id))

    def end_episode(self, episode_id: str) -> None:
        """Close an episode: its steps and checkpoints are deleted, its record stays. Idempotent."""
        with self._catalogue.transaction() as db:
            episode_row(db, episode_id)
            db.execute("UPDATE episodes SET state = 'closed', head = NULL WHERE id = ?", (episode_id,))
            db.execute("DELETE FROM steps WHERE episode_id = ?", (episode_id,))
            db.execute("UPDATE checkpoints SET state = 'dropped' WHERE episode_id = ?", (episode_id,))
        self._remove_dropped(episode_id)

    # The ledger

    def append_step(self, episode_id: str, step: Step) -> None:
        """Add a step to the episode's ledger. When this returns, a kill of this process cannot take it back.

        Raises:
            InvalidInput: it does not follow the last step, or the episode is unknown or closed."""
        with self._catalogue.transaction() as db:
            episode = episode_row(db, episode_id)
            if episode["state"] != "open":
                raise InvalidInput(f"episode {episode_id} is closed: it takes no more steps")
            last = db.execute("SELECT number FROM steps WHERE id = ?", (episode["head"],)).fetchone()
            length = last["number"] if last else 0
            if step.number != length + 1:
                raise InvalidInput(f"step {step.number} does not follow step {length} of {episode_id}")
            added = db.execute(
                "INSERT INTO steps (episode_id, parent, number, data) VALUES (?, ?, ?, ?)",
                (episode_id, episode["head"], step.number, json.dumps(step.to_json())),
            )
            db.execute("UPDATE episodes SET head = ? WHERE id = ?", (added.lastrowid, episode_id))

    def load_ledger(self, episode_id: str) -> Ledger:
        """The episode's ledger.

        Raises:
            InvalidInput: there is no such episode."""
        with self._catalogue.transaction(write=False) as db:
            return load_ledger(db, episode_id)

    def cut_ledger(self, episode_id: str, to_step: int) -> None:
        """Drop the steps after ``to_step``. Checkpoints that hold a dropped step are listed no more, but stay
        (see `rewind_ledger`) until they are dropped.

        Raises:
            InvalidInput: the ledger is not that long."""
        with self._catalogue.transaction() as db:
            head = head_at(db, episode_id, to_step)
            db.execute("UPDATE episodes SET head = ? WHERE id = ?", (head, episode_id))

    def rewind_ledger(self, ref: CheckpointRef) -> Ledger:
        """Make the ledger what it was when the checkpoint was taken, even if steps of it have been cut since;
        returns it.

        Raises:
            ForeignCheckpoint: the checkpoint has been dropped."""
        with self._catalogue.transaction() as db:
            row = checkpoint_row(db, ref.id)
            db.execute("UPDATE episodes SET head = ? WHERE id = ?", (row["head"], row["episode_id"]))
            return load_ledger(db, row["episode_id"])

    # Checkpoints

    def staging(self, episode_id: str) -> Path:
        """Where to save a new checkpoint: a path that does not exist yet. Then `publish` it, or remove it.

        Raises:
            InvalidInput: there is no such open episode."""
        if self.episode(episode_id).state != "open":
            raise InvalidInput(f"episode {episode_id} is closed: it takes no more checkpoints")
        return self._checkpoints / f"{PARTIAL}ck-{_new_name()}.{Owner.here().token}"

    def publish(
        self,
        staging: Path,
        *,
        episode_id: str,
        task_digest: str,
        step: int,
        saved: Saved,
        runtime: str,
        image_digest: str,
        criu_version: str,
        pinned: bool = False,
    ) -> CheckpointRef:
        """Turn what was saved at ``staging`` into a checkpoint of the ledger's first ``step`` steps. It is
        listed once all of it is on disk, and not before. Whatever ends this early, ``staging`` is removed.

        Raises:
            InvalidInput: not a staging path, or no such step in the ledger.
            CheckpointCorrupt: the previous checkpoint is damaged, and this one shares files with it. The
                damaged one is marked: save again."""
        checkpoint_id = staging.name.removeprefix(PARTIAL).partition(".")[0]
        if staging.parent != self._checkpoints or not staging.name.startswith(PARTIAL):
            raise InvalidInput(f"{staging} did not come from Store.staging")
        final = self._checkpoints / checkpoint_id
        ref = CheckpointRef(
            id=checkpoint_id,
            episode_id=episode_id,
            task_digest=task_digest,
            step=step,
            tier=saved.tier,
            size_bytes=0,
        )
        try:
            with self._catalogue.transaction(write=False) as db:
                head = head_at(db, episode_id, step)
            manifest = self._seal(staging, ref, saved, runtime, image_digest, criu_version)
            # The row comes before the rename, so that a directory without a row is nobody's; but it counts
            # only from the second transaction on.
            with self._catalogue.transaction() as db:
                db.execute(
                    "INSERT INTO checkpoints (id, episode_id, task_digest, step, tier, size_bytes,"
                    " manifest_digest, state, pinned, head, owner, directory)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, 'publishing', ?, ?, ?, ?)",
                    (
                        checkpoint_id,
                        episode_id,
                        task_digest,
                        step,
                        saved.tier,
                        manifest.ref.size_bytes,
                        manifest.digest,
                        pinned,
                        head,
                        Owner.here().token,
                        checkpoint_id,
                    ),
                )
            with disk_errors(f"publishing {final}"):
                staging.rename(final)
                sync_path(self._checkpoints)
            with self._catalogue.transaction() as db:
                db.execute("UPDATE checkpoints SET state = 'live' WHERE id = ?", (checkpoint_id,))
            return manifest.ref
        except BaseException:
            # If this fails as well, sweep_partials finds the rest.
            with contextlib.suppress(BelayerError):
                self.layers.drop(staging)
                self.layers.drop(final)
                with self._catalogue.transaction() as db:
                    db.execute("DELETE FROM checkpoints WHERE id = ?", (checkpoint_id,))
            raise

    def checkpoints(self, episode_id: str) -> list[CheckpointRef]:
        """The checkpoints that the ledger as it is now grew from: the one with most steps first, of equals
        the newest. Not: damaged and dropped ones, and those that hold steps which have been cut."""
        with self._catalogue.transaction(write=False) as db:
            return [checkpoint_ref(row) for row in live_rows(db, episode_id)]

    def directory_of(self, ref: CheckpointRef) -> Path | None:
        """Where a checkpoint's files are; None once it has been dropped."""
        with self._catalogue.transaction(write=False) as db:
            try:
                return self._checkpoints / str(checkpoint_row(db, ref.id)["directory"])
            except ForeignCheckpoint:
                return None

    def cover(self, checkpoint_id: str, step: int) -> None:
        """Note that the steps after this checkpoint, up to ``step``, have changed nothing: its state is that
        after each of them.

        Raises:
            ForeignCheckpoint: the checkpoint has been dropped.
            InvalidInput: the ledger has no such step."""
        with self._catalogue.transaction() as db:
            row = checkpoint_row(db, checkpoint_id)
            head = head_at(db, row["episode_id"], step)
            db.execute(
                "UPDATE checkpoints SET covers = ?, covers_head = ? WHERE id = ?", (step, head, checkpoint_id)
            )

    def covered_step(self, ref: CheckpointRef) -> int:
        """How many steps of the ledger as it is now a checkpoint's state equals: ``ref.step``, or more where
        `cover` said so.

        Raises:
            ForeignCheckpoint: the checkpoint has been dropped."""
        with self._catalogue.transaction(write=False) as db:
            return covered_step(db, ref.episode_id, checkpoint_row(db, ref.id))

    def fork_episode(self, ref: CheckpointRef, *, policy: str) -> tuple[str, CheckpointRef]:
        """A new episode that starts from a checkpoint of another one: the steps up to there, those that it
        covers included, become its own, and so does the checkpoint, whose files both share. Owned by this
        process.

        Raises:
            ForeignCheckpoint: the checkpoint has been dropped."""
        episode_id, checkpoint_id = f"ep-{_new_name()}", f"ck-{_new_name()}"
        token = Owner.here().token
        with self._catalogue.transaction() as db:
            row = checkpoint_row(db, ref.id)
            db.execute(
                "INSERT INTO episodes SELECT ?, task, task_digest, runtime, ?, tier, 'open', ?, ?, NULL"
                " FROM episodes WHERE id = ?",
                (episode_id, policy, token, time.time(), row["episode_id"]),
            )
            covered = covered_step(db, row["episode_id"], row)
            is_covering = covered > row["step"]
            head = own_head = None
            for step in steps_to(db, row["covers_head"] if is_covering else row["head"]):
                head = db.execute(
                    "INSERT INTO steps (episode_id, parent, number, data) VALUES (?, ?, ?, ?)",
                    (episode_id, head, step["number"], step["data"]),
                ).lastrowid
                if step["number"] == row["step"]:
                    own_head = head
            db.execute("UPDATE episodes SET head = ? WHERE id = ?", (head, episode_id))
            db.execute(
                "INSERT INTO checkpoints (id, episode_id, task_digest, step, tier, size_bytes,"
                " manifest_digest, state, pinned, head, owner, directory)"
                " SELECT ?, ?, task_digest, step, tier,"
                " size_bytes,"
                " manifest_digest, state, 0, ?, ?, directory FROM checkpoints WHERE id = ?",
                (checkpoint_id, episode_id, own_head, token, ref.id),
            )
            if is_covering:
                db.execute(
                    "UPDATE checkpoints SET covers = ?, covers_head = ? WHERE id = ?",
                    (covered, head, checkpoint_id),
                )
            return episode_id, checkpoint_ref(checkpoint_row(db, checkpoint_id))

    # What episodes learn from one another

    def fact(self, name: str) -> Any:
        """What `remember` was last given under this name, None at first."""
        with self._catalogue.transaction(write=False) as db:
            row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return json.loads(row["value"]) if row else None

    def remember(self, name: str, value: Any) -> None:
        """Keep a small JSON value for every later episode on this store."""
        with self._catalogue.transaction() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def open_checkpoint(self, checkpoint: CheckpointRef | str) -> tuple[Manifest, Path]:
        """A checkpoint's manifest and directory, verified now. A damaged one is marked, and listed no more.

        Raises:
            ForeignCheckpoint: it is unknown or has been dropped, or is not what its ref says.
            CheckpointCorrupt: it is damaged."""
        checkpoint_id = checkpoint if isinstance(checkpoint, str) else checkpoint.id
        with self._catalogue.transaction(write=False) as db:
            row = checkpoint_row(db, checkpoint_id)
        if isinstance(checkpoint, CheckpointRef) and checkpoint != checkpoint_ref(row):
            raise ForeignCheckpoint(
                f"checkpoint {checkpoint_id} of this store is another one: {checkpoint_ref(row)}"
            )
        directory = self._checkpoints / row["directory"]
        try:
            if row["state"] == "damaged":
                raise CheckpointCorrupt(f"checkpoint {checkpoint_id} was found damaged before")
            manifest = verify(directory)
            if manifest.digest != row["manifest_digest"]:
                raise CheckpointCorrupt(f"{directory} holds another checkpoint", path="manifest.json")
        except CheckpointCorrupt:
            self._mark_damaged(row["directory"])
            raise
        return manifest, directory

    def drop_checkpoint(self, checkpoint_id: str) -> None:
        """Remove a checkpoint, pinned or not. Idempotent."""
        with self._catalogue.transaction() as db:
            db.execute(
                "UPDATE checkpoints SET state = 'dropped' WHERE id = ? AND state != 'publishing'",
                (checkpoint_id,),
            )
        self._remove_dropped()

    def prune(self, episode_id: str, keep: int) -> None:
        """Drop checkpoints that are not pinned: all but the newest ``keep`` of those in `checkpoints`.

        Raises:
            InvalidInput: ``keep`` is negative."""
        if keep < 0:
            raise InvalidInput(f"keep counts checkpoints, not {keep}")
        with self._catalogue.transaction() as db:
            unpinned = [row["id"] for row in live_rows(db, episode_id) if not row["pinned"]]
            kept = json.dumps(unpinned[:keep])
            db.execute(
                "UPDATE checkpoints SET state = 'dropped' WHERE episode_id = ?"
                " AND state IN ('live', 'damaged') AND NOT pinned"
                " AND id NOT IN (SELECT value FROM json_each(?))",
                (episode_id, kept),
            )
        self._remove_dropped(episode_id)

    def forget_after(self, episode_id: str, step: int) -> None:
        """Drop checkpoints with more than ``step`` steps that are not pinned: for after a `cut_ledger`."""
        with self._catalogue.transaction() as db:
            db.execute(
                "UPDATE checkpoints SET state = 'dropped' WHERE episode_id = ?"
                " AND state IN ('live', 'damaged') AND NOT pinned AND step > ?",
                (episode_id, step),
            )
        self._remove_dropped(episode_id)

    # Sandbox homes

    def new_home(self, episode_id: str | None, runtime: str) -> Path:
        """A new sandbox's home. It holds ``owner.json`` from its first moment on; whoever removes the home
        removes that last, as it says which runtime is to."""
        sandbox_id = f"sb-{_new_name()}"
        owner = Owner.here()
        making, home = self.scratch(sandbox_id), self._sandboxes / sandbox_id
        with disk_errors(f"making the sandbox home {home}"):
            try:
                making.mkdir(mode=0o700)
                write_owner(making, owner, runtime=runtime, episode_id=episode_id)
                making.rename(home)
            except BaseException:
                self.layers.drop(making)
                raise
        return home

    def homes(self) -> list[HomeRecord]:
        """All homes in the store, whosever they are, oldest first."""
        found = [read_home(path) for path in self._sandboxes.iterdir()]
        return sorted(found, key=lambda home: (home.created_at, home.id))

    # What dead processes left

    def orphan_partials(self) -> list[Path]:
        """What `sweep_partials` would remove from the disk."""
        # The directories first: one that has no row by the time we look had none when we saw it, or is gone.
        seen = sorted([*self._checkpoints.iterdir(), *self._tmp.iterdir()])
        with self._catalogue.transaction(write=False) as db:
            wanted = {
                row["directory"]
                for row in db.execute("SELECT directory, state, owner FROM checkpoints")
                if row["state"] != "dropped"
                and not (row["state"] == "publishing" and not _is_alive(row["owner"]))
            }
        return [path for path in seen if self._is_orphan(path, wanted)]

    def sweep_partials(self) -> list[Path]:
        """Remove half-made checkpoints and temporary files of dead processes, checkpoint directories without
        a row and rows without a directory, and finish drops that were cut short. Returns what it removed."""
        orphans = self.orphan_partials()
        for path in orphans:
            self.layers.drop(path)
        with self._catalogue.transaction() as db:
            for row in db.execute("SELECT id, state, owner, directory FROM checkpoints").fetchall():
                is_gone = not (self._checkpoints / row["directory"]).exists()
                if is_gone and not (row["state"] == "publishing" and _is_alive(row["owner"])):
                    db.execute("DELETE FROM checkpoints WHERE id = ?", (row["id"],))
        return orphans

    def _is_orphan(self, path: Path, wanted: Collection[str]) -> bool:
        if path.parent == self._checkpoints and not path.name.startswith(PARTIAL):
            return path.name not in wanted
        # NAME.TOKEN; a name without a token was put there by hand.
        owner = Owner.parse(path.name.removeprefix(PARTIAL).partition(".")[2])
        return owner is not None and not owner.is_alive()

    def _seal(
        self,
        staging: Path,
        ref: CheckpointRef,
        saved: Saved,
        runtime: str,
        image_digest: str,
        criu_version: str,
    ) -> Manifest:
        with self._catalogue.transaction(write=False) as db:
            earlier = live_rows(db, ref.episode_id)
        previous = None
        if earlier:
            # Damage is found when it is to be used, and is worth nothing here.
            with contextlib.suppress(CheckpointCorrupt):
                previous = read_manifest(self._checkpoints / earlier[0]["directory"])
        try:
            return seal(
                staging,
                ref,
                runtime=runtime,
                image_digest=image_digest,
                host=host_fingerprint(criu_version),
                meta=saved.meta,
                layers=self.layers.kind,
                previous=previous,
            )
        except CheckpointCorrupt:
            if previous:
                self._mark_damaged(previous.ref.id)
            raise

    def _mark_damaged(self, directory: str) -> None:
        with self._catalogue.transaction() as db:
            db.execute(
                "UPDATE checkpoints SET state = 'damaged' WHERE directory = ? AND state = 'live'",
                (directory,),
            )

    def _remove_dropped(self, episode_id: str | None = None) -> None:
        # Rows are marked first and deleted last: whoever dies in between leaves work for sweep_partials.
        with self._catalogue.transaction(write=False) as db:
            rows = db.execute(
                "SELECT id, directory, EXISTS (SELECT 1 FROM checkpoints AS other"
                " WHERE other.directory = mine.directory AND other.state != 'dropped') AS is_shared"
                " FROM checkpoints AS mine WHERE state = 'dropped' AND episode_id = coalesce(?, episode_id)",
                (episode_id,),
            ).fetchall()
        for row in rows:
            if not row["is_shared"]:
                self.layers.drop(self._checkpoints / row["directory"])
        if rows:
            with self._catalogue.transaction() as db:
                db.executemany("DELETE FROM checkpoints WHERE id = ?", [(row["id"],) for row in rows])


def _new_name() -> str:
    return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(12))


def _is_alive(token: str) -> bool:
    owner = Owner.parse(token)
    return owner is not None and owner.is_alive()
