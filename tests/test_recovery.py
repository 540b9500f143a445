"""The ladder's order, and how it is climbed: on sandboxes in memory and a real store, without waiting."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import tenacity

from belayer_env.checkpoint import CheckpointRef
from belayer_env.episode import ACTION_ATTEMPTS, Episode, Means
from belayer_env.errors import (
    EngineUnavailable,
    Fault,
    RecoveryFailed,
    SandboxFrozen,
    SandboxGone,
    SandboxHung,
    StoreFull,
    TaskSetupFailed,
)
from belayer_env.ledger import Step
from belayer_env.policy import CheckpointPolicy, EveryStep, Never, parse_policy
from belayer_env.recovery import Budget, Recovery, Rung, ladder
from belayer_env.rollback import Rollback
from belayer_env.spec import ExecResult, Task, Tier
from belayer_env.standby import Standby
from belayer_env.store import Store
from tests.memory_sandbox import RANDOM, Faults, FaultyRuntime, FaultySandbox, MemoryRuntime


def ref(number: int, step: int) -> CheckpointRef:
    return CheckpointRef(
        id=f"ck-{number}", episode_id="ep-1", task_digest="d", step=step, tier=Tier.FULL, size_bytes=1
    )


def test_ladder_goes_from_the_newest_to_a_fresh_start() -> None:
    newest, older = ref(2, 5), ref(1, 3)
    assert ladder([(newest, 6), (older, 3)]) == (Rung(newest, 6), Rung(older, 3), Rung(None))
    assert ladder([]) == (Rung(None),)


def test_ladder_begins_with_the_standby_and_restores_the_same_checkpoint_next() -> None:
    newest, older = ref(2, 5), ref(1, 3)
    rungs = ladder([(newest, 5), (older, 3)], standby="ck-2")
    assert rungs == (Rung(newest, 5, is_standby=True), Rung(newest, 5), Rung(older, 3), Rung(None))
    assert str(rungs[0]) == "standby ck-2 (step 5)"


def test_ladder_ignores_a_standby_of_a_checkpoint_that_is_no_rung() -> None:
    assert ladder([(ref(1, 3), 3)], standby="ck-9") == (Rung(ref(1, 3), 3), Rung(None))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        yield store


class Bench:
    """An episode in memory, and a recovery of the test's own over its ledger."""

    def __init__(
        self,
        store: Store,
        replay: Literal["always", "never"] = "always",
        policy: CheckpointPolicy | None = None,
    ) -> None:
        self.faults = Faults()
        self.memory = MemoryRuntime()
        self.runtime = FaultyRuntime(self.memory, self.faults)
        self.task = Task(image="rootfs:/", setup=["touch /root/list"], replay=replay)
        self.store = store
        means = Means(store=store, runtime=self.runtime, policy=policy or Never())
        self.episode = Episode.begin(self.task, means)
        self.met: list[str] = []

    def recovery(self, **options: Any) -> Recovery:
        return Recovery(
            self.store,
            self.runtime,
            self.task,
            self.episode.id,
            on_fault=lambda fault: self.met.append(type(fault).__name__),
            retrying=options.pop("retrying", None),
            **options,
        )

    def told(self, *actions: str) -> None:
        for action in actions:
            assert isinstance(self.episode.step(action), Step)

    def damage(self, ref: CheckpointRef) -> None:
        directory = self.store.directory_of(ref)
        assert directory is not None
        (directory / "images" / "state.json").write_text("{")


@pytest.fixture
def bench(store: Store) -> Iterator[Bench]:
    bench = Bench(store)
    yield bench
    bench.episode.close()
    assert not any(sandbox.is_alive() for sandbox in bench.memory.made)
    assert store.homes() == []


@contextlib.contextmanager
def recovered(bench: Bench, **options: Any) -> Iterator[Any]:
    found = bench.recovery(**options).recover(bench.episode.ledger)
    try:
        yield found
    finally:
        found.sandbox.destroy()


