"""What of the OpenRLHF plug needs no OpenRLHF: groups, ranges, retries, and what passes through."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from belayer_integrations.encoding import Encoder
from belayer_integrations.openrlhf import EngineFailed, NothingComesBack
from belayer_integrations.openrlhf.group import Group, Groups
from belayer_integrations.openrlhf.response import Sample, Tally, action_ranges, response
from belayer_integrations.openrlhf.rollouts import Rollouts
from belayer_integrations.openrlhf.sampling import TurnAborted, read_turn, turn_params
from belayer_integrations.openrlhf.terms import Terms
from hypothesis import given
from hypothesis import strategies as st

from belayer_env import ContainerEnv, Task
from belayer_env.errors import InvalidInput
from belayer_env.store import Store
from tests.integrations.openrlhf_text import Characters, Params
from tests.memory_sandbox import Faults, FaultyRuntime, MemoryRuntime


class Script:
    """An engine that says one line after another, to each context the line that it is due."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.asked: list[Params] = []

    async def generate(self, token_ids: list[int], params: Params, multi_modal_data: None) -> Any:
        self.asked.append(params)
        line = self.lines[Characters().decode(token_ids, True).count("|")] + "|"
        ids = [ord(character) for character in line]
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
        said = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")
        return SimpleNamespace(outputs=[said])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        yield store
        assert store.homes() == []
        assert {episode.state for episode in store.episodes()} <= {"closed"}


def rollouts(make_env: Callable[..., ContainerEnv], **given: Any) -> Rollouts:
    terms: dict[str, Any] = {
        "max_turns": 3,
        "max_turn_tokens": None,
        "parse_action": lambda text: text.rstrip("|") or None,
        "encode_observation": lambda tokenizer, text: Encoder(tokenizer).text_ids(text),
        "total": sum,
        "attempts": 2,
        "reset_timeout_s": 10.0,
        "step_timeout_s": 5.0,
        "most_lost_in_a_row": 16,
    }
    nothing: dict[str, Any] = {
        "resume_env": lambda *_: pytest.fail("nothing is under way"),
        "books_root": lambda: pytest.fail("no book is wanted"),
    }
    return Rollouts(Terms(make_env=make_env, **nothing, **terms | given))


async def execute(of: Rollouts, engine: Any, num: int = 1, prompt: str = "p:") -> list[dict[str, Any]]:
    params = Params()
    return await asyncio.gather(
        *(of.execute(prompt, "label", params, 200, Characters(), engine) for _ in range(num))
    )


def test_an_episode_is_told_in_tokens_ranges_and_logprobs(store: Store) -> None:
    task = Task(image="rootfs:/none", instruction="do ", reward=lambda *_: 0.5)
    made = rollouts(lambda prompt, label: ContainerEnv(task, runtime=MemoryRuntime(), store=store))
    engine = Script("V=3", "echo $V", "")
    (sample,) = asyncio.run(execute(made, engine))
    assert Characters().decode(sample["observation_tokens"], True) == "p:do V=3|echo $V|3\n|"
    assert sample["action_ranges"] == [(5, 17), (19, 20)]  # nothing was printed between the first two
    assert sample["rollout_log_probs"] == [0.0] * 5 + [-1.0] * 12 + [0.0] * 2 + [-1.0]
    assert (sample["reward"], sample["scores"], sample["truncated"]) == (1.0, 1.0, False)
    assert (sample["images"], sample["mm_train_inputs"], sample["label"]) == (None, None, "label")
    assert [params.max_tokens for params in engine.asked] == [195, 191, 181]
    assert len({params.seed for params in engine.asked}) == 3


def test_siblings_draw_by_seeds_of_their_own(store: Store) -> None:
    made = rollouts(lambda *_: ContainerEnv(Task(image="rootfs:/none"), runtime=MemoryRuntime(), store=store))
    engine = Script("echo ok", "")
    asyncio.run(execute(made, engine, num=3))
    assert len({params.seed for params in engine.asked}) == 6


def test_an_episode_that_a_fault_has_ended_is_begun_afresh(store: Store) -> None:
    """Once; and what is lost in the end has the mean of its siblings' rewards and no action."""
    made: list[int] = []

    def make(prompt: str, label: str) -> ContainerEnv:
        made.append(0)
        faults = Faults()
        if len(made) != 2:  # the first, and the last one that is made: its second attempt
            faults.arm("create", "before", "refuse")
        task = Task(image="rootfs:/none", reward=lambda *_: 3.0)
        return ContainerEnv(task, runtime=FaultyRuntime(MemoryRuntime(), faults), store=store)

    found = asyncio.run(execute(rollouts(make), Script("echo ok", ""), num=2))
    assert len(made) == 3
    (lost,) = [sample for sample in found if "error" in sample]
    assert lost["reward"] == 3.0
    assert lost["action_ranges"] == []
    assert lost["extra_logs"]["container_failed"] == 1
    assert lost["extra_logs"]["container_retries"] == 1


def test_so_many_lost_in_a_row_are_no_bad_luck(store: Store) -> None:
    def make(prompt: str, label: str) -> ContainerEnv:
        raise FileNotFoundError("no such image")

    made = rollouts(make, most_lost_in_a_row=3)
    assert len(asyncio.run(execute(made, Script(), num=2))) == 2
    with pytest.raises(NothingComesBack, match="no such image"):
        asyncio.run(execute(made, Script()))


