"""SWE tasks: records, grading, and the example's agent loop on real containers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from belayer_integrations.swe import SweRecord, load_records, swe_task
from belayer_integrations.swe.grading import changed_files, grade, runner_of
from belayer_integrations.swe.records import bundled_records
from belayer_integrations.swe.transfer import read_bytes, unpack_command

from belayer_env import ContainerEnv, Limits, Task, paths
from belayer_env.errors import InvalidInput
from belayer_rollout.models import ensure_model

EXAMPLE = Path(__file__).parent.parent / "examples" / "swe_agent_loop.py"
TASKS = sorted(path.parent.name for path in (EXAMPLE.parent / "swe_tasks").glob("*/task.json"))
BUNDLED = list(bundled_records())

ROW = {
    "repo": "django/django",
    "instance_id": "django__django-11099",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "patch": "",
    "test_patch": "--- a/tests/auth_tests/test_validators.py\n+++ b/tests/auth_tests/test_validators.py\n",
    "problem_statement": "UsernameValidator allows trailing newline in usernames",
    "hints_text": "",
    "created_at": "2019-03-20T03:46:18Z",
    "version": "3.0",
    "FAIL_TO_PASS": '["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"]',
    "PASS_TO_PASS": '["test_help_text (auth_tests.test_validators.UserAttributeSimilarityValidatorTest)"]',
    "environment_setup_commit": "419a78300f7cd27611196e1e464d50fd0385ff27",
}
"""A row of the published data set, its long fields left out."""


def test_a_row_of_the_published_data_set_is_read() -> None:
    record = SweRecord.from_row(ROW)
    assert record.fail_to_pass == tuple(json.loads(ROW["FAIL_TO_PASS"]))
    assert record.image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    task = swe_task(record)
    assert task.image == record.image
    assert f"git checkout -q {record.base_commit}" in task.setup


@pytest.mark.parametrize("as_lines", [True, False])
def test_records_come_from_json_lists_and_json_lines(tmp_path: Path, as_lines: bool) -> None:
    rows = [ROW, {**ROW, "FAIL_TO_PASS": ["a"], "instance_id": "b"}]
    text = "\n".join(map(json.dumps, rows)) if as_lines else json.dumps(rows, indent=1)
    (tmp_path / "rows").write_text(text)
    assert [record.instance_id for record in load_records(tmp_path / "rows")] == [ROW["instance_id"], "b"]


@pytest.mark.parametrize(
    "row", [{**ROW, "FAIL_TO_PASS": "3"}, {k: v for k, v in ROW.items() if k != "test_patch"}]
)
def test_an_incomplete_record_is_refused_by_its_field(row: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match=r"test_patch|names"):
        SweRecord.from_row(row)


def test_what_is_no_record_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("id,repo\n1,a\n")
    with pytest.raises(InvalidInput, match="JSON"):
        list(load_records(tmp_path / "rows"))


@pytest.mark.parametrize(
    ("repo", "output", "passed"),
    [
        (
            "pallets/flask",
            "..F\nPASSED tests/t.py::a[x y]\nFAILED tests/t.py::b - assert 1 == 2\nERROR tests/u.py\n"
            "\x1b[32mPASSED\x1b[0m tests/t.py::c\nPASSED tests/t.py::d\nERROR tests/t.py::d - teardown\n",
            {"tests/t.py::a[x y]", "tests/t.py::c"},
        ),
        (
            "django/django",
            "test_a (m.T) ... ok\ntest_b (m.T) ... FAIL\ntest_c (m.T)\nDoc of c ... ok\n"
            "test_d (m.T) ... skipped 'why'\ntest_e (m.T) ... expected failure\n",
            {"test_a (m.T)", "Doc of c", "test_e (m.T)"},
        ),
        ("sympy/sympy", "test_a ok\ntest_b F\ntest_c E\ntest_d s\ntest_e f [OK]\n", {"test_a", "test_e"}),
    ],
)
def test_each_runners_output_is_read(repo: str, output: str, passed: set[str]) -> None:
    assert runner_of(repo).passed(output) == passed


def test_commands_name_the_tests_as_their_runner_wants() -> None:
    assert runner_of("a/b").command(["tests/t.py"]).endswith(" tests/t.py")
    assert runner_of("django/django").command(["tests/auth/test_a.py"]).endswith(" auth.test_a")


def test_a_grade_names_what_is_missing() -> None:
    found = grade(frozenset({"a"}), ["a", "b"], ["c"])
    assert (found.unfixed, found.broken, found.is_resolved) == (("b",), ("c",), False)
    assert grade(frozenset("abc"), "a", "bc").is_resolved


def test_changed_files_tells_new_ones_from_old_and_leaves_removed_ones_out() -> None:
    patch = "--- a/x y\t\n+++ b/x y\t\n@@\n--- /dev/null\n+++ b/new\n@@\n--- a/gone\n+++ /dev/null\n"
    assert changed_files(patch) == {"x y": True, "new": False}


@pytest.mark.criu
def test_files_go_in_and_come_out_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    content = bytes(range(256)) * 1000
    (tmp_path / "sub" / "all bytes").write_bytes(content)
    (tmp_path / "run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run").chmod(0o755)
    assert unpack_command(tmp_path) == unpack_command(tmp_path)
    task_image = f"rootfs:{paths.test_image()}"
    with ContainerEnv(Task(image=task_image, limits=Limits(output_bytes=4096)), policy="never") as env:
        env.reset()
        assert env.step(unpack_command(tmp_path, "/srv/in"))[4]["exit_code"] == 0
        assert env.step("/srv/in/run")[0] == "ran\n"
        sandbox = env.episode.sandbox
        assert read_bytes(sandbox, "'/srv/in/sub/all bytes'") == content
        assert read_bytes(sandbox, "'/srv/in/sub/all bytes'", most_bytes=10) == content[:10]
        assert read_bytes(sandbox, "/srv/none") == b""


@pytest.mark.criu
@pytest.mark.parametrize("solved", ["patch", "half", "none", "cheat"])
def test_the_bundled_record_is_graded_by_its_own_tests(solved: str) -> None:
    ((record, repository),) = BUNDLED
    task = swe_task(record, image=f"rootfs:{paths.test_image()}", repository=repository)
    actions = {
        "patch": f"git apply <<'END'\n{record.patch}\nEND",
        "half": "sed -i 's/len(line) + len(word) <= width/len(line) + bool(line) + len(word) <= width/' "
        "wrapline/wrap.py",
        "none": "true",
        "cheat": "printf 'def test_the_space_between_words_counts(): pass\n' >tests/test_wrap.py; "
        "git commit -qam x",
    }
    with ContainerEnv(task) as env:
        env.reset()
        assert env.step(actions[solved])[1:3] == (0.0, False)
        observation, reward, terminated, *_ = env.step("submit")
        assert (observation, reward, terminated) == ("submitted\n", float(solved == "patch"), True)


@pytest.mark.criu
@pytest.mark.parametrize("task", [*TASKS, *(record.instance_id for record, _ in BUNDLED)])
def test_the_example_solves_its_tasks_through_three_kills(task: str) -> None:
    done = run_example("--task", task, "--chaos", "3", timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward 1.0" in done.stdout


@pytest.mark.criu
def test_doing_nothing_solves_none_of_the_examples_tasks() -> None:
    spec = importlib.util.spec_from_file_location("swe_agent_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for name in TASKS:
        task, _ = example.load_task(name)
        reward, _ = example.run_episode(task, example.scripted(["submit"]))
        assert reward == 0.0, name


def test_the_example_says_why_a_model_on_disk_is_not_served(tmp_path: Path) -> None:
    done = run_example("--model", str(tmp_path), timeout_s=60)
    assert done.returncode == 1
    # What is missing is said first: vLLM or transformers here, or else what the folder lacks.
    *_, why, end = done.stderr.strip().splitlines()
    assert len(why) > 20
    assert end == "belayer rollout serve ended with status 1"


@pytest.mark.vllm
@pytest.mark.criu
def test_the_example_asks_a_model_on_disk() -> None:
    done = run_example(
        "--model", str(ensure_model("smollm2")), "--most-steps", "2", "--max-tokens", "8", "--chaos", "1",
        timeout_s=280,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr  # its weights are random
    assert "reward 0.0 after 2 steps; the container was lost 1 times" in done.stdout


def run_example(*options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLE, *options], capture_output=True, text=True, timeout=timeout_s, check=False
    )