def test_the_newest_checkpoint_is_restored_and_the_rest_replayed(bench: Bench) -> None:
    bench.told("A=1")
    newest = bench.episode.checkpoint()
    bench.told("A=$((A+3)); echo $A")
    with recovered(bench) as found:
        assert (found.rung, found.step, found.rollback) == (Rung(newest, 1), 2, None)
        assert found.sandbox.run("echo $A").output == "4\n"
    assert bench.met == []


@pytest.mark.parametrize(("num_struck", "rolled_back_to"), [(1, None), (2, None), (3, 0)])
def test_a_replay_that_the_oom_killer_has_struck_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, num_struck: int, rolled_back_to: int | None
) -> None:
    bench.told("A=1", "A=$((A+3)); echo $A")
    left, run = [num_struck], FaultySandbox.run

    def run_struck(sandbox: FaultySandbox, command: str, *, timeout_s: float | None = None) -> ExecResult:
        result = run(sandbox, command, timeout_s=timeout_s)
        if command == "A=1" and left[0]:
            left[0] -= 1
            return dataclasses.replace(result, output="Killed\n", oom_kills=1)
        return result

    monkeypatch.setattr(FaultySandbox, "run", run_struck)
    with recovered(bench) as found:
        if rolled_back_to is None:
            assert (found.step, found.rollback) == (2, None)
            assert found.sandbox.run("echo $A").output == "4\n"
        else:
            assert found.rollback.to_step == rolled_back_to  # the third time it is believed
    assert bench.met == ["SandboxOOM"] * min(num_struck, 2) + ["ContextDiverged"] * (num_struck == 3)


def test_a_replay_in_a_dying_sandbox_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kills a container from outside may take a job of the agent's first, and the shell say so."""
    bench.told("A=1", "A=$((A+3)); echo $A")
    left, run = [2], FaultySandbox.run

    def run_dying(sandbox: FaultySandbox, command: str, *, timeout_s: float | None = None) -> ExecResult:
        result = run(sandbox, command, timeout_s=timeout_s)
        if command == "A=1" and left[0]:
            left[0] -= 1
            sandbox.kill()
            return dataclasses.replace(result, output="Killed\n")
        return result

    monkeypatch.setattr(FaultySandbox, "run", run_dying)
    with recovered(bench) as found:
        assert (found.step, found.rollback) == (2, None)
        assert found.sandbox.run("echo $A").output == "4\n"
    assert bench.met == ["SandboxGone"] * 2


def test_a_standby_is_taken_only_as_that_of_the_checkpoint_asked_for(bench: Bench) -> None:
    bench.told("A=1")
    older = bench.episode.checkpoint()
    bench.told("A=2")
    newer = bench.episode.checkpoint()
    standby = Standby(bench.recovery().restored)
    with pytest.raises(SandboxGone):
        standby.take(newer.id)
    assert standby.prepare(older)
    # As when a late `prepare` has run between the choice of the rung and the swap.
    with pytest.raises(SandboxGone, match=newer.id):
        standby.take(newer.id)
    sandbox = standby.take(older.id)
    assert sandbox.run("echo $A").output == "1\n"
    sandbox.destroy()
    standby.drop()


def test_damaged_checkpoints_are_passed_by_each_tried_once(bench: Bench) -> None:
    refs = []
    for number in range(3):
        bench.told(f"A={number}")
        refs.append(bench.episode.checkpoint())
    for damaged in refs[1:]:
        bench.damage(damaged)
    with recovered(bench) as found:
        assert [str(attempt.rung.checkpoint.id) for attempt in found.attempts] == [r.id for r in refs[::-1]]
        assert found.sandbox.run("echo $A").output == "2\n"
    assert bench.met == ["CheckpointCorrupt"] * 2


@pytest.mark.parametrize("lost", [SandboxGone, SandboxFrozen, SandboxHung])
def test_a_sandbox_lost_under_its_replay_costs_a_try_and_not_the_rung(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, lost: type[Fault]
) -> None:
    """Frozen or stopped under the replay on the last rung, the episode used to be given up."""
    bench.told("A=1", "echo one >>/root/list")
    failing = iter([lost("lost", begun=True)] * 2)
    kind = type(bench.episode.sandbox)
    original = kind.run

    def run(sandbox: Any, command: str, *, timeout_s: float | None = None) -> Any:
        if command == "echo one >>/root/list" and (fault := next(failing, None)) is not None:
            raise fault
        return original(sandbox, command, timeout_s=timeout_s)

    monkeypatch.setattr(kind, "run", run)
    with recovered(bench) as found:
        assert len(found.attempts) == 3
        assert found.sandbox.run("cat /root/list").output == "one\n"
    assert bench.met == [lost.__name__] * 2


