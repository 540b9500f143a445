"""Repositories as tasks: the agent works until it says `submit`; then the tests give the reward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from belayer_integrations.swe.grading import Grade, TestRunner, changed_files, grade, runner_of
from belayer_integrations.swe.records import SweRecord
from belayer_integrations.swe.transfer import read_bytes, unpack_command

from belayer_env.ledger import Ledger
from belayer_env.sandbox.base import Sandbox
from belayer_env.spec import Limits, Task

__all__ = ["SUBMIT", "CommandReward", "SweReward", "repository_task", "swe_task"]

SUBMIT = "submit"
"""The action that ends an episode and has it graded; in the sandbox it is a shell function that says so."""

WORKDIR = "/testbed"

GIT_ENV = {
    # Fixed: a commit's name holds its date, and a replay is to give the same.
    **{f"GIT_{who}_{what}": value
       for who in ("AUTHOR", "COMMITTER")
       for what, value in (
           ("DATE", "2026-01-05T09:00:00Z"), ("NAME", "Agent"), ("EMAIL", "agent@example.org")
       )},
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip

_SUBMIT_FUNCTION = f"{SUBMIT}() {{ echo submitted; }}"
_RESULTS = "/tmp/belayer-grading"
_SWEBENCH_SHELL = "source /opt/miniconda3/bin/activate && conda activate testbed"


@dataclass(frozen=True, slots=True)
class CommandReward:
    """1.0 if a command succeeds once the agent has submitted, else 0.0."""

    command: str
    timeout_s: float = 600.0

    def __call__(self, sandbox: Sandbox, ledger: Ledger) -> tuple[float, bool]:
        """See `belayer_env.spec.Reward`."""
        if not _is_submitted(ledger):
            return 0.0, False
        # In a subshell, so that nothing the agent did to its shell's options ends the grading.
        result = sandbox.run(f"( cd {WORKDIR} && {self.command} ) >/dev/null 2>&1", timeout_s=self.timeout_s)
        return float(result.exit_code == 0), True


@dataclass(frozen=True, slots=True)
class SweReward:
    """1.0 if, once the agent has submitted, all tests of both of the record's lists pass, else 0.0. The tests
    that the record brings are put in only then, over whatever the agent made of their files."""

    record: SweRecord
    runner: TestRunner
    timeout_s: float = 1800.0

    def __call__(self, sandbox: Sandbox, ledger: Ledger) -> tuple[float, bool]:
        """See `belayer_env.spec.Reward`."""
        if not _is_submitted(ledger):
            return 0.0, False
        return float(self.grade(sandbox).is_resolved), True

    def grade(self, sandbox: Sandbox) -> Grade:
        """Put the tests in, run them, and read what passed."""
        files = changed_files(self.record.test_patch)
        old = " ".join(name for name, was_there in files.items() if was_there)
        new = " ".join(name for name, was_there in files.items() if not was_there)
        prepared = sandbox.run(
            "\n".join(
                (
                    f"cd {WORKDIR} && rm -f {_RESULTS}",
                    f"git checkout -q {self.record.base_commit} -- {old}" if old else "true",
                    f"rm -f {new}" if new else "true",
                    f"git apply -v - <<'END-OF-TESTS'\n{self.record.test_patch}\nEND-OF-TESTS",
                )
            ),
            timeout_s=self.timeout_s,
        )
        passed: frozenset[str] = frozenset()
        if prepared.exit_code == 0:
            command = self.runner.command(name for name in files if name.endswith(".py"))
            sandbox.run(f"( {command} ) >{_RESULTS} 2>&1 </dev/null", timeout_s=self.timeout_s)
            passed = self.runner.passed(read_bytes(sandbox, _RESULTS).decode("utf-8", "replace"))
        return grade(passed, self.record.fail_to_pass, self.record.pass_to_pass)


def swe_task(
    record: SweRecord,
    *,
    image: str | None = None,
    repository: Path | None = None,
    runner: TestRunner | None = None,
    limits: Limits | None = None,
) -> Task:
    """The record as a task. By default it runs on the image that SWE-bench publishes for it, which has the
    repository in /testbed. ``repository``: a folder with the repository at the record's ``base_commit``
    instead, put into ``image`` (which needs git and what the tests need)."""
    if repository is None:
        setup: tuple[str, ...] = (_SWEBENCH_SHELL,) if image is None else ()
        setup += (f"cd {WORKDIR}", f"git checkout -q {record.base_commit}", _SUBMIT_FUNCTION)
    else:
        # A tag stands for the commit, whose real name only the full history would give.
        setup = (*_setup(repository), f"git tag {record.base_commit}")
    return Task(
        image=image or record.image,
        instruction=(
            f"{record.problem_statement.strip()}\n\n"
            f"The repository is in {WORKDIR}. Solve the issue in its code; run `{SUBMIT}` when done.\n"
        ),
        setup=setup,
        reward=SweReward(record, runner or runner_of(record.repo)),
        limits=limits or Limits(memory_bytes=4 * 1024**3, step_timeout_s=300.0),
        env=GIT_ENV,
        workdir="/",
    )


def repository_task(
    folder: Path, *, image: str, instruction: str, check: str, setup: tuple[str, ...] = ()
) -> Task:
    """A task on the files of ``folder``, made a git repository in /testbed: solved when the shell command
    ``check`` succeeds there after the agent's `submit`."""
    return Task(
        image=image,
        instruction=f"{instruction.strip()}\n\nThe files are in {WORKDIR}. Run `{SUBMIT}` when done.\n",
        setup=(*_setup(folder), *setup),
        reward=CommandReward(check),
        env=GIT_ENV,
        workdir="/",
    )


def _setup(folder: Path) -> tuple[str, ...]:
    return (
        unpack_command(folder, WORKDIR),
        f"cd {WORKDIR}",
        "git init -q -b main . && git add -A && git commit -qm 'as received'",
        _SUBMIT_FUNCTION,
    )


def _is_submitted(ledger: Ledger) -> bool:
    return bool(ledger.steps) and ledger.steps[-1].action.strip() == SUBMIT
