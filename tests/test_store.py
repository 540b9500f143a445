from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from belayer_env.checkpoint import CheckpointRef
from belayer_env.errors import (
    CheckpointCorrupt,
    ForeignCheckpoint,
    InvalidInput,
    RuntimeFailed,
    SetupError,
    StoreFull,
)
from belayer_env.ledger import Step
from belayer_env.ownership import Owner, is_process, process_start_time
from belayer_env.sandbox.base import Saved
from belayer_env.spec import Task, Tier
from belayer_env.store import Store
from tests.store_dirs import btrfs_dir, loop_disk

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers hold what only root can make")

TASK = Task(image="name:tag", instruction="do", setup=("true",))
SAVED = Saved(tier=Tier.FULL, pause_s=0.05, meta={"k": 1})
BARE: dict[str, Any] = {"task_digest": "", "step": 0, "saved": SAVED}
BARE |= {"runtime": "", "image_digest": "", "criu_version": ""}


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    with btrfs_dir() as directory:
        yield directory


@pytest.fixture(params=["btrfs", "plain"])
def root(request: pytest.FixtureRequest, disk: Path, tmp_path: Path) -> Path:
    return tmp_path / "store" if request.param == "plain" else disk / f"store-{time.time_ns()}"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store(root) as store:
        yield store
        for episode in store.episodes():
            store.end_episode(episode.id)
        for home in store.homes():
            store.layers.drop(home.path)
        store.sweep_partials()
        assert list((root / "checkpoints").iterdir()) == []
        assert list((root / "tmp").iterdir()) == []


def begin(store: Store) -> str:
    return store.begin_episode(TASK, runtime="runc", policy="never", tier=Tier.FULL)


def step(number: int, text: str = "ok") -> Step:
    return Step(number=number, action=f"echo {text}", observation=text, exit_code=0)


def save(store: Store, episode_id: str) -> Path:
    staging = store.staging(episode_id)
    (staging / "images").mkdir(parents=True, mode=0o700)
    (staging / "images" / "pages-1.img").write_bytes(os.urandom(10_000))
    home = store.new_home(episode_id, "runc")
    store.layers.create(home / "layer")
    (home / "layer" / "upper" / "file").write_text("file")
    store.layers.snapshot(home / "layer", staging / "layer")
    store.layers.drop(home)
    return staging


def publish(store: Store, episode_id: str, at: int, *, pinned: bool = False) -> CheckpointRef:
    return store.publish(
        save(store, episode_id),
        episode_id=episode_id,
        task_digest=TASK.digest,
        step=at,
        saved=SAVED,
        runtime="runc",
        image_digest="i",
        criu_version="4.2",
        pinned=pinned,
    )


def listed(store: Store, episode_id: str) -> list[str]:
    return [ref.id for ref in store.checkpoints(episode_id)]


# Episodes and ledger


def test_the_store_is_private_and_its_parts_are_there(store: Store, root: Path) -> None:
    assert root.stat().st_mode & 0o777 == 0o700
    parts = {"catalogue.db", "sandboxes", "checkpoints", "images", "tmp"}
    assert {path.name for path in root.iterdir()} >= parts
    assert store.images == root / "images"
    assert 0 < store.free_bytes() < 1 << 60


def test_an_episode_is_found_again_by_another_store_object(store: Store, root: Path) -> None:
    episode_id = begin(store)
    steps = (step(1, "\u00e9\ud800"), step(2))
    for each in steps:
        store.append_step(episode_id, each)
    with Store(root) as other:
        record = other.claim_episode(episode_id)
        assert Task.from_json(record.task) == TASK
        assert (record.task_digest, record.tier, record.state) == (TASK.digest, Tier.FULL, "open")
        assert record.owner == Owner.here()
        assert other.load_ledger(episode_id).steps == steps


def test_an_interrupt_as_an_episode_begins_leaves_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue, calls = store._catalogue, []
    transaction = catalogue.transaction

    @contextlib.contextmanager
    def interrupted_after_commit(*, write: bool = True) -> Iterator[sqlite3.Connection]:
        with transaction(write=write) as db:
            yield db
        calls.append(write)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "transaction", interrupted_after_commit)
    with pytest.raises(KeyboardInterrupt):
        store.begin_episode(TASK, runtime="runc", policy="never", tier=Tier.FULL)
    assert store.episodes() == []


