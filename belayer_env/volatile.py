"""What of an observation may differ between two runs of the same command, and still mean the same. Pure.

A replayed observation is compared with the logged one after these parts have been blanked. Too little here,
and a harmless clock costs a rollback; too much, and a real difference passes unseen: so each pattern is as
narrow as the program's own format allows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from belayer_env.errors import InvalidInput

__all__ = ["DEFAULTS", "compile_volatile", "normalise"]

_BLANK = "\N{WHITE SQUARE}"

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"

DEFAULTS: tuple[str, ...] = (
    # Durations: pytest's summary and slowest tests, unittest's, `time`'s three lines, "took 1.2s".
    r"\bin \d+(?:\.\d+)?\s?(?:s|ms|seconds)\b(?: \(\d+:\d\d:\d\d\))?",
    r"(?m)^\d+\.\d+s (?=call|setup|teardown)",
    r"(?m)^(?:real|user|sys)\s+(?:\d+m)?\d+\.\d+s?$",
    r"\btook \d+(?:\.\d+)?\s?(?:s|ms|seconds)\b",
    # Pids where shells and common tools print them: "[1] 1234", "line 3: 1234 Killed", "pid 1234",
    # "pid=1234".
    r"(?m)^\[\d+\][+-]?\s+\d+(?=\s|$)",
    r"\bline \d+:\s+\d+ (?=[A-Z])",
    r"\b(?:pid|PID)[ =:]+\d+\b",
    # Addresses, as in Python's reprs and stack traces.
    r"\b0x[0-9a-f]{6,16}\b",
    # Times of day: ISO 8601 (logs, `date -Is`), `date`, git's, `ls -l`'s.
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?",
    rf"\b{_DAY},? (?:{_MONTH} [ \d]?\d|[ \d]?\d {_MONTH})[ ,]+(?:\d{{4}} )?\d\d:\d\d:\d\d"
    r"(?: [A-Z]{3,4})?(?: \d{4})?(?: [+-]\d{4})?",
    rf"\b{_MONTH} [ \d]\d \d\d:\d\d\b",
    r"\[\d\d/[A-Z][a-z]{2}/\d{4} \d\d:\d\d:\d\d\]",
    # Names that mktemp and Python's tempfile make up.
    r"(?<=/tmp/)tmp[.a-z0-9_]{8,}",
    r"(?<=/tmp/)tmp\.[A-Za-z0-9]{8,}",
)  # fmt: skip


@functools.lru_cache(maxsize=256)
def compile_volatile(patterns: Sequence[str]) -> re.Pattern[str]:
    """The task's patterns and the defaults as one expression. ``patterns`` is a tuple.

    Raises:
        InvalidInput: one of them is no regular expression, or matches the empty string."""
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InvalidInput(
                f"Task.volatile holds {pattern!r}, which is no regular expression: {error}"
            ) from error
        if compiled.fullmatch("") is not None:
            raise InvalidInput(f"Task.volatile holds {pattern!r}, which matches nothing at all everywhere")
    # A pattern of its own flags ("(?m)") may stand only at the start of an expression: scope them.
    return re.compile("|".join(f"(?:{_scoped(pattern)})" for pattern in (*patterns, *DEFAULTS)))


def normalise(observation: str, volatile: re.Pattern[str]) -> str:
    """The observation with its volatile parts blanked."""
    return volatile.sub(_BLANK, observation)


def _scoped(pattern: str) -> str:
    found = re.match(r"\(\?([aiLmsux]+)\)", pattern)
    return f"(?{found[1]}:{pattern[found.end() :]})" if found else pattern