def test_a_restore_that_fails_is_tried_twice(bench: Bench) -> None:
    bench.told("A=1")
    newest = bench.episode.checkpoint()
    bench.faults.arm("restore", "before", "refuse")
    with recovered(bench) as found:
        assert found.rung == Rung(newest, 1)
    bench.faults.arm("restore", "before", "refuse")
    bench.faults.arm("restore", "before", "refuse")
    with recovered(bench) as found:
        assert found.rung == Rung(None)


def test_a_start_that_fails_is_tried_as_often_as_the_budget_has_it(bench: Bench) -> None:
    bench.told("A=1")
    for _ in range(3):
        bench.faults.arm("create", "before", "refuse")
    with pytest.raises(RecoveryFailed) as failure:
        bench.recovery(budget=Budget(attempts_per_rung=2)).recover(bench.episode.ledger)
    assert len(failure.value.tried) == 2
    with recovered(bench, budget=Budget(attempts_per_rung=2)) as found:
        assert len(found.attempts) == 2


def test_a_try_is_kept_for_the_fresh_start_however_many_checkpoints_are_bad(bench: Bench) -> None:
    for number in range(6):
        bench.told(f"A={number}")
        bench.damage(bench.episode.checkpoint())
    with recovered(bench, budget=Budget(attempts=4)) as found:
        assert found.rung == Rung(None)
        assert len(found.attempts) == 5
        assert found.sandbox.run("echo $A").output == "5\n"


def test_time_runs_out(bench: Bench) -> None:
    bench.told("A=1")
    clock = itertools.count(0, 100)
    with pytest.raises(RecoveryFailed, match="no way back to step 1"):
        bench.recovery(budget=Budget(seconds=10), clock=lambda: float(next(clock))).recover(
            bench.episode.ledger
        )


def test_a_setup_that_fails_now_fails_the_rung(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.told("A=1")

    def fail(recovery: Recovery) -> Any:
        raise TaskSetupFailed("setup failed")

    monkeypatch.setattr(Recovery, "fresh", fail)
    with pytest.raises(RecoveryFailed) as failure:
        bench.recovery().recover(bench.episode.ledger)
    assert failure.value.tried == ("fresh: setup failed",)


def test_an_engine_that_is_away_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    away = iter([EngineUnavailable("restarting")] * 3)
    original = MemoryRuntime.create

    def create(runtime: MemoryRuntime, *args: Any) -> Any:
        if (fault := next(away, None)) is not None:
            raise fault
        return original(runtime, *args)

    monkeypatch.setattr(MemoryRuntime, "create", create)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(EngineUnavailable), stop=tenacity.stop_after_attempt(4)
    )
    with recovered(bench, retrying=retrying) as found:
        assert len(found.attempts) == 1
    assert len(bench.store.homes()) == 1  # the episode's own


def test_divergence_after_divergence_cuts_to_before_the_first(bench: Bench) -> None:
    bench.told("A=1", RANDOM, "echo one >>/root/list", RANDOM, "echo $A")
    with recovered(bench) as found:
        assert found.step == 1
        assert (found.rollback.to_step, found.rollback.diverged_step) == (1, 2)
        assert found.sandbox.run("cat /root/list").output == ""
    assert bench.met == ["ContextDiverged"]


def test_a_checkpoint_past_the_divergence_is_no_rung(bench: Bench) -> None:
    bench.told("A=1", RANDOM)
    later = bench.episode.checkpoint()
    bench.told(RANDOM)
    with recovered(bench) as found:
        assert (found.rung, found.step) == (Rung(later, 2), 2)
        assert found.rollback.diverged_step == 3
    bench.damage(later)
    with recovered(bench) as found:
        assert (found.rung, found.step) == (Rung(None), 1)
        assert found.rollback.diverged_step == 2