def test_wrong_episodes_and_steps_are_refused(store: Store) -> None:
    episode_id = begin(store)
    calls: list[Callable[[str], object]] = [
        store.episode,
        store.claim_episode,
        store.load_ledger,
        store.end_episode,
        store.staging,
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="there is no episode"):
            call("ep-none")
    store.append_step(episode_id, step(1))
    for number in (1, 3):
        with pytest.raises(InvalidInput, match="does not follow step 1"):
            store.append_step(episode_id, step(number))
    for n in (-1, 2):
        with pytest.raises(InvalidInput):
            store.cut_ledger(episode_id, n)
    store.end_episode(episode_id)
    store.end_episode(episode_id)
    with pytest.raises(InvalidInput, match="closed"):
        store.append_step(episode_id, step(1))
    with pytest.raises(InvalidInput, match="closed"):
        store.claim_episode(episode_id)
    assert len(store.load_ledger(episode_id)) == 0


def test_an_episode_of_a_living_process_cannot_be_claimed(store: Store, root: Path) -> None:
    program = f"""
        import time
        from pathlib import Path
        from belayer_env.spec import Task, Tier
        from belayer_env.store import Store
        store = Store(Path({str(root)!r}))
        print(store.begin_episode(Task(image="x"), runtime="runc", policy="never", tier=Tier.FULL))
        print(store.new_home(None, "docker").name, flush=True)
        time.sleep(600)
    """
    with _python(program) as other:
        assert other.stdout
        episode_id, home_id = other.stdout.readline().strip(), other.stdout.readline().strip()
        with pytest.raises(InvalidInput, match=f"process {other.pid}, which lives"):
            store.claim_episode(episode_id)
        assert [(home.id, home.is_owned, home.runtime) for home in store.homes()] == [
            (home_id, True, "docker")
        ]
        other.kill()
    assert store.claim_episode(episode_id).owner == Owner.here()
    assert [home.is_owned for home in store.homes()] == [False]


# Checkpoints


def test_a_published_checkpoint_is_listed_and_opens(store: Store, root: Path) -> None:
    episode_id = begin(store)
    store.append_step(episode_id, step(1))
    first, second, again = (publish(store, episode_id, at) for at in (0, 1, 1))
    assert listed(store, episode_id) == [again.id, second.id, first.id]
    assert first.size_bytes > 10_000
    for checkpoint in (second, second.id):
        manifest, directory = store.open_checkpoint(checkpoint)
        assert manifest.ref == second
        assert dict(manifest.meta) == {"k": 1}
        assert (directory / "layer" / "upper" / "file").read_text() == "file"
    assert {path.name for path in (root / "checkpoints").iterdir()} == {first.id, second.id, again.id}


def test_what_cannot_be_published_is_removed(store: Store, root: Path) -> None:
    episode_id = begin(store)
    with pytest.raises(InvalidInput, match="no step 7"):
        publish(store, episode_id, 7)
    with pytest.raises(RuntimeFailed):
        store.publish(store.staging(episode_id), episode_id=episode_id, **BARE)
    with pytest.raises(InvalidInput, match="did not come from"):
        store.publish(root / "images", episode_id=episode_id, **BARE)
    assert list((root / "checkpoints").iterdir()) == []
    assert store.images.is_dir()
    assert listed(store, episode_id) == []


def test_a_damaged_checkpoint_is_found_and_listed_no_more(store: Store, root: Path) -> None:
    episode_id = begin(store)
    older, newer = publish(store, episode_id, 0), publish(store, episode_id, 0)
    os.truncate(root / "checkpoints" / newer.id / "images" / "pages-1.img", 5)
    for _ in range(2):
        with pytest.raises(CheckpointCorrupt):
            store.open_checkpoint(newer)
    assert listed(store, episode_id) == [older.id]
    store.open_checkpoint(older)


def test_a_checkpoint_put_in_anothers_place_is_found(store: Store, root: Path) -> None:
    episode_id = begin(store)
    one, two = publish(store, episode_id, 0), publish(store, episode_id, 0)
    checkpoints = root / "checkpoints"
    store.layers.drop(checkpoints / one.id)
    (checkpoints / two.id).rename(checkpoints / one.id)
    for ref in (one, two):
        with pytest.raises(CheckpointCorrupt):
            store.open_checkpoint(ref)


def test_foreign_checkpoints_are_refused(store: Store) -> None:
    episode_id = begin(store)
    ref = publish(store, episode_id, 0)
    with pytest.raises(ForeignCheckpoint):
        store.open_checkpoint("ck-unknown")
    with pytest.raises(ForeignCheckpoint):
        store.open_checkpoint(replace(ref, task_digest="another"))
    store.drop_checkpoint(ref.id)
    store.drop_checkpoint(ref.id)
    with pytest.raises(ForeignCheckpoint):
        store.open_checkpoint(ref)


