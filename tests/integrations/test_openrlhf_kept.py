"""RolloutRayActor, killed in mid-episode and started again by Ray: a real engine, real containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from belayer_integrations.openrlhf import ActorRestarted, StaleWeights, keep_actors_alive

from belayer_env.sandbox.layers import open_layers
from belayer_env.store import Store
from tests.integrations.openrlhf_env import MAX_TURNS
from tests.integrations.test_openrlhf import ask, cluster, container, new_actor, row, tokenizer, wait_until

__all__ = ["cluster", "tokenizer"]

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.criu,
    pytest.mark.timeout(600),
    # Ray's and vLLM's own.
    pytest.mark.filterwarnings("ignore"),
]

AGENT = """
from pathlib import Path

from belayer_integrations.openrlhf import agent_executor

from tests.integrations.openrlhf_env import MAX_TURN_TOKENS, MAX_TURNS, command, task_of

AgentExecutor = agent_executor(
    task_of,
    max_turns=MAX_TURNS,
    max_turn_tokens=MAX_TURN_TOKENS,
    parse_action=command,
    runtime="runc",
    policy="every-2",
    store=Path({store!r}),
)
"""
NUM_PROMPTS = 3
NUM_SAMPLES = 2


STORE = "kept"


@pytest.fixture
def root(runtime: object, store_dir: Path) -> Iterator[Path]:
    root = store_dir / STORE
    yield root
    open_layers(store_dir).drop(root)


@pytest.fixture(scope="module")
def actor(cluster: None, store_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Made as `create_vllm_engines` makes it, once the hook is in place."""
    import ray
    from openrlhf.trainer.ray import vllm_engine

    agent = tmp_path_factory.mktemp("agent") / "agent.py"
    agent.write_text(AGENT.format(store=str(store_dir / STORE)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "RolloutRayActor", vllm_engine.RolloutRayActor)
        keep_actors_alive()
        keep_actors_alive()
        made = new_actor(agent)
    yield made
    ray.kill(made)


def pid_of(actor: Any) -> int:
    import ray

    return int(ray.get(actor.__ray_call__.options(max_task_retries=-1).remote(lambda self: os.getpid())))


def batch(actor: Any, tokenizer: Any, image: str) -> list[Any]:
    """Each step adds a line to a file in the container, and says how many it has."""
    label = {
        "image": image,
        "number": 0,
        "fault": "",
        "turn": "sleep 0.4; echo $n >>/root/log; wc -l </root/log",
    }
    return [
        ask(actor, tokenizer, label, prompt=f"Episode {number}: ", num_samples=NUM_SAMPLES)
        for number in range(NUM_PROMPTS)
    ]


def answers(actor: Any, tokenizer: Any, image: str) -> list[dict[str, Any]]:
    import ray

    return [sample for found in ray.get(batch(actor, tokenizer, image)) for sample in found]


def num_steps(root: Path) -> int:
    with Store(root) as store:
        return sum(len(store.load_ledger(one.id)) for one in store.episodes() if one.state == "open")


@container
def test_a_killed_actors_episodes_go_on_where_they_were(
    actor: Any, tokenizer: Any, image: str, root: Path
) -> None:
    import ray

    calm = [row(sample) for sample in answers(actor, tokenizer, image)]
    pid = pid_of(actor)
    engines = [
        child for child in psutil.Process(pid).children(recursive=True) if "EngineCore" in child.name()
    ]
    # By a handle that was passed on, as the trainer's actors have theirs.
    told_ref = ray.remote(num_cpus=0)(answers).remote(actor, tokenizer, image)
    wait_until(lambda: num_steps(root) >= NUM_PROMPTS * NUM_SAMPLES + 2)
    os.kill(pid, signal.SIGKILL)
    told = ray.get(told_ref, timeout=240)
    assert [row(sample) for sample in told] == calm
    logs = [sample["extra_logs"] for sample in told]
    assert [log["container_steps"] for log in logs] == [MAX_TURNS] * len(logs)
    assert sum(log["container_resumptions"] for log in logs) >= 1
    assert all(log["container_failed"] == log["container_retries"] == 0 for log in logs)
    assert pid_of(actor) != pid
    assert len(engines) == 1
    assert not engines[0].is_running()
    with Store(root) as store:
        wait_until(lambda: store.homes() == [], 20.0)
        assert {episode.state for episode in store.episodes()} == {"closed"}
        assert store.orphan_partials() == []
        assert len(store.episodes()) == 2 * NUM_PROMPTS * NUM_SAMPLES  # none was begun afresh


@container
def test_an_actor_that_had_been_sent_weights_samples_no_more_when_it_is_started_again(
    actor: Any, tokenizer: Any, image: str, root: Path
) -> None:
    import ray
    import torch

    with pytest.raises(ray.exceptions.RayTaskError):  # upstream's worker wants a device for it
        ray.get(actor.update_weight_cuda_ipc.remote("no.such.tensor", torch.float32, (1,), {}, True))
    os.kill(pid_of(actor), signal.SIGKILL)
    with pytest.raises(StaleWeights, match=r"ckpt\.load_enable"):
        ray.get(batch(actor, tokenizer, image), timeout=240)
    with pytest.raises(ActorRestarted, match=r"ckpt\.load_enable"):
        ray.get(actor.update_weight.remote("no.such.tensor", torch.float32, (1,)))


def test_the_launcher_is_upstreams_program_with_the_hook_in_place() -> None:
    """As far as that goes without CUDA: to the imports of its training half."""
    program = """
from belayer_integrations.openrlhf.train import main
from openrlhf.trainer.ray import create_vllm_engines
try:
    main()
except ModuleNotFoundError as error:
    print(error.name, create_vllm_engines.__globals__["RolloutRayActor"].__ray_metadata__.class_name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "peft KeptRolloutActor", done.stderr[-2000:]
