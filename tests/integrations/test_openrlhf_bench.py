"""The bench of faults: a batch that upstream loses whole is one that comes back here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from belayer_integrations.openrlhf.bench.__main__ import markdown
from belayer_integrations.openrlhf.bench.faults import Fault
from belayer_integrations.openrlhf.bench.outcome import Outcome, Side, Told, row_of

ROOT = Path(__file__).parents[2]
CALM = Outcome(samples={name: Told((1, 2, 3), 2) for name in "abc"}, wall_s=5.0, num_sampled=6, num_left=0)


def test_what_did_not_come_back_is_lost() -> None:
    ended = Outcome(wall_s=3.0, num_sampled=5, num_left=1, error="LookupError: no")
    row = row_of(Fault.RAISE, CALM, ended)
    assert (row.num_survived, row.num_equal, row.tokens_lost, row.seconds_lost) == (0, 0, 5, 3.0)
    assert (row.containers_left, row.what) == (1, "LookupError: no")


def test_a_lost_sample_and_one_that_went_another_way_are_counted() -> None:
    samples = {"a": Told((1, 2, 3), 2), "b": Told((1, 2, 4), 2), "c": Told((1, 2), 0)}
    hit = Outcome(samples=samples, wall_s=9.0, num_sampled=7, num_left=0)
    row = row_of(Fault.KILL, CALM, hit)
    assert (row.num_samples, row.num_survived, row.num_equal) == (3, 2, 1)
    assert (row.tokens_lost, row.seconds_lost, row.what) == (3, 4.0, "goes on, with lost samples masked")
    side = Side(undisturbed_s=5.0, rows=[row])
    assert "| container killed | OpenRLHF | 2 of 3 | 1 | 3 | 4.0 | 0 |" in markdown(side, side)


@pytest.mark.trainers
@pytest.mark.criu
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="containers need root")
@pytest.mark.parametrize("runtime", ["runc"], indirect=True)
def test_both_sides_of_two_rows(runtime: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "belayer_integrations.openrlhf.bench", "--json", "--faults", "raise,kill"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / '.mypy'}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["machine"]
    theirs, ours = report["sides"]["openrlhf"]["rows"], report["sides"]["belayer"]["rows"]
    assert [row["fault"] for row in theirs] == [row["fault"] for row in ours] == [Fault.RAISE, Fault.KILL]
    assert [(row["num_survived"], row["num_samples"]) for row in theirs] == [(0, 8), (0, 8)]
    assert [row["what"].split(":")[0] for row in theirs] == ["LookupError", "SandboxGone"]
    assert all(row["tokens_lost"] > 0 for row in theirs)
    assert [(row["num_survived"], row["num_equal"]) for row in ours] == [(7, 7), (8, 8)]
    assert ours[1]["tokens_lost"] == 0
    assert [row["containers_left"] for row in ours] == [0, 0]