def test_prune_keeps_the_newest_and_the_pinned(store: Store, root: Path) -> None:
    episode_id = begin(store)
    pinned = publish(store, episode_id, 0, pinned=True)
    refs = [publish(store, episode_id, 0) for _ in range(3)]
    store.prune(episode_id, 1)
    assert listed(store, episode_id) == [refs[2].id, pinned.id]
    store.prune(episode_id, 0)
    assert listed(store, episode_id) == [pinned.id]
    assert [path.name for path in (root / "checkpoints").iterdir()] == [pinned.id]
    with pytest.raises(InvalidInput):
        store.prune(episode_id, -1)


def test_a_checkpoint_of_cut_steps_is_not_offered_but_can_be_gone_back_to(store: Store) -> None:
    episode_id = begin(store)
    for number in (1, 2, 3):
        store.append_step(episode_id, step(number, "first"))
    base, dropped = publish(store, episode_id, 1), publish(store, episode_id, 2)
    pinned = publish(store, episode_id, 3, pinned=True)
    store.cut_ledger(episode_id, 1)
    assert listed(store, episode_id) == [base.id]
    store.forget_after(episode_id, 1)
    with pytest.raises(ForeignCheckpoint):
        store.open_checkpoint(dropped)
    for number in (2, 3):
        store.append_step(episode_id, step(number, "second"))
    # As long as before, but grown another way: what it holds is not what this context describes.
    assert listed(store, episode_id) == [base.id]
    store.open_checkpoint(pinned)
    ledger = store.rewind_ledger(pinned)
    assert ledger.steps == store.load_ledger(episode_id).steps
    assert [each.observation for each in ledger.steps] == ["first"] * 3
    assert listed(store, episode_id) == [pinned.id, base.id]


# Homes and owners


def test_a_home_names_its_owner_from_the_start(store: Store, root: Path) -> None:
    home = store.new_home("ep-1", "runc")
    assert home.parent == root / "sandboxes"
    (record,) = store.homes()
    expected = (home, "runc", "ep-1", os.getpid())
    assert (record.path, record.runtime, record.episode_id, record.pid) == expected
    assert record.is_owned
    (home / "owner.json").write_text("{")
    (record,) = store.homes()
    assert (record.runtime, record.is_owned) == ("", False)


def test_a_later_process_with_the_same_pid_is_another() -> None:
    here = Owner.here()
    assert Owner.parse(here.token) == here
    assert here.is_alive()
    assert is_process(here.pid, here.start)
    assert not replace(here, start=here.start - 1).is_alive()
    assert not replace(here, boot="another").is_alive()
    assert replace(here, start=0, pid_namespace=here.pid_namespace + 1).is_alive()  # who can tell from here
    for token in ("", "1.2.3", "a.2.3.b", "x"):
        assert Owner.parse(token) is None


def test_a_zombie_owns_nothing() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        start = process_start_time(child.pid)
        assert start is not None
        assert is_process(child.pid, start)
        child.kill()
        deadline = time.monotonic() + 10
        while is_process(child.pid, start) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_start_time(child.pid) is None
    finally:
        child.kill()
        child.wait()
    assert process_start_time(child.pid) is None


# Faults


PUBLISHER = """
    import itertools, sys
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from tests.test_store import begin, publish, step
    from belayer_env.store import Store
    store = Store(Path({root!r}))
    episode_id = begin(store)
    print(episode_id, flush=True)
    for number in itertools.count(1):
        store.append_step(episode_id, step(number))
        publish(store, episode_id, number)
        store.prune(episode_id, 2)
        print(number, flush=True)
"""


def _publisher(root: Path) -> subprocess.Popen[str]:
    """A process that publishes until it is killed, and says after which step it is."""
    return _python(PUBLISHER.format(here=str(Path(__file__).parent.parent), root=str(root)))


def _python(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )


