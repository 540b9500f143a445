"""ContainerEnv as Gymnasium sees it, on real sandboxes."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import belayer_env
from belayer_env import ContainerEnv, Limits, Task, Tier
from belayer_env.errors import (
    EnvClosed,
    EpisodeOver,
    ForeignCheckpoint,
    ImageNotFound,
    InvalidInput,
    NotReset,
    NotText,
    TaskSetupFailed,
)
from belayer_env.ledger import Ledger
from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.layers import open_layers

pytestmark = pytest.mark.criu


def ends_at_submit(sandbox: Sandbox, ledger: Ledger) -> tuple[float, bool]:
    """A reward that anybody can read: 1.0 and the end, once the agent says so."""
    done = ledger.steps[-1].action == "submit"
    return float(done), done


@pytest.fixture
def store_dir(store_dir: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A store of the test's own, so that what it leaves can be told."""
    own = store_dir / f"store-{abs(hash(request.node.name))}"
    own.mkdir()
    yield own
    open_layers(store_dir).drop(own)


@pytest.fixture
def task(image: str) -> Task:
    return Task(image=image, instruction="fix the bug", reward=ends_at_submit)


@pytest.fixture
def env(task: Task, store_dir: Path) -> Iterator[ContainerEnv]:
    env = ContainerEnv(task, store=store_dir, policy="never")
    yield env
    env.close()


def test_exported_names_are_the_public_api() -> None:
    assert sorted(belayer_env.__all__) == [
        "CheckpointRef", "ContainerEnv", "Conversation", "ExecResult", "Limits", "Rollback", "Task", "Tier",
        "TierWarning",
    ]  # fmt: skip


def test_check_env_passes_without_a_warning(env: ContainerEnv) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)


def test_made_by_gymnasium_the_methods_are_reached_through_unwrapped(task: Task, store_dir: Path) -> None:
    made = gymnasium.make("belayer/Container-v0", task=task, store=store_dir, policy="never")
    try:
        observation, info = made.reset(seed=3)
        assert (observation, info) == ("fix the bug", {})
        made.step("N=1")
        with pytest.raises(AttributeError):
            made.checkpoint()  # type: ignore[attr-defined]
        env = made.unwrapped
        assert isinstance(env, ContainerEnv)
        ref = env.checkpoint()
        made.step("N=2")
        env.restore(ref)
        assert made.step("echo $N")[0] == "1\n"
    finally:
        made.close()


def test_make_needs_no_import_beforehand_not_even_in_a_spawned_worker(task: Task, store_dir: Path) -> None:
    # A pickled task brings the registration along; without any, the module stands in front of the id.
    program = (
        "import sys, pickle, gymnasium\n"
        "assert 'belayer_env' not in sys.modules\n"
        "task = pickle.load(sys.stdin.buffer)\n"
        "made = gymnasium.make('belayer/Container-v0', task=task, store=sys.argv[1])\n"
        "made.reset(); print(made.step('echo there')[0], end=''); made.close()\n"
    )
    plain = Task(image=task.image)
    done = subprocess.run(
        [sys.executable, "-c", program, store_dir], input=pickle.dumps(plain), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, b"there\n"), done.stderr
    by_module = "import gymnasium; gymnasium.make('belayer_env:belayer/Container-v0')"
    done = subprocess.run([sys.executable, "-c", by_module], capture_output=True, timeout=60)
    assert b"missing 1 required positional argument: 'task'" in done.stderr


def test_info_holds_only_facts_of_the_step(env: ContainerEnv) -> None:
    env.reset()
    *_, info = env.step("exit 3")
    assert info == {"exit_code": 3, "timed_out": False, "output_truncated": False, "shell_restarted": True}


@pytest.mark.parametrize(
    "command", ["printf 'é→\\033[0m\\t\\000'", "true", "seq 1000000", "head -c 5000 /bin/true"]
)
def test_every_real_output_is_in_the_observation_space(env: ContainerEnv, command: str) -> None:
    env.reset()
    observation = env.step(command)[0]
    assert observation in env.observation_space
    observation.encode("utf-8")