def test_what_must_not_be_replayed_goes_back_to_its_checkpoint(store: Store) -> None:
    bench = Bench(store, replay="never")
    try:
        bench.told("A=1")
        kept = bench.episode.checkpoint()
        bench.told("A=2", "A=3")
        with recovered(bench) as found:
            assert (found.rung, found.step, found.rollback.to_step) == (Rung(kept, 1), 1, 1)
            assert found.sandbox.run("echo $A").output == "1\n"
        bench.damage(kept)
        with recovered(bench) as found:
            assert (found.rung, found.step, found.rollback.to_step) == (Rung(None), 0, 0)
    finally:
        bench.episode.close()


def test_a_passing_fault_of_a_restore_does_not_cost_context_that_cannot_be_replayed(store: Store) -> None:
    bench = Bench(store, replay="never")
    try:
        bench.told("A=1")
        bench.episode.checkpoint()
        bench.faults.arm("restore", "before", "refuse")
        with recovered(bench) as found:
            assert (found.step, found.rollback) == (1, None)
    finally:
        bench.episode.close()


def test_what_had_not_begun_is_run_again_in_the_same_sandbox(bench: Bench) -> None:
    bench.faults.arm("run", "before", "refuse")
    bench.told("echo one >>/root/list")
    assert len(bench.memory.made) == 1
    bench.told("cat /root/list")
    assert bench.episode.ledger.steps[-1].observation == "one\n"
    assert bench.episode.telemetry.recoveries == []


@pytest.mark.parametrize(("when", "kind"), [("before", "hang"), ("middle", "kill"), ("after", "refuse")])
def test_what_may_have_begun_is_run_again_in_the_state_before_it(bench: Bench, when: str, kind: str) -> None:
    bench.told("echo one >>/root/list")
    bench.faults.arm("run", when, kind)
    bench.told("echo two >>/root/list", "cat /root/list")
    assert bench.episode.ledger.steps[-1].observation == "one\ntwo\n"
    assert len(bench.episode.telemetry.recoveries) == 1


def test_an_action_that_takes_its_sandbox_down_each_time_is_to_blame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.told("A=1")
    original = FaultySandbox.run

    def run(sandbox: FaultySandbox, command: str, *, timeout_s: float | None = None) -> Any:
        if command == "A=2":
            sandbox.kill()
            raise SandboxGone("killed", begun=True)
        return original(sandbox, command, timeout_s=timeout_s)

    monkeypatch.setattr(FaultySandbox, "run", run)
    with pytest.raises(RecoveryFailed, match=f"down {ACTION_ATTEMPTS} times"):
        bench.episode.step("A=2")
    bench.told("echo $A")
    assert [step.observation for step in bench.episode.ledger.steps] == ["", "1\n"]


def test_a_sandbox_lost_before_the_action_began_is_not_held_against_the_action(bench: Bench) -> None:
    """It used to be: a kill at rest and two in mid-command, and the action was to blame."""
    bench.told("A=1")
    bench.episode.checkpoint()
    for _ in range(4):
        bench.faults.arm("run", "before", "kill")
    for _ in range(ACTION_ATTEMPTS - 1):
        bench.faults.arm("run", "after", "kill")
    bench.episode.sandbox.kill()
    bench.told("A=$((A+3)); echo $A")
    assert bench.episode.ledger.steps[-1].observation == "4\n"
    assert len(bench.faults.hits) == 4 + ACTION_ATTEMPTS - 1


def test_forks_of_an_episode_with_a_rollback_to_tell_are_told_too(bench: Bench) -> None:
    """They used to go on with a context that their sandboxes contradicted."""
    bench.told("A=1", RANDOM, "echo $A")
    bench.episode.sandbox.kill()
    forks = bench.episode.fork(2)
    try:
        for episode in (bench.episode, *forks):
            told = episode.step("echo $A")
            assert isinstance(told, Rollback)
            assert told.to_step == 1
            after = episode.step("echo $A")
            assert isinstance(after, Step)
            assert (after.number, after.observation) == (2, "1\n")
    finally:
        for fork in forks:
            fork.close()