def test_kill_9_at_any_moment_leaves_nothing_half_published(store: Store, root: Path) -> None:
    for wait_s in (0.0, 0.003, 0.011, 0.023, 0.037, 0.052):
        with _publisher(root) as publisher:
            assert publisher.stdout
            episode_id = publisher.stdout.readline().strip()
            publisher.stdout.readline()  # at least one is published
            time.sleep(wait_s)
            publisher.send_signal(signal.SIGKILL)
            said = publisher.stdout.read().split()
        assert len(store.load_ledger(episode_id)) >= (int(said[-1]) if said else 1)
        refs = store.checkpoints(episode_id)
        assert refs
        for ref in refs:
            assert store.open_checkpoint(ref)[0].ref == ref
        store.claim_episode(episode_id)
        store.sweep_partials()
        assert {path.name for path in (root / "checkpoints").iterdir()} == set(listed(store, episode_id))
        store.end_episode(episode_id)
        for home in store.homes():
            assert not home.is_owned
            store.layers.drop(home.path)


def test_a_sweep_leaves_living_processes_alone(store: Store, root: Path) -> None:
    with _publisher(root) as publisher:
        try:
            assert publisher.stdout
            episode_id = publisher.stdout.readline().strip()
            for number in range(1, 13):
                assert publisher.stdout.readline().strip() == str(number)
                store.sweep_partials()
        finally:
            publisher.kill()
    assert store.checkpoints(episode_id)


def test_leftovers_of_the_dead_are_swept_and_of_the_living_not(store: Store, root: Path) -> None:
    episode_id = begin(store)
    kept, lost = publish(store, episode_id, 0), publish(store, episode_id, 0)
    staging, scratch = save(store, episode_id), store.scratch("image")
    scratch.write_text("half")
    dead = Owner(1, 1, "another boot", 1).token
    partial = root / "checkpoints" / f".partial-ck-aaa.{dead}"
    (partial / "images").mkdir(parents=True)
    store.layers.create(partial / "layer")
    left = root / "tmp" / f"image-x.{dead}"
    left.mkdir()
    (root / "checkpoints" / "ck-without-row").mkdir()
    store.layers.drop(root / "checkpoints" / lost.id)
    orphans = {partial, left, root / "checkpoints" / "ck-without-row"}
    assert set(store.orphan_partials()) == orphans
    assert set(store.sweep_partials()) == orphans
    assert {path.name for path in (root / "checkpoints").iterdir()} == {kept.id, staging.name}
    assert list((root / "tmp").iterdir()) == [scratch]
    assert listed(store, episode_id) == [kept.id]
    store.layers.drop(staging)
    scratch.unlink()


def test_a_drop_cut_short_is_finished_by_the_sweep(store: Store, root: Path) -> None:
    episode_id = begin(store)
    ref = publish(store, episode_id, 0)
    with _database(root) as db:
        db.execute("UPDATE checkpoints SET state = 'dropped'")
    assert listed(store, episode_id) == []
    assert [path.name for path in store.sweep_partials()] == [ref.id]
    assert list((root / "checkpoints").iterdir()) == []


def test_a_lost_row_means_no_such_checkpoint(store: Store, root: Path) -> None:
    ref = publish(store, begin(store), 0)
    with _database(root) as db:
        db.execute("DELETE FROM checkpoints")
    with pytest.raises(ForeignCheckpoint):
        store.open_checkpoint(ref)


@contextlib.contextmanager
def _database(root: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(root / "catalogue.db")) as db, db:
        yield db


def test_a_full_disk_publishes_nothing_and_harms_nothing() -> None:
    with loop_disk("ext4", 16 << 20) as disk, Store(disk / "store") as store:
        episode_id = begin(store)
        ref = publish(store, episode_id, 0)
        staging = save(store, episode_id)
        number = 0
        with _filled(disk / "filler"):
            try:
                for number in range(1, 1000):
                    store.append_step(episode_id, step(number, "x" * 5000))
            except StoreFull:
                pass
            with pytest.raises(StoreFull):
                store.publish(staging, episode_id=episode_id, **BARE)
        assert 0 < number < 999
        assert not staging.exists()
        assert len(store.load_ledger(episode_id)) == number - 1
        assert listed(store, episode_id) == [ref.id]
        store.open_checkpoint(ref)
        store.append_step(episode_id, step(number))
        publish(store, episode_id, number)


@contextlib.contextmanager
def _filled(path: Path) -> Iterator[None]:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    try:
        yield
    finally:
        path.unlink()


