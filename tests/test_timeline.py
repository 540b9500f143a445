"""What is kept of an episode, the bars it becomes, and the picture of them."""

from __future__ import annotations

import os
import struct
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from belayer_env import ContainerEnv, Task
from belayer_env.cli.main import Settings, make_app
from belayer_env.errors import InvalidInput, PlottingUnavailable
from belayer_env.picture import draw_episode
from belayer_env.policy import Never
from belayer_env.spec import Tier
from belayer_env.store import Store
from belayer_env.telemetry import (
    CheckpointRecord,
    DecisionRecord,
    FaultRecord,
    RecoveryRecord,
    StepRecord,
    Telemetry,
)
from belayer_env.timeline import Bar, Kind, in_words, lanes, rows, summary
from belayer_env.timelines import FIRST_WRITE_STEPS, MOST_KEPT, Recorder, Timelines

PNG = b"\x89PNG\r\n\x1a\n"


def episode() -> Telemetry:
    """A reset of 1 s; a checkpoint that is hidden, one that step 2 waits for, a fault in step 2."""
    return Telemetry(
        reset_s=1.0,
        steps=[
            StepRecord(step=1, command_s=1.0, total_s=1.0, waited_s=0.00001, started_s=3.0),
            StepRecord(step=2, command_s=1.0, total_s=3.0, waited_s=0.5, started_s=5.0),
        ],
        checkpoints=[
            checkpoint(1.25, held_s=0.5, total_s=1.0, hidden=True),
            checkpoint(4.5, held_s=1.0, total_s=1.25, hidden=False),
        ],
        decisions=[DecisionRecord(step=0, checkpoint=True, reason="there is none yet")],
        faults=[FaultRecord(step=2, kind="SandboxOOM", message="no memory", at_s=5.75)],
        recoveries=[
            RecoveryRecord(
                step=2, rung="restore ck-2 (step 1)", tried=("a",), num_replayed=0, total_s=0.5, started_s=6.0
            )
        ],
    )


def checkpoint(at_s: float, *, held_s: float, total_s: float, hidden: bool) -> CheckpointRecord:
    return CheckpointRecord(
        step=1, id="ck-1", pause_s=0.25, held_s=held_s, total_s=total_s, hidden=hidden, started_s=at_s
    )


def spans(*kinds: Kind) -> list[tuple[float, float]]:
    return [(bar.began_s, bar.ended_s) for bar in lanes(episode()).of(*kinds)]


