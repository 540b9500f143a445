"""A sample's tokens, rewards and end, and the threads that calls to envs run in: no trainer, no model."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from belayer_integrations.encoding import add_to_prompt
from belayer_integrations.timed import TimedEnv
from belayer_integrations.trajectory import Trajectory
from belayer_integrations.trl import container_reward, last_command, make_rollout_func
from hypothesis import given
from hypothesis import strategies as st

from belayer_env import ContainerEnv, Rollback, Task
from belayer_env.errors import InvalidInput
from belayer_env.store import Store
from tests.memory_sandbox import MemoryRuntime

TASK = Task(image="rootfs:/none")


def trajectory(**bounds: Any) -> Trajectory:
    given = {"max_turns": 5, "max_tokens": 100, "max_rollbacks": 2, **bounds}
    return Trajectory([1, 2, 3], **given)


def test_turns_and_observations_become_a_completion() -> None:
    sample = trajectory()
    sample.speak([10, 11], [-0.5, -0.25])
    sample.observe([20], 0.5, is_over=False)
    sample.speak([12], [-1.0])
    sample.observe([21], 1.0, is_over=True)
    rollout = sample.rollout(sum, filler_id=0)
    assert rollout.prompt_ids == [1, 2, 3]
    assert rollout.completion_ids == [10, 11, 20, 12]  # what nobody will answer is left out
    assert rollout.env_mask == [1, 1, 0, 1]
    assert rollout.logprobs == [-0.5, -0.25, 0.0, -1.0]
    assert (rollout.reward, rollout.error, sample.end) == (1.5, None, "terminated")


def test_a_rollback_takes_tokens_and_rewards_with_it() -> None:
    sample = trajectory()
    for turn in range(3):
        sample.speak([10 + turn], [-1.0])
        sample.observe([20 + turn], float(turn), is_over=False)
    sample.speak([99], [-9.0])  # the action that was not run
    sample.undo(Rollback(to_step=1, reason="a test"))
    assert (sample.rewards, sample.end) == ([0.0], None)
    sample.speak([13], [-2.0])
    rollout = sample.rollout(sum, filler_id=0)
    assert rollout.completion_ids == [10, 20, 13]
    assert rollout.env_mask == [1, 0, 1]
    assert rollout.logprobs == [-1.0, 0.0, -2.0]


def test_one_that_is_rolled_back_again_and_again_has_failed() -> None:
    sample = trajectory(max_rollbacks=1)
    for _ in range(2):
        sample.speak([10], [-1.0])
        sample.undo(Rollback(to_step=0, reason="the moon"))
    assert sample.end == "failed"
    assert sample.error == "rolled back 2 times, the last time because: the moon"


@pytest.mark.parametrize(("bounds", "end"), [({"max_turns": 1}, "turns"), ({"max_tokens": 4}, "tokens")])
def test_bounds_end_a_trajectory_with_its_reward(bounds: dict[str, int], end: str) -> None:
    sample = trajectory(**bounds)
    sample.speak([10, 11], [-1.0, -1.0])
    sample.observe([20, 21], 0.75, is_over=False)
    assert sample.end == end
    assert sample.rollout(sum, filler_id=0).completion_ids == [10, 11]
    assert sample.rollout(sum, filler_id=0).reward == 0.75


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_failed_sample_has_a_shape_and_carries_no_loss(num_tokens: int) -> None:
    sample = trajectory()
    sample.speak(list(range(num_tokens)), [-1.0] * num_tokens)
    sample.fail("OSError: gone")
    rollout = sample.rollout(sum, filler_id=7)
    assert len(rollout.completion_ids) == len(rollout.env_mask) == len(rollout.logprobs) == max(num_tokens, 1)
    assert not any(rollout.env_mask)
    assert (rollout.reward, rollout.error) == (None, "OSError: gone")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 4)), max_size=12))
def test_the_lists_stay_aligned(events: list[tuple[int, int, int]]) -> None:
    sample = trajectory(max_turns=1000, max_tokens=1000, max_rollbacks=1000)
    sampled = []
    marks: list[int] = [0]
    for kind, said, seen in events:
        sample.speak([1000] * said, [-1.0] * said)
        sampled += [1] * said
        if kind == 3:
            to_step = len(marks) // 2
            sample.undo(Rollback(to_step=to_step, reason="a test")) if to_step < len(marks) else None
            del marks[to_step + 1 :]
            del sampled[marks[-1] :]
        else:
            sample.observe([5] * seen, 1.0, is_over=False)
            sampled += [0] * seen
            marks.append(len(sampled))
    rollout = sample.rollout(sum, filler_id=0)
    if sampled:
        assert rollout.env_mask == sampled
        assert [token == 1000 for token in rollout.completion_ids] == [bool(one) for one in sampled]
        assert [logprob == -1.0 for logprob in rollout.logprobs] == [bool(one) for one in sampled]
    assert rollout.reward == len(marks) - 1


def test_the_last_finished_block_is_the_command() -> None:
    assert last_command("First\n```bash\nls\n```\nthen\n```sh\npwd\nls\n```") == "pwd\nls"
    assert last_command("```bash\nrm -rf /tmp/x") is None
    assert last_command("I am done.") is None


def test_a_resets_observation_goes_where_trl_puts_it() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Do: "}]
    assert add_to_prompt("Do: ", "it") == "Do: it"
    assert add_to_prompt(messages, "it") == [messages[0], {"role": "user", "content": "Do: it"}]
    assert messages[1]["content"] == "Do: "


@pytest.mark.parametrize("name", ["max_turns", "max_turn_tokens", "reset_timeout_s", "step_timeout_s"])
def test_a_bound_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        make_rollout_func(lambda prompt: TASK, **{"max_turns": 1, name: 0})  # type: ignore[arg-type]


def test_the_reward_function_wants_its_rollout_func() -> None:
    with pytest.raises(InvalidInput, match="make_rollout_func"):
        container_reward(["p"], ["c"])
    logged: dict[str, float] = {}
    rewards = container_reward(
        ["p"] * 2, ["c"] * 2, container_reward=[1.0, None], log_metric=lambda k, v: logged.update({k: v})
    )
    assert rewards == [1.0, None]
    assert logged["container/failed"] == 1


def test_without_trl_the_package_can_be_imported_and_generation_says_what_to_install() -> None:
    program = """