def test_action_space_takes_commands_and_samples_harmless_ones(env: ContainerEnv) -> None:
    space = env.action_space
    assert "" in space
    assert "ls\n" in space
    assert "a\0b" not in space
    assert "\ud800" not in space
    space.seed(1)
    samples = [space.sample() for _ in range(20)]
    assert all(sample in space for sample in samples)
    again: Any = pickle.loads(pickle.dumps(space))
    assert again == space
    assert pickle.loads(pickle.dumps(env.observation_space)) == env.observation_space
    env.reset()
    assert env.step(samples[0])[4]["exit_code"] in (0, 1)


def test_numpy_text_is_text_and_anything_else_is_refused_before_it_runs(env: ContainerEnv) -> None:
    env.reset()
    assert env.step(np.str_("echo np"))[0] == "np\n"
    for action in (["ls"], None, b"ls", 3):
        with pytest.raises(NotText):
            env.step(action)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="NUL"):
        env.step("echo a\0b")
    with pytest.raises(InvalidInput, match="too long"):
        env.step("true" + " " * 13_000_000)
    assert len(env.episode.ledger) == 1
    assert env.step("echo still")[0] == "still\n"


def test_misuse_is_told_and_touches_nothing(task: Task, store_dir: Path) -> None:
    env = ContainerEnv(task, store=store_dir)
    with pytest.raises(NotReset):
        env.step("ls")
    with pytest.raises(NotReset):
        env.checkpoint()
    env.reset()
    sandboxes = sorted((store_dir / "sandboxes").iterdir())
    _, reward, terminated, truncated, _ = env.step("submit")
    assert (reward, terminated, truncated) == (1.0, True, False)
    with pytest.raises(EpisodeOver):
        env.step("touch /tmp/X")
    assert sorted((store_dir / "sandboxes").iterdir()) == sandboxes
    env.close()
    env.close()
    for call in (env.reset, env.checkpoint, lambda: env.step("ls")):
        with pytest.raises(EnvClosed):
            call()
    assert list((store_dir / "sandboxes").iterdir()) == []
    assert list((store_dir / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"memory_bytes": -1}, {"pids": 0}, {"step_timeout_s": float("nan")}, {"step_timeout_s": -1.0},
        {"disk_bytes": -5}, {"cpus": 0.0}, {"output_bytes": 1.5}, {"memory_bytes": True},
    ],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Limits(**bad)


def test_bad_arguments_are_refused_with_the_right_forms(task: Task, store_dir: Path) -> None:
    with pytest.raises(InvalidInput, match="every-step"):
        ContainerEnv(task, store=store_dir, policy="sometimes")
    with pytest.raises(InvalidInput, match="runc"):
        ContainerEnv(task, store=store_dir, runtime="runcc")
    with pytest.raises(InvalidInput, match="full"):
        ContainerEnv(task, store=store_dir, require="half")  # type: ignore[arg-type]
    with pytest.raises(NotText):
        ContainerEnv("python:3.12", store=store_dir)  # type: ignore[arg-type]
    blocked = store_dir / "file"
    blocked.write_text("")
    with pytest.raises(InvalidInput):
        ContainerEnv(task, store=blocked / "below")


def test_an_image_that_is_not_there_leaves_nothing_running(store_dir: Path) -> None:
    env = ContainerEnv(Task(image="rootfs:/nowhere/at/all"), store=store_dir)
    with pytest.raises(ImageNotFound):
        env.reset()
    assert list((store_dir / "sandboxes").iterdir()) == []
    env.close()


def test_a_setup_that_fails_says_so_with_its_output(image: str, store_dir: Path) -> None:
    task = Task(image=image, setup=["echo preparing", "echo no such package >&2; exit 9"])
    env = ContainerEnv(task, store=store_dir)
    with pytest.raises(TaskSetupFailed, match="no such package"):
        env.reset()
    assert list((store_dir / "sandboxes").iterdir()) == []
    env.close()


def test_setup_runs_before_the_first_step_and_is_no_step(image: str, store_dir: Path) -> None:
    env = ContainerEnv(Task(image=image, setup=["cd /srv", "export A=7", "touch made"]), store=store_dir)
    env.reset()
    assert len(env.episode.ledger) == 0
    assert env.step("pwd; echo $A; ls")[0] == "/srv\n7\nmade\n"
    env.close()


