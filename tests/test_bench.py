"""The benches: their arithmetic and their order by hand, and both run for real. No figure is judged here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from belayer_bench.machine import Machine, kernel_bytes, process_bytes
from belayer_bench.report import Peer, Target, quantile
from belayer_env.bench.checkpoint import TARGETS, Figures, compare, race
from belayer_env.bench.contender import LeftOut, Sample
from belayer_env.bench.density import Crowd, summarise
from belayer_env.bench.docker import Docker
from belayer_env.bench.podman import Podman
from belayer_env.bench.timing import PeerFailed, words_of

BENCH = [sys.executable, "-c", "from belayer_env.cli.main import main; main()", "bench"]

MACHINE = Machine(cpu="some cpu", cores=2, memory_bytes=2**30, kernel="6.18")


def sample(seconds: float) -> Sample:
    return Sample(pause_s=seconds, checkpoint_s=2 * seconds, restore_s=3 * seconds, step_s=seconds / 10)


class FakeContender:
    """Takes ``seconds`` for everything; cannot start, or breaks in a round, when told so."""

    version = "1.0"

    def __init__(self, name: str, log: list[str], *, seconds: float = 1.0, absent: str = "") -> None:
        self.name = name
        self.breaks_in: int | None = None
        self.closed = 0
        self._log = log
        self._seconds = seconds
        self._absent = absent
        self._rounds = 0

    def start(self) -> None:
        if self._absent:
            raise LeftOut(self._absent)

    def round(self) -> Sample:
        self._rounds += 1
        self._log.append(self.name)
        if self._rounds == self.breaks_in:
            raise PeerFailed("it fell over")
        return sample(self._seconds)

    def close(self) -> None:
        self.closed += 1


def no_report(text: str) -> None:
    pass


def belayer_bench(*words: str) -> dict[str, Any]:
    done = subprocess.run([*BENCH, *words], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


class TestRace:
    def test_contenders_take_turns_and_each_round_begins_with_another(self) -> None:
        log: list[str] = []
        race(FakeContender("a", log), [FakeContender("b", log)], rounds=3, report=no_report)
        assert log == ["a", "b", "b", "a", "a", "b"]

    def test_a_peer_that_cannot_run_is_left_out_by_name(self) -> None:
        absent = FakeContender("docker", [], absent="not installed")
        figures = race(FakeContender("belayer", []), [absent], rounds=1, report=no_report)
        assert figures.peers == {"docker": Peer(left_out="not installed")}
        assert list(figures.samples) == ["belayer"]
        assert absent.closed == 1

    def test_a_peer_that_breaks_is_left_out_and_the_others_go_on(self) -> None:
        log: list[str] = []
        broken = FakeContender("podman", log)
        broken.breaks_in = 2
        figures = race(FakeContender("belayer", log), [broken], rounds=4, report=no_report)
        assert len(figures.samples["belayer"]) == 4
        assert "podman" not in figures.samples
        assert figures.peers["podman"] == Peer(left_out="it broke in round 2: it fell over")

    def test_interrupted_it_closes_everybody(self) -> None:
        class Interrupted(FakeContender):
            def round(self) -> Sample:
                raise KeyboardInterrupt

        contenders = [Interrupted("belayer", []), FakeContender("podman", [])]
        with pytest.raises(KeyboardInterrupt):
            race(contenders[0], contenders[1:], rounds=1, report=no_report)
        assert [contender.closed for contender in contenders] == [1, 1]


class TestReports:
    def test_ratios_are_ours_over_theirs_and_each_is_checked(self) -> None:
        samples = {"belayer": [sample(0.1)], "podman": [sample(0.4)], "docker": [sample(0.2)]}
        peers = {"podman": Peer(version="4"), "docker": Peer(version="20")}
        report = compare(Figures(samples, peers), MACHINE).to_json()
        assert report["ratios"] == {
            "pause_vs_podman": 0.25,
            "restore_vs_podman": 0.25,
            "pause_vs_docker": 0.5,
            "restore_vs_docker": 0.5,
            "step_vs_docker_exec": 0.5,
        }
        assert report["checks"].keys() == TARGETS.keys()
        assert report["checks"]["pause_vs_podman"]["met"]
        assert not report["checks"]["pause_vs_docker"]["met"]
        assert report["medians"]["belayer_restore_ms"] == 300.0

    def test_medians_are_over_the_rounds(self) -> None:
        figures = Figures({"belayer": [sample(s) for s in (0.1, 0.9, 0.2)]}, {})
        assert compare(figures, MACHINE).to_json()["medians"]["belayer_pause_ms"] == 200.0

    def test_a_target_is_met_at_its_very_value(self) -> None:
        assert Target(at_most=0.5).check(0.5)["met"]
        assert not Target(at_most=0.5).check(0.51)["met"]

    def test_density_counts_memory_beyond_the_first_sandbox(self) -> None:
        crowd = Crowd(
            5, host_bytes=(10_000_000, 50_000_000), kernel_bytes=(0, 4_000_000), reset_s=[0.1, 0.3, 0.2]
        )
        report = summarise(crowd, MACHINE).to_json()
        assert report["medians"]["host_mb_per_sandbox"] == 10.0
        assert report["medians"]["kernel_mb_per_sandbox"] == 1.0
        assert report["medians"]["reset_p95_ms"] == 300.0
        assert report["checks"]["failures"] == 0
        assert not report["checks"]["host_mb_per_sandbox"]["met"]

    def test_density_says_what_failed(self) -> None:
        report = summarise(Crowd(2, failures=["reset: no room"]), MACHINE).to_json()
        assert report["checks"]["failures"] == 1
        assert report["notes"]["failure 1"] == "reset: no room"

    @pytest.mark.parametrize(
        ("share", "expected"), [(0.5, 2.0), (0.51, 3.0), (0.95, 4.0), (1.0, 4.0), (0.01, 1.0)]
    )
    def test_a_quantile_is_one_of_the_values(self, share: float, expected: float) -> None:
        assert quantile([4.0, 1.0, 3.0, 2.0], share) == expected

    @pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.1)])
    def test_there_is_no_quantile_of_nothing(self, values: list[float], share: float) -> None:
        with pytest.raises(ValueError, match="no quantile"):
            quantile(values, share)


class TestTiming:
    def test_a_daemon_that_keeps_the_output_open_is_not_waited_for(self) -> None:
        started = time.monotonic()
        daemon = int(words_of(["sh", "-c", "sleep 60 & echo $!"], env={"PATH": "/usr/bin:/bin"}))
        os.kill(daemon, signal.SIGKILL)  # it is still there
        assert time.monotonic() - started < 30

    def test_a_failure_says_the_last_words(self) -> None:
        with pytest.raises(PeerFailed, match="exited with 3: no room left"):
            words_of(["sh", "-c", "echo no room left >&2; exit 3"], env={"PATH": "/usr/bin:/bin"})


class TestPeers:
    def test_podman_that_is_not_installed_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("belayer_env.bench.podman.which", lambda name: None)
        with pytest.raises(LeftOut, match="not installed"):
            Podman(tmp_path).start()

    def test_docker_that_does_not_answer_is_left_out(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
        with pytest.raises(LeftOut, match=r"not installed|belayer setup --docker"):
            Docker(tmp_path).start()

    def test_closing_what_never_started_does_nothing(self, tmp_path: Path) -> None:
        for peer in (Podman(tmp_path), Docker(tmp_path)):
            peer.close()


def test_this_machine_and_this_process_can_be_measured() -> None:
    assert Machine.here().cpu
    assert Machine.here().cores >= 1
    assert 1_000_000 < process_bytes() < 10**11
    assert kernel_bytes() > 1_000_000


def test_an_unknown_peer_is_refused_before_anything_runs() -> None:
    done = subprocess.run(
        [*BENCH, "checkpoint", "--peers", "podman,lxd"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no such peer: lxd" in done.stderr


@pytest.mark.criu
class TestForReal:
    def test_checkpoint_alone(self, store_dir: Path) -> None:
        store = store_dir / "bench-checkpoint"
        report = belayer_bench(
            "checkpoint", "--json", "--rounds", "2", "--peers", "none", "--store", str(store)
        )
        assert report["bench"] == "checkpoint"
        assert report["machine"].keys() == {"cpu", "cores", "memory_bytes", "kernel"}
        assert report["peers"] == {}
        assert report["ratios"] == {}
        assert report["checks"] == {}
        names = {f"belayer_{figure}_ms" for figure in ("pause", "checkpoint", "restore", "step")}
        assert report["medians"].keys() == names
        assert all(value > 0 for value in report["medians"].values())
        assert not [*(store / "sandboxes").iterdir(), *(store / "checkpoints").iterdir()]

    def test_density_of_three(self, store_dir: Path) -> None:
        store = store_dir / "bench-density"
        report = belayer_bench("density", "--json", "--sandboxes", "3", "--steps", "2", "--store", str(store))
        assert report["bench"] == "density"
        assert report["checks"]["failures"] == 0, report["notes"]
        assert report["checks"]["host_mb_per_sandbox"].keys() == {"value", "at_most", "met"}
        figures = ("host_mb_per_sandbox", "reset_p95_ms", "pause_ms", "pause_p95_ms", "step_ms")
        assert all(figure in report["medians"] for figure in figures)
        assert not [*(store / "sandboxes").iterdir(), *(store / "checkpoints").iterdir()]

    @pytest.mark.slow
    def test_every_peer_is_measured_or_named_with_the_reason(self, store_dir: Path) -> None:
        report = belayer_bench(
            "checkpoint", "--json", "--rounds", "1", "--store", str(store_dir / "bench-peers")
        )
        assert report["peers"].keys() == {"podman", "docker"}
        for name, peer in report["peers"].items():
            assert bool(peer["version"]) != bool(peer["left_out"])
            assert (f"pause_vs_{name}" in report["ratios"]) == bool(peer["version"])