@pytest.mark.parametrize(
    ("owner", "call", "is_lost"),
    [
        (FaultySandbox, "memory_bytes", False),
        (FaultySandbox, "save", True),
        (Store, "staging", False),
        (Store, "publish", False),
        (Store, "prune", False),
    ],
)
def test_whatever_ends_a_checkpoint_in_the_background_is_noted_and_the_episode_goes_on(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    call: str,
    is_lost: bool,
) -> None:
    bench = Bench(store, policy=EveryStep())
    bench.told("A=1")
    bench.episode.settle()

    def odd(*args: Any, **kwargs: Any) -> None:
        raise LookupError("something nobody thought of")

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, odd)
        bench.told("A=$((A+3)); echo $A")
        bench.episode.settle()
    noted = bench.episode.telemetry.faults[-1]
    assert (noted.kind, noted.step) == ("RuntimeFailed", 2)
    assert "LookupError: something nobody thought of" in noted.message
    assert "something nobody thought of" in caplog.text
    bench.told("echo $A", "echo $A")
    assert [step.observation for step in bench.episode.ledger.steps] == ["", "4\n", "4\n", "4\n"]
    assert len(bench.episode.telemetry.recoveries) == is_lost
    bench.episode.close()


def test_a_standby_that_cannot_be_made_for_whatever_reason_is_none(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def odd(ref: CheckpointRef) -> Any:
        raise LookupError("something nobody thought of")

    standby = Standby(odd)
    assert not standby.prepare(bench.episode.checkpoint())
    assert standby.refusal == "something nobody thought of"
    assert "LookupError" in caplog.text
    standby.drop()


@pytest.mark.parametrize("call", ["cut_ledger", "forget_after"])
def test_a_full_disk_at_a_rollback_never_leaves_a_sandbox_behind_its_ledger(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It used to: the step failed, and the next one ran in the state of a prefix that nobody was told of."""
    bench.told("A=1", RANDOM, "A=2")
    bench.episode.sandbox.kill()

    def full(*args: Any) -> None:
        raise StoreFull("no room")

    monkeypatch.setattr(Store, call, full)
    told: object = None
    with contextlib.suppress(StoreFull):
        told = bench.episode.step("echo $A")
    monkeypatch.undo()
    told = told or bench.episode.step("echo $A")
    assert isinstance(told, Rollback)
    assert told.to_step == 1
    bench.told("echo $A")
    assert [step.observation for step in bench.episode.ledger.steps] == ["", "1\n"]


def test_a_restore_whose_ledger_cannot_be_written_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.told("A=1")
    ref = bench.episode.checkpoint()
    bench.told("A=2")

    def full(*args: Any) -> None:
        raise StoreFull("no room")

    monkeypatch.setattr(Store, "rewind_ledger", full)
    with pytest.raises(StoreFull):
        bench.episode.restore(ref)
    monkeypatch.undo()
    bench.told("echo $A")
    assert [step.observation for step in bench.episode.ledger.steps] == ["", "", "2\n"]


def test_an_interrupt_after_the_ledger_was_written_leaves_no_untold_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step used to be refused, as it did not follow the one on disk."""
    original = Store.append_step

    def interrupted(*args: Any) -> None:
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "append_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.episode.step("A=1")
    monkeypatch.undo()
    bench.told("echo $A")
    assert [step.observation for step in bench.episode.ledger.steps] == ["\n"]


def test_forks_from_a_checkpoint_that_was_moved_up_have_all_steps(store: Store) -> None:
    bench = Bench(store, policy=parse_policy("adaptive:faults_per_s=1000.0"))
    try:
        bench.told("A=1")
        bench.episode.settle()
        bench.told("echo $A", "echo $A")  # changes nothing
        bench.episode.settle()
        (fork,) = bench.episode.fork(1)
        try:
            assert [step.action for step in fork.ledger.steps] == ["A=1", "echo $A", "echo $A"]
            fork.sandbox.kill()
            told = fork.step("A=$((A+3)); echo $A")
            assert isinstance(told, Step)
            assert (told.number, told.observation) == (4, "4\n")
            assert fork.telemetry.recoveries[-1].num_replayed == 0
        finally:
            fork.close()
    finally:
        bench.episode.close()