def test_checkpoints_of_another_task_or_episode_are_refused(task: Task, image: str, store_dir: Path) -> None:
    first = ContainerEnv(task, store=store_dir)
    other = ContainerEnv(Task(image=image, setup=["true"]), store=store_dir)
    twin = ContainerEnv(task, store=store_dir)
    try:
        for env in (first, other, twin):
            env.reset()
        ref = first.checkpoint()
        for env in (other, twin):
            env.step("K=1")
            with pytest.raises(ForeignCheckpoint):
                env.restore(ref)
            assert env.step("echo $K")[0] == "1\n"
        first.reset()
        with pytest.raises(ForeignCheckpoint):
            first.restore(ref)  # its episode has ended
        with pytest.raises(NotText):
            first.restore("ck-x")  # type: ignore[arg-type]
        assert first.step("echo ok")[0] == "ok\n"
    finally:
        for env in (first, other, twin):
            env.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_autoreset_runs_no_action_in_the_wrong_episode(
    task: Task, store_dir: Path, mode: AutoresetMode
) -> None:
    def make() -> ContainerEnv:
        return ContainerEnv(task, store=store_dir, policy="never")

    vector = SyncVectorEnv([make, make], autoreset_mode=mode)
    try:
        vector.reset()
        _, rewards, ended, _, infos = vector.step(("submit", "true"))
        assert list(ended) == [True, False]
        assert rewards[0] == 1.0
        if mode is AutoresetMode.SAME_STEP:
            assert infos["final_obs"][0].startswith("bash:") or "submit" in infos["final_obs"][0]
            assert infos["final_info"]["exit_code"][0] == 127
        if mode is AutoresetMode.DISABLED:
            vector.reset(options={"reset_mask": np.array([True, False])})
        if mode is AutoresetMode.NEXT_STEP:
            observations, *_ = vector.step(("touch /tmp/X", "true"))
            assert observations[0] == "fix the bug"
        listing, *_ = vector.step(("ls /tmp", "true"))
        assert "X" not in listing[0]
        first = vector.envs[0].unwrapped
        assert isinstance(first, ContainerEnv)
        assert [step.action for step in first.episode.ledger.steps] == ["ls /tmp"]
        # One container an episode: two live ones, and nothing of the one that ended.
        assert len(list((store_dir / "sandboxes").iterdir())) == 2
    finally:
        vector.close()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_async_vector_env_works_in_processes(image: str, store_dir: Path, context: str) -> None:
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {context} on this platform")
    makers = [_Maker(image, store_dir)] * 2
    vector = AsyncVectorEnv(makers, shared_memory=False, context=context)
    try:
        observations, _ = vector.reset(seed=5)
        assert observations == ("from a worker",) * 2
        vector.step(("A=1", "A=2"))
        observations, *_ = vector.step(("echo $A", "echo $A"))
        assert observations == ("1\n", "2\n")
    finally:
        vector.close()
    assert list((store_dir / "sandboxes").iterdir()) == []


class _Maker:
    """Picklable, so that a spawned worker can make its env."""

    def __init__(self, image: str, store: Path) -> None:
        self.image, self.store = image, store

    def __call__(self) -> ContainerEnv:
        return ContainerEnv(Task(image=self.image, instruction="from a worker"), store=self.store)


def test_async_twins_let_many_envs_wait_at_once(image: str, store_dir: Path) -> None:
    async def play(number: int) -> str:
        env = ContainerEnv(Task(image=image), store=store_dir, policy="never")
        try:
            await env.areset()
            await env.astep(f"N={number}; sleep 1")
            observation, *_ = await env.astep("echo $N")
            return observation
        finally:
            await env.aclose()

    async def main() -> list[str]:
        return await asyncio.gather(*(play(number) for number in range(8)))

    assert asyncio.run(main()) == [f"{number}\n" for number in range(8)]
    assert list((store_dir / "sandboxes").iterdir()) == []


def test_a_cancelled_step_leaves_an_env_that_goes_on(env: ContainerEnv) -> None:
    async def main() -> None:
        await env.areset()
        step = asyncio.create_task(env.astep("sleep 1; V=set"))
        await asyncio.sleep(0.2)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert (await env.astep("echo $V"))[0] == "set\n"

    asyncio.run(main())


def test_tier_and_runtime_are_named(env: ContainerEnv) -> None:
    assert env.tier is Tier.FULL
    assert env.runtime.name in ("runc", "docker")
