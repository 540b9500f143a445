"""The failover bench: its arithmetic, and its run on real processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from belayer_bench.machine import Machine
from belayer_rollout.bench.failover import Round, Stamped
from belayer_rollout.bench.throughput import client_throughput
from belayer_rollout.cli.bench import summarise

MACHINE = Machine(cpu="a", cores=1, memory_bytes=1, kernel="k")
WANTED = [(1, 2), (3,)]


def a_round(**changes: object) -> Round:
    given = {
        "path": "shadow", "detect_s": 0.0, "fence_s": 0.001, "check_s": 0.01, "activate_s": 0.002,
        "swap_s": 0.02, "first_token_s": 0.1, "all_requests_s": 0.2, "token_ids": tuple(WANTED),
    }  # fmt: skip
    return Round(**{**given, **changes})  # type: ignore[arg-type]


def test_ratios_are_of_the_cold_start_over_each_clock() -> None:
    rounds = [a_round(), a_round(swap_s=0.04), a_round(swap_s=0.03)]
    report = summarise("tiny", MACHINE, [20.0, 10.0, 30.0], WANTED, rounds, [(99.0, 100.0)])
    assert report.medians["cold_ms"] == 20_000
    assert report.medians["swap_ms"] == pytest.approx(30)
    assert report.ratios["cold_over_swap"] == pytest.approx(20 / 0.03)
    assert report.ratios["cold_over_all_requests"] == pytest.approx(100)
    assert report.ratios["journal_cost_pct"] == pytest.approx(1)
    assert report.checks["cold_over_swap"]["met"]
    assert report.checks["tokens_identical"] is True


@pytest.mark.parametrize(
    ("changes", "check"),
    [({"token_ids": ((1, 2), (4,))}, "tokens_identical"), ({"path": "cold"}, "by_the_shadow")],
)
def test_one_round_that_differs_is_enough_to_fail(changes: dict[str, object], check: str) -> None:
    report = summarise("smollm2", MACHINE, [1.0], WANTED, [a_round(), a_round(**changes)], [(1.0, 1.0)])
    assert report.checks[check] is False


def test_a_missed_target_says_so() -> None:
    report = summarise("smollm2", MACHINE, [1.0], WANTED, [a_round()], [(97.0, 100.0)])
    assert not report.checks["cold_over_first_token"]["met"]
    assert not report.checks["journal_cost_pct"]["met"]


def test_what_the_dead_one_had_under_way_is_no_sign_of_life() -> None:
    stamped = Stamped((1, 2, 3), ((1.0, "p/1"), (2.1, "p/1"), (2.5, "p/2"), (2.6, "p/2")))
    assert stamped.gap_to_another("p/1", 2.0) == pytest.approx(0.5)
    assert stamped.gap_to_another("p/1", 3.0) is None


def test_the_client_is_measured_with_a_journal_and_without(tmp_path: Path) -> None:
    for journal in (None, tmp_path / "tokens.db"):
        assert asyncio.run(client_throughput(journal, in_flight=20, num_tokens=10)) > 0


def test_an_engine_that_is_not_installed_is_named_with_its_remedy() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from belayer_env.cli.main import main; sys.argv = ['belayer', 'bench', 'failover']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_the_bench_runs_and_its_tokens_are_identical() -> None:
    argv = ["bench", "failover", "--model", "tiny", "--rounds", "1", "--cold-starts", "1"]
    argv += ["--journal-rounds", "1", "--json"]
    code = f"import sys; from belayer_env.cli.main import main; sys.argv = ['belayer', *{argv!r}]; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1400, check=False
    )
    found = json.loads(done.stdout)
    assert found["checks"]["tokens_identical"] is True
    assert found["checks"]["by_the_shadow"] is True
    assert found["ratios"].keys() >= {"cold_over_swap", "cold_over_first_token", "cold_over_all_requests"}
