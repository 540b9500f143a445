"""Episode, store and recovery against a model: whatever befalls the sandbox, its state is what executing the
ledger's actions produces, and the ledger is what was told."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from belayer_env.checkpoint import CheckpointRef
from belayer_env.episode import Episode, Means
from belayer_env.errors import Fault, SandboxGone, StoreFull
from belayer_env.ledger import Ledger, Step
from belayer_env.policy import parse_policy
from belayer_env.rollback import Rollback
from belayer_env.runtimes import open_runtime
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.sandbox.layers import open_layers
from belayer_env.spec import Limits, Task
from belayer_env.store import Store
from tests.memory_sandbox import (
    RANDOM,
    SPAWN,
    TIMED_OUT,
    Faults,
    FaultyRuntime,
    FaultySandbox,
    MemoryRuntime,
    MemorySandbox,
    State,
    execute,
)

SETUP = ("touch /root/list",)
DETERMINISTIC = (
    "A=1",
    "B=x",
    "A=$((A+3)); echo $A",
    "echo $A",
    "echo $B",
    "echo one >>/root/list",
    "echo two >>/root/list",
    "cat /root/list",
    SPAWN,
    "pgrep -c sleep",
    "(exit 3)",
)
ACTIONS = st.one_of(st.sampled_from(DETERMINISTIC), st.just(RANDOM), st.sampled_from(DETERMINISTIC))
POINTS = (
    ("run", "before"),
    ("run", "middle"),
    ("run", "after"),
    ("save", "before"),
    ("save", "after"),
    ("restore", "before"),
    ("restore", "after"),
    ("create", "before"),
    ("create", "after"),
    ("wake", "before"),
    ("wake", "after"),
)

Told = tuple[str, str, int, bool]
"""Action, observation, exit code, timed out."""


class FullStore(Store):
    """Its disk is full for the calls named in ``full``, once each."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.full: set[str] = set()

    def publish(self, staging: Path, **facts: Any) -> CheckpointRef:
        try:
            self._use_disk("publish")
        except StoreFull:
            self.layers.drop(staging)
            raise
        return super().publish(staging, **facts)

    def append_step(self, episode_id: str, step: Step) -> None:
        self._use_disk("append_step")
        super().append_step(episode_id, step)

    def cut_ledger(self, episode_id: str, to_step: int) -> None:
        self._use_disk("cut_ledger")
        super().cut_ledger(episode_id, to_step)

    def rewind_ledger(self, ref: CheckpointRef) -> Ledger:
        self._use_disk("rewind_ledger")
        return super().rewind_ledger(ref)

    def forget_after(self, episode_id: str, step: int) -> None:
        self._use_disk("forget_after")
        super().forget_after(episode_id, step)

    def cover(self, checkpoint_id: str, step: int) -> None:
        self._use_disk("cover")
        super().cover(checkpoint_id, step)

    def new_home(self, episode_id: str | None, runtime: str) -> Path:
        self._use_disk("new_home")
        return super().new_home(episode_id, runtime)

    def _use_disk(self, call: str) -> None:
        if call in self.full:
            self.full.discard(call)
            raise StoreFull("no room")


WRITES = ("publish", "append_step", "cut_ledger", "rewind_ledger", "forget_after", "cover", "new_home")


def expected_state(told: list[Told]) -> State:
    """What executing these actions, with what was observed, produces."""
    state = State()
    for command in SETUP:
        execute(state, command, str)
    for action, observation, _, _ in told:
        execute(state, action, observation.strip)
    return state


