"""The recovery bench: its arithmetic by hand, and a tiny run for real. No figure is judged here."""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from belayer_bench.machine import Machine
from belayer_bench.report import Target
from belayer_env.bench import overhead
from belayer_env.bench.overhead import (
    Arm,
    Forgetful,
    Span,
    TimedStep,
    at_risk_s,
    decision_kind,
    overhead_of,
    wait_s,
)
from belayer_env.bench.recovery import Comeback, Comebacks, Forked
from belayer_env.bench.recovery_plot import draw_recoveries, waits_back
from belayer_env.bench.swe import ACTIONS, long_episode
from belayer_env.cli.bench_recovery import summarise
from belayer_env.policy import Adaptive, Moment
from belayer_env.store import Store
from belayer_env.telemetry import CheckpointRecord, DecisionRecord, StepRecord, Telemetry

MACHINE = Machine(cpu="some cpu", cores=2, memory_bytes=2**30, kernel="6.18")


def comebacks() -> Comebacks:
    return Comebacks(
        episode_s=30.0,
        replays=[Comeback(recovery_s=30.0, answered_s=30.1)],
        restores=[Comeback(recovery_s=s, answered_s=s + 0.01) for s in (0.1, 0.9, 0.2)],
        swaps=[Comeback(recovery_s=0.003, answered_s=0.01)],
        forks=[Forked(call_s=0.7, checkpoint_s=0.2, answered_s=0.84)],
    )


def step(number: int, began: float, took_s: float, waited_s: float = 0.0) -> TimedStep:
    return TimedStep(number=number, span=Span(began, began + took_s), waited_s=waited_s)


def telemetry(*checkpoints: tuple[float, float], hidden: bool = True) -> Telemetry:
    """Of an episode that began at 0, with checkpoints of step 1 that began and took so long."""
    records = [
        CheckpointRecord(step=1, id="ck", pause_s=0.01, held_s=0.05, total_s=s, hidden=hidden, started_s=at)
        for at, s in checkpoints
    ]
    return Telemetry(checkpoints=records, began=0.0)


def took_a_step(told: Telemetry) -> Telemetry:
    told.steps.append(StepRecord(step=1, command_s=1.0, total_s=1.0))
    return told


def arms() -> dict[str, Arm]:
    """Two steps in 20 s; `adaptive` waits 0.1 s for a checkpoint, and is slower by 0.1 s beside it."""
    return {
        "never": Arm("never", 1, 18.0, [step(1, 0.0, 1.0), step(2, 10.0, 1.0)], [took_a_step(telemetry())]),
        "adaptive": Arm(
            "adaptive",
            1,
            18.0,
            [step(1, 5.0, 1.0), step(2, 15.0, 1.2, waited_s=0.1)],
            [took_a_step(telemetry((14.9, 0.3), hidden=False))],
        ),
    }


class TestRecoveryFigures:
    def test_ratios_are_of_the_whole_step_that_met_the_fault(self) -> None:
        report = summarise(comebacks(), {}, MACHINE).to_json()
        assert report["medians"]["restore_ms"] == 200.0
        assert report["medians"]["restore_answered_ms"] == 210.0
        assert report["medians"]["standby_swap_ms"] == 3.0
        assert report["ratios"]["replay_over_restore"] == pytest.approx(30.1 / 0.21, abs=1e-3)
        assert report["ratios"]["replay_over_standby"] == pytest.approx(3010)
        assert report["ratios"]["fork8_over_restore"] == pytest.approx(4.0)
        assert report["ratios"]["fork8_with_checkpoint_over_restore"] == pytest.approx(1.04 / 0.21, abs=1e-3)

    def test_each_target_is_checked_in_its_direction(self) -> None:
        checks = summarise(comebacks(), {}, MACHINE).to_json()["checks"]
        assert checks["replay_over_restore"]["at_least"] == 10
        assert checks["fork8_over_restore"]["at_most"] == 4
        assert all(checks[name]["met"] for name in checks)
        assert not Target(at_least=10).check(9.99)["met"]
        assert Target(at_least=10).check(10)["met"]

    @pytest.mark.parametrize("bounds", [{}, {"at_most": 1.0, "at_least": 1.0}])
    def test_a_target_has_one_bound(self, bounds: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="at_most or at_least"):
            Target(**bounds)

    def test_figures_of_shrunk_waits_are_held_against_no_target(self) -> None:
        shrunk = summarise(comebacks(), arms(), MACHINE, time_scale=0.1).to_json()
        assert "overhead_adaptive_pct" in shrunk["medians"]
        assert "overhead_adaptive_pct" not in shrunk["checks"]
        assert "overhead_adaptive_pct" in summarise(comebacks(), arms(), MACHINE).to_json()["checks"]