class TestLanes:
    def test_a_bubble_lies_between_the_end_of_a_step_and_the_next(self) -> None:
        assert spans(Kind.RESET) == [(0.0, 1.0)]
        assert spans(Kind.BUBBLE) == [(1.0, 3.0), (4.0, 5.0)]

    def test_a_step_ends_with_its_command_after_its_waiting(self) -> None:
        assert spans(Kind.COMMAND) == [(3.0, 4.0), (7.0, 8.0)]
        assert spans(Kind.WAIT) == [(5.0, 5.5)]

    def test_a_checkpoint_is_exposed_from_when_a_step_waits_for_it(self) -> None:
        assert spans(Kind.HIDDEN) == [(1.25, 1.75), (4.5, 5.0)]
        assert spans(Kind.EXPOSED) == [(5.0, 5.5)]

    def test_a_checkpoint_that_was_asked_for_is_exposed_whole(self) -> None:
        asked = Telemetry(checkpoints=[checkpoint(2.0, held_s=0.5, total_s=0.5, hidden=False)])
        assert [bar.kind for bar in lanes(asked).bars] == [Kind.EXPOSED, Kind.PAUSE]

    def test_the_pause_is_a_part_of_it_and_publishing_follows(self) -> None:
        assert spans(Kind.PAUSE) == [(1.5, 1.75), (5.25, 5.5)]
        assert spans(Kind.PUBLISH) == [(1.75, 2.25), (5.5, 5.75)]

    def test_faults_and_recoveries_say_what_they_were(self) -> None:
        found = lanes(episode())
        assert found.of(Kind.FAULT) == (Bar(Kind.FAULT, 5.75, 5.75, "SandboxOOM"),)
        assert found.of(Kind.RECOVERY) == (Bar(Kind.RECOVERY, 6.0, 6.5, "SandboxOOM: restore, 500 ms"),)
        assert found.end_s == 8.0

    def test_nothing_happened_is_no_bar(self) -> None:
        assert lanes(Telemetry()).bars == ()
        assert rows(lanes(Telemetry()), 0.0, 0.0) == [(0.0, 0.0)]

    @pytest.mark.parametrize(("num_steps", "num_rows"), [(0, 1), (110, 1), (111, 2), (10_000, 3)])
    def test_a_long_episode_is_folded(self, num_steps: int, num_rows: int) -> None:
        steps = [StepRecord(step=n, command_s=1, total_s=1, started_s=2 * n) for n in range(num_steps)]
        found = rows(lanes(Telemetry(steps=steps)), 0.0, 2.0 * num_steps)
        assert len(found) == num_rows
        assert found[0][0] == 0.0
        assert found[-1][1] == pytest.approx(2.0 * num_steps)

    def test_a_line_says_what_was_hidden(self) -> None:
        assert summary(episode()) == (
            "2 steps in 8 s; 2 checkpoints, 1 hidden; steps waited 500 ms for checkpoints (6.2 %); 1 fault; "
            "1 recovery in 500 ms"
        )
        assert (
            summary(Telemetry())
            == "0 steps in 0 ms; 0 checkpoints, 0 hidden; no step waited for one; 0 faults"
        )

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(0.00291, "2.91 ms"), (2.5, "2.5 s"), (250, "4 min 10 s"), (7200, "2 h 00 min")],
    )
    def test_times_are_said_shortly(self, seconds: float, words: str) -> None:
        assert in_words(seconds) == words


class TestPicture:
    @pytest.mark.parametrize("telemetry", [episode(), Telemetry()])
    def test_it_is_a_png_of_its_size(self, telemetry: Telemetry, tmp_path: Path) -> None:
        path = tmp_path / "out"
        draw_episode(telemetry, path, title="an episode")
        data = path.read_bytes()
        assert data.startswith(PNG)
        assert struct.unpack(">II", data[16:24]) == (1600, 600)

    def test_without_matplotlib_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(PlottingUnavailable, match=r"pip install 'belayer\[plot\]'"):
            draw_episode(episode(), tmp_path / "out.png", title="")
        assert not (tmp_path / "out.png").exists()


class TestKept:
    def test_it_comes_back_as_it_was(self, tmp_path: Path) -> None:
        with Store(tmp_path) as store:
            store.timelines.keep("ep-a", episode(), is_closed=False)
            found = store.timelines.load("ep-a")
            assert found.telemetry.to_json() == episode().to_json()
            assert found.telemetry.recoveries == episode().recoveries
            assert not found.is_closed
            store.timelines.keep("ep-a", episode(), is_closed=True)
            assert store.timelines.load("ep-a").is_closed
            assert not [*(tmp_path / "tmp").iterdir()]

    @pytest.mark.parametrize("name", ["ep-b", "", "../ep-a"])
    def test_of_an_unknown_episode_nothing_is_kept(self, name: str, tmp_path: Path) -> None:
        with Store(tmp_path) as store, pytest.raises(InvalidInput, match="nothing is kept"):
            store.timelines.load(name)

    @pytest.mark.parametrize("text", ["", "{}", '{"is_closed": true, "telemetry": {"reset_s": 1}}', "[1]"])
    def test_a_file_of_another_version_is_named(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "ep-a.json").write_text(text)
        with pytest.raises(InvalidInput, match="cannot be read by this version"):
            Timelines(tmp_path, lambda: tmp_path / "making").load("ep-a")

    def test_only_the_newest_stay(self, tmp_path: Path) -> None:
        kept = Timelines(tmp_path, lambda: tmp_path / "making")
        for number in range(MOST_KEPT + 3):
            kept.keep(f"ep-{number}", Telemetry(), is_closed=True)
            os.utime(tmp_path / f"ep-{number}.json", (number, number))
        assert kept.episode_ids() == [f"ep-{number}" for number in range(MOST_KEPT + 2, 2, -1)]