class EpisodeMachine(RuleBasedStateMachine):
    """One episode under everything; ``told`` is what its agent's context holds."""

    image = "rootfs:/"
    commands_time_out = True

    def make_runtime(self, store: Store) -> SandboxRuntime:
        return MemoryRuntime()

    def make_root(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="belayer-model-", dir="/dev/shm"))

    def drop_root(self) -> None:
        shutil.rmtree(self.root)

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.refs: list[tuple[CheckpointRef, list[Told]]] = []
        self.is_untold = False
        self.root = self.make_root()
        self.store = FullStore(self.root)
        self.faults = Faults(self.store.layers.drop)
        self.runtime = FaultyRuntime(self.make_runtime(self.store), self.faults)

    @initialize(
        policy=st.sampled_from(["never", "every-step", "every-2", "adaptive:faults_per_s=1000.0"]),
        standby=st.booleans(),
        replay=st.sampled_from(["always", "always", "never"]),
    )
    def begin(self, policy: str, standby: bool, replay: Any) -> None:
        limits = Limits(step_timeout_s=20.0, kill_grace_s=0.3)
        self.task = Task(image=self.image, setup=SETUP, replay=replay, limits=limits)
        self.means = Means(
            store=self.store, runtime=self.runtime, policy=parse_policy(policy), standby=standby
        )
        self.episode = Episode.begin(self.task, self.means)

    # -- what an agent does

    @rule(action=ACTIONS)
    def step(self, action: str) -> None:
        self.take(self.episode, self.told, action)
        self.is_untold = False

    @precondition(lambda self: self.commands_time_out)
    @rule()
    def step_that_times_out(self) -> None:
        self.step(TIMED_OUT)

    def take(self, episode: Episode, told: list[Told], action: str) -> None:
        """A step; ``told`` becomes what the agent then knows."""
        before = list(told)
        try:
            outcome = episode.step(action)
        except StoreFull:
            assert self.ledger_of(episode) == before[: len(episode.ledger)]
            if len(episode.ledger) < len(before):
                self.is_untold = True
            return
        if isinstance(outcome, Rollback):
            self.check_rollback(outcome, before)
            del told[outcome.to_step :]
        else:
            told.append((outcome.action, outcome.observation, outcome.exit_code, outcome.timed_out))
        assert self.ledger_of(episode) == told

    def check_rollback(self, rollback: Rollback, before: list[Told]) -> None:
        lost = before[rollback.to_step :]
        if self.task.replay == "always":
            # Nothing is given up that could be had again.
            assert any(action == RANDOM for action, *_ in lost), f"{rollback} gave up {lost}"

    @rule()
    def checkpoint(self) -> None:
        try:
            ref = self.episode.checkpoint()
        except Fault:
            pass
        else:
            assert ref.step == len(self.episode.ledger)
            self.refs.append((ref, self.ledger_of(self.episode)))
        self.note_untold()

    @rule(number=st.integers(0, 99))
    def restore(self, number: int) -> None:
        # Not drawn from them: an adaptive policy meets the faults by the clock, so the same rules may leave
        # another number of checkpoints, and what is drawn must not depend on that.
        if not self.refs:
            return
        ref, then = self.refs[number % len(self.refs)]
        before = self.ledger_of(self.episode)
        try:
            self.episode.restore(ref)
        except Fault:
            assert self.ledger_of(self.episode) == before
        else:
            self.told = list(then)
            self.is_untold = False

    @rule(actions=st.lists(ACTIONS, min_size=2, max_size=2))
    def fork(self, actions: list[str]) -> None:
        try:
            forks = self.episode.fork(2)
        except Fault:
            self.note_untold()
            return
        self.note_untold()
        try:
            for fork, action in zip(forks, actions, strict=True):
                # A fork's agent has the context of its parent's.
                told = list(self.told)
                self.check_state(fork)
                self.take(fork, told, action)
                self.check_state(fork)
        finally:
            for fork in forks:
                fork.close()

    # -- what befalls it

    @rule()
    def kill(self) -> None:
        self.episode.settle()
        with contextlib.suppress(SandboxGone):
            self.episode.sandbox.kill()

    @rule(point=st.sampled_from(POINTS), kind=st.sampled_from(["kill", "hang", "refuse"]))
    def arm(self, point: tuple[str, str], kind: str) -> None:
        if len(self.faults.armed) < 2:  # three at one rung, and it is the rung that is to blame
            self.faults.arm(*point, kind)

    @rule(call=st.sampled_from(WRITES))
    def fill_disk(self, call: str) -> None:
        if len(self.faults.armed) < 2:
            self.store.full = {call}

    @rule(how=st.sampled_from(["flip", "cut", "remove"]))
    def corrupt(self, how: str) -> None:
        self.episode.settle()
        refs = self.store.checkpoints(self.episode.id)
        directory = self.store.directory_of(refs[0]) if refs else None
        if directory is None:
            return
        files = [path for path in (directory / "images").iterdir() if path.is_file()]
        path = max(files, key=lambda path: path.stat().st_size, default=None)
        if path is None:
            return
        data = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[:-1])
        elif data:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

    @rule()
    def lose_client(self) -> None:
        """Its process dies: what runs goes on without an owner, and another client resumes the episode."""
        self.episode.settle()
        self.let_threads_end()
        self.faults.armed.clear()
        self.store.full.clear()
        known = self.ledger_of(self.episode)
        self.episode = Episode.resume(self.episode.id, self.task, self.means)
        self.told = known  # a new client takes up the ledger
        self.is_untold = False
        self.note_untold()

    # -- what must hold

    @invariant()
    def ledger_is_what_was_told(self) -> None:
        if not hasattr(self, "episode"):
            return
        ledger = self.ledger_of(self.episode)
        assert ledger == self.told[: len(ledger)]
        assert self.is_untold or len(ledger) == len(self.told)
        stored = self.store.load_ledger(self.episode.id)
        assert [step.to_json() for step in stored.steps] == [
            step.to_json() for step in self.episode.ledger.steps
        ]

    @invariant()
    def state_is_what_the_ledger_says(self) -> None:
        if hasattr(self, "episode"):
            self.check_state(self.episode)

    def check_state(self, episode: Episode) -> None:
        episode.settle()
        try:
            sandbox = episode.sandbox
        except SandboxGone:
            return
        if not sandbox.is_alive() or not sandbox.answers():
            return  # a fault has come; the next step recovers
        assert isinstance(sandbox, FaultySandbox)
        assert observed(sandbox.inner) == observed_of(expected_state(self.ledger_of(episode)))

    def note_untold(self) -> None:
        if len(self.episode.ledger) < len(self.told):
            self.is_untold = True

    def ledger_of(self, episode: Episode) -> list[Told]:
        return [(s.action, s.observation, s.exit_code, s.timed_out) for s in episode.ledger.steps]

    def let_threads_end(self) -> None:
        for thread in self.episode._burials:
            thread.join()
        self.episode._recorder.settle()

    def teardown(self) -> None:
        try:
            if hasattr(self, "episode"):
                self.episode.close()
                assert self.store.homes() == []
                assert list((self.root / "checkpoints").iterdir()) == []
                assert list((self.root / "tmp").iterdir()) == []
                inner = self.runtime.inner
                if isinstance(inner, MemoryRuntime):
                    assert not any(sandbox.is_alive() for sandbox in inner.made)
        finally:
            self.store.close()
            self.drop_root()