class TestOverhead:
    def test_it_is_waiting_and_slowdown_over_the_wall_time_of_never(self) -> None:
        found = arms()
        cost = overhead_of(found["adaptive"], found["never"], list(found.values()))
        assert cost.waited_pct == pytest.approx(100 * 0.1 / 20)
        assert cost.slowdown_pct == pytest.approx(100 * 0.1 / 20)
        assert cost.total_pct == pytest.approx(1.0)

    def test_what_other_arms_checkpoints_slow_down_is_not_counted(self) -> None:
        found = arms()
        found["adaptive"].num_envs = 2
        found["adaptive"].steps.append(step(1, 30.0, 9.0))  # beside a checkpoint of every-step
        found["every-step"] = Arm("every-step", 1, 18.0, [], [telemetry((29.0, 2.0))])
        cost = overhead_of(found["adaptive"], found["never"], list(found.values()))
        assert cost.slowdown_pct == pytest.approx(100 * 2 * 0.1 / 20)

    def test_never_beside_a_checkpoint_is_no_measure_of_the_undisturbed(self) -> None:
        found = arms()
        found["never"].steps.append(step(2, 15.0, 7.0))  # beside the checkpoint of adaptive
        cost = overhead_of(found["adaptive"], found["never"], list(found.values()))
        assert cost.slowdown_pct == pytest.approx(100 * 0.1 / 27)

    def test_shares_and_decisions_are_counted(self) -> None:
        found = arms()
        told = found["adaptive"].telemetries[0]
        told.decisions += [
            DecisionRecord(step=n, checkpoint=False, reason="nothing changed: the last one is moved up")
            for n in (1, 2, 3)
        ]
        told.decisions.append(
            DecisionRecord(step=4, checkpoint=True, reason="9 s at risk outweigh a cost of")
        )
        figures = overhead.figures(found)
        assert figures["hidden_adaptive_pct"] == 0
        assert figures["unchanged_adaptive_pct"] == 75
        assert figures["decisions_adaptive_forced"] == 1
        assert figures["checkpoints_adaptive"] == 1

    def test_of_two_decisions_in_one_bubble_the_later_counts(self) -> None:
        found = arms()
        reasons = ("a bubble of 9 s hides a cost of 1 s", "the host was busy with other checkpoints")
        found["adaptive"].telemetries[0].decisions += [
            DecisionRecord(step=1, checkpoint=False, reason=reason) for reason in reasons
        ]
        figures = overhead.figures(found)
        assert figures["decisions_adaptive_host_busy"] == 1
        assert "decisions_adaptive_hidden" not in figures

    def test_at_risk_is_what_no_checkpoint_contains(self) -> None:
        told = telemetry((1.0, 0.1))  # of step 1
        told.steps += [StepRecord(step=n, command_s=n, total_s=n) for n in (1, 2, 3, 4)]
        told.decisions.append(DecisionRecord(step=4, checkpoint=False, reason="nothing changed: moved up"))
        assert at_risk_s(told) == [0, 2, 5, 0]

    def test_a_bench_learns_nothing_and_teaches_nothing(self, tmp_path: Path) -> None:
        with Store(tmp_path) as store, Forgetful(tmp_path) as forgetful:
            store.remember("bubbles", [1.0])
            forgetful.remember("bubbles", [2.0])
            assert forgetful.fact("bubbles") is None
            assert store.fact("bubbles") == [1.0]

    @pytest.mark.parametrize(
        ("moment", "kind"),
        [
            (Moment(step=2, last_checkpoint_step=1, is_unchanged=True), "unchanged"),
            (Moment(step=2, last_checkpoint_step=2), "nothing_at_risk"),
            (Moment(step=2, last_checkpoint_step=1, predicted_bubble_s=9, predicted_cost_s=1), "hidden"),
            (Moment(step=2, last_checkpoint_step=1, predicted_cost_s=1), "would_not_hide"),
            (
                Moment(step=2, last_checkpoint_step=1, at_risk_s=9, predicted_cost_s=1, faults_per_s=1),
                "forced",
            ),
        ],
    )
    def test_every_sentence_of_the_policy_is_known(self, moment: Moment, kind: str) -> None:
        assert decision_kind(Adaptive().decide(moment).reason) == kind

    def test_waits_are_the_same_in_every_run_and_of_the_right_middle(self) -> None:
        waits = [wait_s(1, env, step) for env in range(8) for step in range(1, 251)]
        assert waits[:3] == [wait_s(1, 0, step) for step in (1, 2, 3)]
        assert statistics.median(waits) == pytest.approx(4.0, rel=0.1)
        assert statistics.fmean(waits) == pytest.approx(4.8, rel=0.1)

    def test_an_episode_of_any_length_changes_something_every_fourth_step(self) -> None:
        assert len(long_episode(50)) == 50
        assert ">>" in long_episode(4)[3]
        assert long_episode(3) == long_episode(50)[:3]


