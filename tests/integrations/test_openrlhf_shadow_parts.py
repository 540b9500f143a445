"""What of the shadow engine needs neither OpenRLHF nor vLLM: refusals, seeds, hints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from belayer_integrations.openrlhf import ShadowOptions, ShadowUnavailable
from belayer_integrations.openrlhf.bubbles import Bubbles
from belayer_integrations.openrlhf.shadow.options import UPSTREAM_EXTENSION, pair_arguments
from belayer_integrations.openrlhf.shadow.requests import Seeds
from belayer_integrations.timed import TimedEnv

from belayer_env import ContainerEnv, Task
from belayer_env.errors import InvalidInput
from belayer_env.store import Store
from belayer_rollout.types import MOST_SEED
from tests.memory_sandbox import MemoryRuntime


def translated(changed: dict[str, Any], **given: Any) -> Any:
    options: dict[str, Any] = {"options": ShadowOptions(), "is_cuda": False, "environment": {}} | given
    environment = options.pop("environment")
    return pair_arguments("m", changed, environment, **options)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tensor_parallel_size": 2}, "--vllm.tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "several workers"),
        ({"data_parallel_size": 4}, "several workers"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray'"),
        ({"enable_sleep_mode": True}, "--vllm.enable_sleep"),
        ({"limit_mm_per_prompt": {"image": 1}}, "--data.max_images_per_prompt"),
        ({"speculative_config": {"model": "d"}}, "speculative decoding"),
        ({"enable_lora": True}, "enable_lora"),
        ({"load_format": "dummy"}, "load_format"),
        ({"worker_cls": "mine.Worker"}, "worker_cls"),
        ({"worker_extension_cls": "mine.Extension"}, "worker_extension_cls"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits'"),
    ],
)
def test_an_engine_argument_that_cannot_be_honoured_is_refused_by_name(
    changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(ShadowUnavailable, match=named):
        translated(changed)


def test_an_engine_in_the_actors_own_process_is_refused() -> None:
    with pytest.raises(ShadowUnavailable, match=r"--train\.full_determinism_enable"):
        translated({}, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def test_the_others_reach_the_pair() -> None:
    upstream = {
        "enforce_eager": True,
        "worker_extension_cls": UPSTREAM_EXTENSION,
        "seed": 43,
        "distributed_executor_backend": "uni",
        "max_model_len": 512,
        "limit_mm_per_prompt": {},
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
    }
    found = translated(upstream)
    assert found.engine_args == {
        "enforce_eager": True,
        "seed": 43,
        "distributed_executor_backend": "uni",
        "max_model_len": 512,
        "max_logprobs": 1,
    }
    assert (found.model, found.seed, found.has_processed_logprobs) == ("m", 43, True)


def test_on_cuda_the_share_of_the_kv_cache_has_to_be_said() -> None:
    with pytest.raises(ShadowUnavailable, match="kv_cache_bytes"):
        translated({"gpu_memory_utilization": 0.6}, is_cuda=True)
    options = ShadowOptions(kv_cache_bytes=1 << 30)
    for changed in ({}, {"kv_cache_memory_bytes": 5}):
        found = translated(changed, is_cuda=True, options=options)
        assert found.engine_args["kv_cache_memory_bytes"] == 1 << 30
    assert translated({"kv_cache_memory_bytes": 5}, is_cuda=True).engine_args["kv_cache_memory_bytes"] == 5


@pytest.mark.parametrize("name", ["kv_cache_bytes", "stall_s", "wait_s"])
def test_an_option_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        ShadowOptions(**{name: 0})


def test_seeds_depend_on_what_is_asked_and_not_on_when() -> None:
    prompts = [[1, 2], [1, 2], [3], [1, 2], [3]]
    one, other = Seeds(7), Seeds(7)
    drawn = [(prompt, one.draw(prompt, 0)) for prompt in prompts]
    later = [(prompt, other.draw(prompt, 0)) for prompt in reversed(prompts)]
    assert sorted(drawn) == sorted(later)
    assert len({seed for _, seed in drawn}) == len(prompts)
    assert all(0 <= seed <= MOST_SEED for _, seed in drawn)
    # Another engine, and other weights, draw anew.
    assert Seeds(8).draw([3], 0) not in {seed for _, seed in drawn}
    assert one.draw([3], 1) not in {seed for _, seed in drawn}
    assert one.draw([3], 1) != one.draw([3], 1)


def test_a_bubble_is_predicted_from_the_turns_before_unless_the_engine_knows_better() -> None:
    bubbles, plain = Bubbles(), SimpleNamespace(llm=object())
    assert bubbles.predict(plain, "s", 100) == 0.0
    for tokens in (10, 20, 30):
        bubbles.observe(tokens, tokens * 0.1)
    bubbles.observe(0, 5.0)
    assert bubbles.predict(plain, "s", 100) == pytest.approx(2.0)
    assert bubbles.predict(plain, "s", 5) == pytest.approx(0.5)
    hints = {"s": 7.0, "about to end": 0.0}
    knowing = SimpleNamespace(llm=SimpleNamespace(hint_bubble=hints.get))
    assert bubbles.predict(knowing, "s", 100) == 7.0
    assert bubbles.predict(knowing, "about to end", 100) == pytest.approx(2.0)
    assert bubbles.predict(knowing, "none", 100) == pytest.approx(2.0)


class Hinted(ContainerEnv):
    """Takes its hint only when it is let."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.may_take = threading.Event()
        self.seen: list[Any] = []

    def hint_bubble(self, seconds: float) -> None:
        self.may_take.wait(10.0)
        self.seen.append(seconds)
        super().hint_bubble(seconds)

    def step(self, action: str) -> Any:
        self.seen.append(action)
        return super().step(action)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        yield store


def test_a_hint_waits_for_nobody_and_the_next_step_for_the_hint(store: Store) -> None:
    env = Hinted(Task(image="rootfs:/none"), runtime=MemoryRuntime(), policy="adaptive", store=store)
    timed = TimedEnv(lambda: env)
    timed.hint(1.0)  # there is no env yet
    timed.start().result(10.0)
    _wait_for_thread(timed)
    for seconds in (2.0, float("nan")):  # the latter is refused, which is nobody's business
        env.may_take.clear()
        timed.hint(seconds)
        step = timed.step("echo ok")
        assert not step.done()
        env.may_take.set()
        assert step.result(10.0)[0].strip() == "ok"
        _wait_for_thread(timed)
    assert str(env.seen) == "[2.0, 'echo ok', nan, 'echo ok']"
    closing = timed.close()
    timed.hint(3.0)
    closing.join(10.0)
    assert 3.0 not in env.seen


def _wait_for_thread(timed: TimedEnv) -> None:
    timed._call.join(10.0)
