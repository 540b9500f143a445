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