def test_the_episode_has_twenty_actions() -> None:
    assert len(ACTIONS) == 20


def test_the_picture_has_a_bar_for_each_way_back_and_lanes_for_each_policy(tmp_path: Path) -> None:
    assert waits_back(comebacks()) == {
        "fresh container + replay": 30.1,
        "restore of the newest checkpoint": pytest.approx(0.21),
        "standby swap": 0.01,
        "fork(8), all of them": 0.84,
    }
    found, path = arms(), tmp_path / "out.png"
    draw_recoveries(comebacks(), {}, path)
    without = _pixels(path)
    for arm in found.values():
        arm.drilled = arm.telemetries[0]
    draw_recoveries(comebacks(), found, path)
    assert without[0] == _pixels(path)[0] == 1600
    assert without[1] < _pixels(path)[1]


def _pixels(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.criu
def test_a_tiny_run_for_real(store_dir: Path) -> None:
    store = store_dir / "bench-recovery"
    words = [
        "recovery",
        "--json",
        "--rounds",
        "1",
        "--actions",
        "4",
        "--steps",
        "2",
        "--envs",
        "1",
        "--time-scale",
        "0.02",
    ]
    command = [sys.executable, "-c", "from belayer_env.cli.main import main; main()", "bench", *words]
    done = subprocess.run(
        [*command, "--store", str(store), "--plot", str(store_dir / "out.png")],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report.keys() == {"bench", "machine", "peers", "medians", "ratios", "checks", "notes"}
    assert report["bench"] == "recovery"
    names = {"replay_over_restore", "replay_over_standby", "fork8_over_restore"}
    assert names <= report["ratios"].keys()
    assert report["checks"].keys() == names | {"standby_swap_ms"}
    assert {"standby_swap_ms", "overhead_adaptive_pct", "overhead_every_step_pct"} <= report["medians"].keys()
    assert _pixels(store_dir / "out.png")[0] == 1600
    (store_dir / "out.png").unlink()
    assert not [*(store / "sandboxes").iterdir(), *(store / "checkpoints").iterdir()]