def observed(sandbox: Sandbox) -> tuple[str, str, str, str]:
    """What the sandbox shows, asked by none of the ledger's steps."""
    if isinstance(sandbox, MemorySandbox):
        return observed_of(sandbox.state)
    seen = sandbox.run("echo $A; echo $B; pgrep -c sleep; cat /root/list").output
    a, b, count, lines = seen.split("\n", 3)
    return a, b, count, lines


def observed_of(state: State) -> tuple[str, str, str, str]:
    lines = "".join(line + "\n" for line in state.lines or ())
    return state.variables.get("A", ""), state.variables.get("B", ""), str(len(state.processes)), lines


MODEL = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_whatever_befalls_it_the_state_is_what_the_ledger_says() -> None:
    run_state_machine_as_test(EpisodeMachine, settings=MODEL)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_whatever_befalls_it_the_state_is_what_the_ledger_says_at_length() -> None:
    long = settings(MODEL, max_examples=3000, stateful_step_count=40)
    run_state_machine_as_test(EpisodeMachine, settings=long)


# -- the same on real sandboxes


@pytest.fixture
def real_machine(store_dir: Path, image: str, runtime_names: frozenset[str]) -> type[EpisodeMachine]:
    """The machine on runc."""
    if "runc" not in runtime_names:
        pytest.skip("the runc runtime does not give FULL here; run: make setup")

    class RealMachine(EpisodeMachine):
        commands_time_out = False  # a limit short enough to wait for is one that a busy host passes by itself

        def __init__(self) -> None:
            self.image = image
            super().__init__()

        def make_runtime(self, store: Store) -> SandboxRuntime:
            return open_runtime("runc", store, require="full")

        def make_root(self) -> Path:
            return Path(tempfile.mkdtemp(prefix="model-", dir=store_dir))

        def drop_root(self) -> None:
            open_layers(store_dir).drop(self.root)

    return RealMachine


REAL = settings(
    max_examples=4,
    stateful_step_count=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.criu
def test_real_sandboxes_keep_the_same_rules(real_machine: type[EpisodeMachine]) -> None:
    run_state_machine_as_test(real_machine, settings=REAL)


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_real_sandboxes_keep_the_same_rules_at_length(real_machine: type[EpisodeMachine]) -> None:
    long = settings(REAL, max_examples=300, stateful_step_count=15)
    run_state_machine_as_test(real_machine, settings=long)
