"""The examples that are programs run, and show what they claim. (tests/test_swe.py has the agent loop.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.criu
def test_forking_opens_the_lock_that_attempts_from_the_start_do_not() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "tree_search.py", "--locks", "2"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0", "1"]
    for _, from_the_start, with_fork in rows:
        assert (int(from_the_start) < 6, int(with_fork)) == (True, 6)


def test_a_killed_server_does_not_show_in_a_stream() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "rollout_failover.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()
    assert last.endswith("True")
    assert {row.split()[0] for row in rows} == {"one", "other"}