def test_many_processes_and_threads_at_once(store: Store, root: Path) -> None:
    mine = [begin(store) for _ in range(3)]
    failures: list[BaseException] = []

    def work(episode_id: str) -> None:
        try:
            for number in range(1, 8):
                store.append_step(episode_id, step(number))
                publish(store, episode_id, number)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(episode_id,)) for episode_id in mine]
    publishers = [_publisher(root) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for publisher in publishers:
            assert publisher.stdout
            assert publisher.stdout.readline().startswith("ep-")
            for number in range(1, 6):
                assert publisher.stdout.readline().strip() == str(number)
    finally:
        for thread in threads:
            thread.join()
        for publisher in publishers:
            publisher.kill()
            publisher.communicate()
    assert failures == []
    assert all(len(store.checkpoints(episode_id)) == 7 for episode_id in mine)


def _write_steps(store: Store, episode_id: str) -> None:
    for number in range(1, 16):
        store.append_step(episode_id, step(number))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_uses_the_store_while_its_parent_does(store: Store, root: Path) -> None:
    mine, theirs = begin(store), [begin(store) for _ in range(2)]
    stop, num_appended = threading.Event(), [0]

    def keep_writing() -> None:
        while not stop.is_set():
            store.append_step(mine, step(num_appended[0] + 1))
            num_appended[0] += 1

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_write_steps, args=(store, each)) for each in theirs]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        writer.join()
    assert len(store.load_ledger(mine)) == num_appended[0] > 0
    assert [len(store.load_ledger(each)) for each in theirs] == [15, 15]
    with _database(root) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_directory_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/store")):
        with pytest.raises(InvalidInput, match="cannot be the store"):
            Store(bad)


def test_a_catalogue_of_another_version_or_none_at_all_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "a").close()
    with _database(tmp_path / "a") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(SetupError, match="version 99"):
        Store(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "catalogue.db").write_text("no database, but long enough to look like one" * 50)
    with pytest.raises(RuntimeFailed):
        Store(tmp_path / "b")


def test_close_is_idempotent_and_final(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.close()
    store.close()
    with pytest.raises(InvalidInput, match="closed"):
        store.episodes()


# Any order of calls


class StoreMachine(RuleBasedStateMachine):
    """A store against a model: the ledger as a list, each checkpoint with the list it was taken of."""

    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(self.root)
        self.episode_id = begin(self.store)
        self.num_appended = 0
        self.ledger: list[Step] = []
        self.refs: list[CheckpointRef] = []
        self.saved: dict[str, list[Step]] = {}
        self.pinned: set[str] = set()

    @rule()
    def append(self) -> None:
        self.num_appended += 1  # no step is like one that was cut: only then are equal prefixes one branch
        self.ledger.append(step(len(self.ledger) + 1, str(self.num_appended)))
        self.store.append_step(self.episode_id, self.ledger[-1])

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        to = data.draw(st.integers(0, len(self.ledger)))
        self.store.cut_ledger(self.episode_id, to)
        self.store.forget_after(self.episode_id, to)
        del self.ledger[to:]
        self._keep([ref for ref in self.refs if ref.step <= to])

    @rule(pinned=st.booleans(), data=st.data())
    def publish(self, pinned: bool, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.ledger)))
        ref = publish(self.store, self.episode_id, at, pinned=pinned)
        self.refs.append(ref)
        self.saved[ref.id] = self.ledger[:at]
        if pinned:
            self.pinned.add(ref.id)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.refs))
        self.ledger = list(self.store.rewind_ledger(ref).steps)
        assert self.ledger == self.saved[ref.id]

    @rule(keep=st.integers(0, 2))
    def prune(self, keep: int) -> None:
        self.store.prune(self.episode_id, keep)
        self._keep([ref for ref in self._expected() if ref.id not in self.pinned][:keep])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.root)
        self.store.sweep_partials()

    @invariant()
    def equals_model(self) -> None:
        assert list(self.store.load_ledger(self.episode_id).steps) == self.ledger
        assert self.store.checkpoints(self.episode_id) == self._expected()

    def _expected(self) -> list[CheckpointRef]:
        grown_from = [ref for ref in self.refs if self.ledger[: ref.step] == self.saved[ref.id]]
        return sorted(grown_from, key=lambda ref: (ref.step, self.refs.index(ref)), reverse=True)

    def _keep(self, kept: list[CheckpointRef]) -> None:
        self.refs = [ref for ref in self.refs if ref.id in self.pinned or ref in kept]

    def teardown(self) -> None:
        self.store.end_episode(self.episode_id)
        assert list((self.root / "checkpoints").iterdir()) == []
        self.store.close()


def test_any_order_of_calls_equals_the_model(tmp_path: Path) -> None:
    StoreMachine.root = tmp_path / "store"
    few = settings(max_examples=12, stateful_step_count=12, deadline=None)
    run_state_machine_as_test(StoreMachine, settings=few)