import sys
for name in ("torch", "transformers", "trl"):
    sys.modules[name] = None
from belayer_integrations.trl import TrainerUnavailable
from belayer_integrations.trl.generation import trainer_model
try:
    trainer_model(object())
except TrainerUnavailable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'belayer[trl]'" in done.stdout


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store(tmp_path / "store") as store:
        yield store
        assert store.homes() == []
        assert {episode.state for episode in store.episodes()} <= {"closed"}


def test_a_call_is_waited_for_and_what_it_raises_arrives(store: Store) -> None:
    timed = TimedEnv(lambda: ContainerEnv(TASK, runtime=MemoryRuntime(), policy="never", store=store))
    assert timed.start().result(10) == ""
    assert timed.step("V=3").result(10)[4]["exit_code"] == 0
    assert timed.step("echo $V").result(10)[0] == "3\n"
    with pytest.raises(AssertionError, match="no command"):
        timed.step("what").result(10)
    timed.close().join(10)
    with pytest.raises(RuntimeError, match="closed"):
        timed.step("echo ok")


def test_one_whose_constructor_raises_can_be_closed() -> None:
    def broken() -> ContainerEnv:
        raise OSError("no disk")

    timed = TimedEnv(broken)
    with pytest.raises(OSError, match="no disk"):
        timed.start().result(10)
    timed.close().join(10)


def test_one_that_hangs_is_given_up_and_ends_once_it_can(store: Store) -> None:
    gate = threading.Event()

    def hang(*_: object) -> float:
        gate.wait(10)
        return 0.0

    task = Task(image="rootfs:/none", reward=hang)
    timed = TimedEnv(lambda: ContainerEnv(task, runtime=MemoryRuntime(), policy="never", store=store))
    timed.start().result(10)
    call = timed.step("echo ok")
    assert not wait([call], timeout=0.05).done
    closing = timed.close()
    closing.join(0.2)
    assert closing.is_alive()
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