class TestRecorder:
    def test_it_writes_at_a_fault_and_when_enough_was_done(self, tmp_path: Path) -> None:
        kept, told = Timelines(tmp_path, lambda: tmp_path / "making"), Telemetry()
        recorder = Recorder(kept, "ep-a", told)

        def written(num_steps: int) -> int:
            told.steps += [StepRecord(step=1, command_s=1, total_s=1)] * num_steps
            recorder.look()
            recorder.settle()
            return len(kept.load("ep-a").telemetry.steps) if kept.episode_ids() else 0

        assert written(FIRST_WRITE_STEPS - 1) == 0
        told.faults += episode().faults
        assert written(0) == FIRST_WRITE_STEPS - 1
        assert written(FIRST_WRITE_STEPS - 1) == FIRST_WRITE_STEPS - 1
        assert written(1) == 2 * FIRST_WRITE_STEPS - 1
        recorder.close()
        assert kept.load("ep-a").is_closed

    def test_of_an_episode_without_a_step_nothing_is_kept(self, tmp_path: Path) -> None:
        kept = Timelines(tmp_path, lambda: tmp_path / "making")
        Recorder(kept, "ep-a", Telemetry(reset_s=1.0)).close()
        assert kept.episode_ids() == []

    def test_a_disk_that_will_not_have_it_harms_nobody(self, tmp_path: Path) -> None:
        recorder = Recorder(Timelines(tmp_path / "gone", lambda: tmp_path / "x"), "ep-a", episode())
        recorder.look()
        recorder.close()
        assert not [*tmp_path.iterdir()]


class TestCommand:
    def test_it_lists_and_draws(self, tmp_path: Path) -> None:
        root, png = tmp_path / "store", tmp_path / "out.png"
        with Store(root) as store:
            assert "no episodes" in belayer("timeline", "--store", str(root))
            name = store.begin_episode(
                Task(image="rootfs:/"), runtime="runc", policy=str(Never()), tier=Tier.FULL
            )
            store.timelines.keep(name, episode(), is_closed=True)
        assert name in belayer("timeline", "--store", str(root))
        assert "2 checkpoints, 1 hidden" in belayer("timeline", name, "--png", str(png), "--store", str(root))
        assert png.read_bytes().startswith(PNG)
        part = ["timeline", name, "--from", "9", "--png", str(png), "--store", str(root)]
        with pytest.raises(InvalidInput, match="nothing lies between"):
            CliRunner().invoke(make_app(Settings()), part, catch_exceptions=False)

    @pytest.mark.criu
    def test_an_episode_can_be_drawn_when_it_has_ended(self, store_dir: Path, image: str) -> None:
        root = store_dir / "timeline"
        with ContainerEnv(Task(image=image), runtime="runc", policy="every-step", store=root) as env:
            env.reset()
            env.step("a=1")
            env.episode.sandbox.kill()
            env.step("echo $a")
            name = env.episode.id
            with Store(root) as store:
                until = time.monotonic() + 10
                while name not in store.timelines.episode_ids() and time.monotonic() < until:
                    time.sleep(0.01)
                assert not store.timelines.load(name).is_closed
        with Store(root) as store:
            found = store.timelines.load(name)
        assert found.is_closed
        kinds = {bar.kind for bar in lanes(found.telemetry).bars}
        assert {Kind.RESET, Kind.COMMAND, Kind.BUBBLE, Kind.PAUSE, Kind.FAULT, Kind.RECOVERY} <= kinds


def belayer(*words: str) -> str:
    done = CliRunner().invoke(make_app(Settings()), words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output