def test_what_an_engine_raises_passes_and_the_env_is_closed(store: Store) -> None:
    class Dead:
        async def generate(self, *_: Any, **__: Any) -> None:
            raise OSError("the engine is dead")

    made = rollouts(lambda *_: ContainerEnv(Task(image="rootfs:/none"), runtime=MemoryRuntime(), store=store))
    with pytest.raises(EngineFailed, match="OSError: the engine is dead"):
        asyncio.run(execute(made, Dead()))
    assert made.close()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupt_in_a_reward_passes(store: Store, interrupt: type[BaseException]) -> None:
    def reward(*_: object) -> float:
        raise interrupt

    task = Task(image="rootfs:/none", reward=reward)
    made = rollouts(lambda *_: ContainerEnv(task, runtime=MemoryRuntime(), store=store))
    with pytest.raises(interrupt):
        asyncio.run(execute(made, Script("echo ok", "")))
    assert made.close()


def test_a_cancelled_sample_keeps_no_sibling_waiting(store: Store) -> None:
    talking: list[asyncio.Task[Any]] = []

    class Hangs:
        async def generate(self, *_: Any, **__: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            talking.append(task)
            await asyncio.sleep(60)

    envs: list[int] = []

    def one_of_two(prompt: str, label: str) -> ContainerEnv:
        envs.append(0)
        if len(envs) == 2:
            raise FileNotFoundError("no such image")
        return ContainerEnv(Task(image="rootfs:/none"), runtime=MemoryRuntime(), store=store)

    made = rollouts(one_of_two)

    async def drill() -> list[Any]:
        params = Params()
        both = [
            asyncio.create_task(made.execute("p:", "", params, 200, Characters(), Hangs())) for _ in range(2)
        ]
        done, _ = await asyncio.wait(both, timeout=0.5)
        assert not done  # one talks, the other waits for its reward
        talking[0].cancel()
        return await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 10)

    cancelled, lost = sorted(asyncio.run(drill()), key=lambda found: isinstance(found, dict))
    assert isinstance(cancelled, asyncio.CancelledError)
    assert lost["error"] == "FileNotFoundError: no such image"
    assert made.close()


def test_images_are_refused() -> None:
    made = rollouts(lambda *_: pytest.fail("no env is wanted"))
    with pytest.raises(InvalidInput, match="images"):
        asyncio.run(made.execute("p", "", Params(), 100, Characters(), Script(), images=["a.png"]))


@given(st.lists(st.sampled_from([0, 1])))
def test_ranges_cover_what_the_mask_does(mask: list[int]) -> None:
    ranges = action_ranges(mask)
    assert [at for at, is_sampled in enumerate(mask) if is_sampled] == [
        at for start, stop in ranges for at in range(start, stop)
    ]
    assert all(stop > start for start, stop in ranges)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges))


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=9))
def test_a_fill_in_leaves_the_mean_of_the_others(rewards: list[float | None]) -> None:
    async def fill_in() -> float:
        group = Group()
        for _ in rewards:
            group.join()
        for reward in rewards:
            group.settle(reward)
        return await group.fill_in()

    left = [reward for reward in rewards if reward is not None]
    filled = asyncio.run(fill_in())
    row = [filled if reward is None else reward for reward in rewards]
    assert sum(row) / len(row) == pytest.approx(sum(left) / len(left) if left else 0.0, abs=1e-9)


def test_a_group_is_forgotten_with_its_last_sample() -> None:
    groups = Groups()
    (first, number), (second, other) = groups.join("k"), groups.join("k")
    assert first is second
    assert (number, other) == (0, 1)
    first.settle(1.0)
    groups.leave("k")
    assert groups.join("k") == (first, 2)
    first.settle(None)
    first.settle(None)
    groups.leave("k")
    assert groups.join("k")[0] is not first


def test_a_turns_limits_are_the_least_of_all() -> None:
    given = Params(max_tokens=9, min_tokens=8)
    params = turn_params(given, room=7, max_turn_tokens=None, seed=5, draw=(0, 0, 0))
    assert (params.max_tokens, params.min_tokens) == (7, 7)
    assert turn_params(given, room=70, max_turn_tokens=5, seed=5, draw=(0, 0, 0)).max_tokens == 5
    assert turn_params(given, room=70, max_turn_tokens=50, seed=5, draw=(0, 0, 0)).max_tokens == 9
    assert (given.max_tokens, given.min_tokens, given.seed) == (9, 8, 5)
    assert (
        turn_params(Params(seed=None), room=7, max_turn_tokens=None, seed=None, draw=(0, 0, 0)).seed is None
    )


@pytest.mark.parametrize("output", [None, SimpleNamespace(outputs=[SimpleNamespace(finish_reason="abort")])])
def test_half_a_turn_is_none(output: Any) -> None:
    with pytest.raises(TurnAborted):
        read_turn(output, with_logprobs=True)


def test_a_lost_sample_of_the_shortest_prompt_has_a_position_to_mask() -> None:
    lost = Sample.lost([], filler_id=7, reward=1.0, error="gone")
    told = response(lost, Tally(), prompt="", label=None, with_logprobs=False)
    assert told["observation_tokens"] == [7, 7]
    assert (told["rollout_log_probs"], told["error"]) == (None, "gone")


@pytest.mark.parametrize("name", ["max_turns", "max_turn_tokens", "attempts", "step_timeout_s"])
def test_a_bound_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        rollouts(lambda *_: pytest.fail("no env is wanted"), **{name: 0})


def test_without_openrlhf_the_package_can_be_imported_and_says_what_to_install() -> None:
    program = """
import sys
for name in ("torch", "transformers", "openrlhf", "ray", "vllm"):
    sys.modules[name] = None
from belayer_integrations.openrlhf import TrainerUnavailable, agent_executor
try:
    agent_executor(lambda prompt, label: None, max_turns=1)
except TrainerUnavailable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "scripts/install-trainers" in done.stdout
