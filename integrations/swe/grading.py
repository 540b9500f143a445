"""From what a test run printed to a reward: which tests passed. Pure.

The formats and commands are those that SWE-bench's harness uses for its repositories.
Source: the SWE-bench data card (FAIL_TO_PASS, PASS_TO_PASS) and the test runners' own output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

__all__ = ["PYTEST", "Grade", "TestRunner", "changed_files", "grade", "runner_of"]

_PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\s+(.+)$")
_DJANGO_LINE = re.compile(
    r"^(.+?) \.\.\. (?:.*\s)?(ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$"
)
_SYMPY_LINE = re.compile(r"^(test_\w+)\s+(ok|F|E|f|s|X)\b")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class TestRunner:
    """How a repository's tests are run and read. ``command(files)`` is a shell command; ``passed(output)``
    gives the names that its FAIL_TO_PASS and PASS_TO_PASS lists use."""

    __test__ = False  # pytest: this is no test class

    command: Callable[[Iterable[str]], str]
    passed: Callable[[str], frozenset[str]]


@dataclass(frozen=True, slots=True)
class Grade:
    """Which of the wanted tests did not pass: ``unfixed`` of FAIL_TO_PASS, ``broken`` of PASS_TO_PASS."""

    unfixed: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def is_resolved(self) -> bool:
        """Whether all passed."""
        return not (self.unfixed or self.broken)


def grade(passed: frozenset[str], fail_to_pass: Iterable[str], pass_to_pass: Iterable[str]) -> Grade:
    """Hold a run against the lists."""
    return Grade(
        tuple(name for name in fail_to_pass if name not in passed),
        tuple(name for name in pass_to_pass if name not in passed),
    )


def changed_files(patch: str) -> Mapping[str, bool]:
    """The files that a unified diff leaves behind, in order, and whether each was there before."""
    found: dict[str, bool] = {}
    before = ""
    for line in patch.splitlines():
        if line.startswith("--- "):
            before = line[4:].split("\t")[0].strip()
        elif line.startswith("+++ ") and before:
            after = line[4:].split("\t")[0].strip()
            if after != "/dev/null":
                found[after.removeprefix("b/")] = before != "/dev/null"
            before = ""
    return found


def runner_of(repo: str) -> TestRunner:
    """The runner of a SWE-bench repository; pytest for those that it does not know."""
    return _RUNNERS.get(repo, PYTEST)


def _pytest_passed(output: str) -> frozenset[str]:
    found: dict[str, bool] = {}
    for line in _lines(output):
        match = _PYTEST_LINE.match(line)
        if match:
            # A failure's reason follows its name; a name with spaces (a parameter) is kept whole.
            name = match[2] if match[1] in ("PASSED", "XFAIL", "XPASS") else match[2].split(" - ")[0]
            found[name] = match[1] in ("PASSED", "XFAIL") and found.get(name, True)
    return frozenset(name for name, is_passed in found.items() if is_passed)


def _django_passed(output: str) -> frozenset[str]:
    return frozenset(
        match[1]
        for line in _lines(output)
        if (match := _DJANGO_LINE.match(line)) and match[2] in ("ok", "expected failure")
    )


def _sympy_passed(output: str) -> frozenset[str]:
    return frozenset(
        match[1] for line in _lines(output) if (match := _SYMPY_LINE.match(line)) and match[2] in ("ok", "f")
    )


def _lines(output: str) -> Iterable[str]:
    return (_ANSI.sub("", line).rstrip() for line in output.splitlines())


def _django_label(file: str) -> str:
    return file.removeprefix("tests/").removesuffix(".py").replace("/", ".")


PYTEST = TestRunner(
    command=lambda files: " ".join(("python3 -m pytest -rA -p no:cacheprovider", *files)),
    passed=_pytest_passed,
)

_RUNNERS: Mapping[str, TestRunner] = {
    "django/django": TestRunner(
        command=lambda files: " ".join(
            (
                "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
                *(_django_label(file) for file in files),
            )
        ),
        passed=_django_passed,
    ),
    "sympy/sympy": TestRunner(
        command=lambda files: " ".join(("bin/test -C --verbose", *files)), passed=_sympy_passed
    ),
    "sphinx-doc/sphinx": TestRunner(
        command=lambda files: " ".join(("tox --current-env -epy39 -v --", *files)), passed=_pytest_passed
    ),
}
