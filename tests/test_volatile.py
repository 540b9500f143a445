"""What may differ in a replay, and what may not."""

from __future__ import annotations

import pytest

from belayer_env.errors import InvalidInput
from belayer_env.volatile import compile_volatile, normalise

SAME = [
    ("3 passed in 0.03s", "3 passed in 1.20s"),
    ("== 3 failed, 2 passed in 61.20s (0:01:01) ==", "== 3 failed, 2 passed in 62.03s (0:01:02) =="),
    ("Ran 4 tests in 0.002s", "Ran 4 tests in 0.113s"),
    ("0.05s call     test_a.py::test_x", "0.71s call     test_a.py::test_x"),
    ("real\t0m0.004s\nuser\t0m0.001s\nsys\t0m0.000s", "real\t0m1.104s\nuser\t0m0.301s\nsys\t0m0.010s"),
    ("[1] 1234", "[1] 991"),
    ("bash: line 3:  1234 Killed   sleep 9", "bash: line 3:  77 Killed   sleep 9"),
    ("server started, pid 311", "server started, pid 4"),
    ("<object at 0x7f3a2c1d0e50>", "<object at 0x7f11111d0e50>"),
    ("2026-11-29T15:30:01Z done", "2026-11-30T05:00:59Z done"),
    ("2026-11-29 15:30:01,123 INFO x", "2026-11-29 15:31:02,001 INFO x"),
    ("Sun Nov 29 15:30:01 UTC 2026", "Mon Nov 30 05:30:41 UTC 2026"),
    ("Date:   Sun Nov 29 15:30:01 2026 +0000", "Date:   Mon Nov 30 05:30:41 2026 +0000"),
    ("Date: Sun, 29 Nov 2026 15:30:01 GMT", "Date: Mon, 30 Nov 2026 05:30:01 GMT"),
    ("-rw-r--r-- 1 root root 5 Nov 29 15:30 a", "-rw-r--r-- 1 root root 5 Nov 30 05:31 a"),
    ("made /tmp/tmp.Ab12Cd34Ef", "made /tmp/tmp.Zz12Cd34Ef"),
    ("made /tmp/tmpabcd1234", "made /tmp/tmpwxyz9876"),
]
DIFFERENT = [
    ("3 passed in 0.03s", "2 passed in 0.03s"),
    ("pid file", "pid dir"),
    ("1234", "1235"),
    ("exit 0x1f", "exit 0x2f"),
    ("-rw-r--r-- 1 root root 5 Nov 29 15:30 a", "-rw-r--r-- 1 root root 6 Nov 29 15:30 a"),
    ("version 2026-11-29", "version 2026-11-30"),
    ("[1]+  Running  sleep 1 &", "[1]+  Done  sleep 1"),
    ("line 3: x: command not found", "line 4: x: command not found"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_clocks_pids_and_addresses_do_not_count(one: str, other: str) -> None:
    volatile = compile_volatile(())
    assert normalise(one, volatile) == normalise(other, volatile)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_everything_else_counts(one: str, other: str) -> None:
    volatile = compile_volatile(())
    assert normalise(one, volatile) != normalise(other, volatile)


def test_a_task_adds_its_own_patterns_with_flags() -> None:
    volatile = compile_volatile((r"(?i)request-id: \w+", r"seed=\d+"))
    assert normalise("Request-ID: ab1 seed=3", volatile) == normalise("request-id: zz9 seed=44", volatile)


@pytest.mark.parametrize("bad", ["(", "x*", "", 3])
def test_patterns_that_make_no_sense_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInput):
        compile_volatile((bad,))
