"""OpenRLHF's own RolloutRayActor with a shadow pair for its engine: episodes under the deaths of engines are
those of a run without, weights reach both engines and outlive all of them, and nothing of it is left behind.
One actor serves the tests in their order; the last one kills it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from belayer_rollout.shared_memory import shared_memory_of
from tests.integrations.test_openrlhf import (  # noqa: F401  fixtures among them
    cluster,
    container,
    label,
    samples,
    sampling,
    store_root,
    tokenizer,
    wait_until,
)

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.criu,
    pytest.mark.timeout(600),
    # Ray's and vLLM's own.
    pytest.mark.filterwarnings("ignore"),
]

PLAIN_AGENT = Path(__file__).parent / "openrlhf_agent.py"
AGENT = Path(__file__).parent / "openrlhf_shadow_agent.py"
NUM_EPISODES = 4
READY_S = 180.0
"""An engine takes 12 s to build, and thrice that while others keep the host busy."""


def new_actor(agent: Path, **given: Any) -> Any:
    """As `create_vllm_engines` makes it, on CPUs; not waited for."""
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    from belayer_rollout.models import ensure_model

    arguments = {
        "model": str(ensure_model("tiny")),
        "num_gpus": 1,
        "distributed_executor_backend": "uni",
        "agent_func_path": str(agent),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 1 << 26,
        "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
    }
    return RolloutRayActor.options(num_cpus=0, num_gpus=0).remote(**arguments | given)


class Shadowed:
    """An actor, and a look at its pair."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.pid: int = self.see(lambda actor: os.getpid())

    def see(self, look: Callable[[Any], Any]) -> Any:
        import ray

        return ray.get(self.actor.__ray_call__.remote(look), timeout=READY_S)

    @property
    def state(self) -> str:
        return str(self.see(lambda actor: actor.llm.pair.state.value))

    @property
    def primary(self) -> int:
        """EngineCore."""
        return int(self.see(lambda actor: actor.llm.pair.primary_processes()[0]))

    @property
    def history(self) -> list[Any]:
        return list(self.see(lambda actor: actor.llm.pair.history))

    @property
    def num_broken(self) -> int:
        """Attempts at a request that a fault ended."""
        return int(self.see(lambda actor: sum(actor.llm._client.status().workers[0].faults.values())))

    def processes(self) -> list[int]:
        """Of the pair, all of them."""
        return list(
            self.see(
                lambda actor: [
                    *actor.llm.pair.primary_processes(),
                    *actor.llm.pair.shadow_processes(),
                    actor.llm.pair.owner_process(),
                ]
            )
        )

    def guard(self) -> None:
        """Until a shadow is ready."""
        wait_until(lambda: self.state == "guarded", READY_S)

    def strike(self, sign: signal.Signals = signal.SIGKILL) -> None:
        """EngineCore, in the midst of a request."""
        pid = self.primary
        wait_until(
            lambda: bool(self.see(lambda actor: any(run.tokens for run in actor.llm._client._runs.values())))
        )
        os.kill(pid, sign)

    def said(self, prompt: bytes = b"hello", **given: Any) -> Any:
        import ray

        asked = sampling(**{"max_tokens": 30} | given)
        return ray.get(self.actor.generate.remote(list(prompt), asked), timeout=READY_S).outputs[0]


@pytest.fixture(scope="module")
def shadowed(cluster: None) -> Iterator[Shadowed]:  # noqa: F811
    import ray

    actor = new_actor(AGENT)
    ray.get(actor.get_num_unfinished_requests.remote(), timeout=READY_S)
    yield Shadowed(actor)
    ray.kill(actor)


@pytest.fixture(scope="module")
def sender(shadowed: Shadowed) -> Any:
    """Rank 0; the group is formed once, and outlives whatever happens to engines."""
    import ray

    from belayer_rollout.models import ensure_model
    from tests.integrations.openrlhf_sender import Sender

    made = Sender.remote(ensure_model("tiny"), [shadowed.actor])  # type: ignore[attr-defined]
    ray.get(made.join.remote(), timeout=60)
    return made


def play(shadowed: Shadowed, tokenizer: Any, label: dict[str, Any]) -> list[dict[str, Any]]:  # noqa: F811
    labels = [label | {"number": number, "turn": "sleep 0.2; echo $n ok"} for number in range(NUM_EPISODES)]
    given = sampling(min_tokens=60, max_tokens=80)
    return samples(shadowed.actor, tokenizer, labels, max_length=400, sampling_params=given)


def assert_same(hit: list[dict[str, Any]], calm: list[dict[str, Any]]) -> None:
    """Token by token; another batch may change the last bits of a logprob."""
    for ours, theirs in zip(hit, calm, strict=True):
        for name in ("observation_tokens", "action_ranges", "reward", "truncated"):
            assert ours[name] == theirs[name]
        assert ours["rollout_log_probs"] == pytest.approx(theirs["rollout_log_probs"], abs=1e-3)
        assert ours["extra_logs"]["container_recoveries"] == 0


@container
def test_sampled_episodes_are_the_same_whatever_happens_to_engines(
    shadowed: Shadowed,
    tokenizer: Any,  # noqa: F811
    label: dict[str, Any],  # noqa: F811
) -> None:
    import threading

    calm = play(shadowed, tokenizer, label)
    assert all(len(sample["action_ranges"]) == 3 for sample in calm)
    assert len({tuple(sample["observation_tokens"]) for sample in calm}) == NUM_EPISODES
    shadowed.guard()
    assert_same(play(shadowed, tokenizer, label), calm)
    assert shadowed.history == []

    def again_and_again() -> None:
        shadowed.strike()  # its shadow takes over,
        wait_until(lambda: len(shadowed.history) == 1 and shadowed.state == "alone")
        shadowed.strike()  # and has none yet

    striking = threading.Thread(target=again_and_again)
    striking.start()
    assert_same(play(shadowed, tokenizer, label), calm)
    striking.join()
    assert [record.path for record in shadowed.history] == ["shadow", "cold"]
    assert shadowed.num_broken >= 2
    shadowed.guard()

    striking = threading.Thread(target=shadowed.strike, args=(signal.SIGSTOP,))
    striking.start()
    assert_same(play(shadowed, tokenizer, label), calm)
    striking.join()
    last = shadowed.history[-1]
    assert (last.path, last.cause) == ("shadow", "a process of it is stopped")
    assert shadowed.num_broken >= 3  # streams; each fault came in the midst of one


@container
def test_envs_are_told_how_long_a_turn_will_take(
    shadowed: Shadowed,
    tokenizer: Any,  # noqa: F811
    label: dict[str, Any],  # noqa: F811
) -> None:
    play(shadowed, tokenizer, label)
    notes = [json.loads(path.read_text()) for path in Path(label["notes"]).iterdir() if path.is_file()]
    hints = [tuple(hint) for note in notes for hint in note["hints"]]
    # Each turn has lasted longer than it takes to give the hint.
    assert len(hints) == 3 * NUM_EPISODES
    assert {steps for steps, _ in hints} == {0, 1, 2}
    assert all(0 < seconds < 60 for _, seconds in hints)


def assert_weights(shadowed: Shadowed, sender: Any, version: int) -> list[int]:
    """What it says is what the trainer's model says of it."""
    import ray

    prompt = b"hello"
    said = shadowed.said(prompt, temperature=0.0)
    (span,) = said.weight_versions
    assert int(span.version) == version
    own = ray.get(sender.logprobs.remote([*prompt, *said.token_ids]))[len(prompt) - 1 :]
    theirs = [of[token].logprob for token, of in zip(said.token_ids, said.logprobs, strict=True)]
    assert theirs == pytest.approx(own, abs=1e-3)
    return list(said.token_ids)


def test_weights_reach_both_engines_and_outlive_all_of_them(shadowed: Shadowed, sender: Any) -> None:
    import ray

    before = assert_weights(shadowed, sender, 0)
    shadowed.guard()
    num_faults = len(shadowed.history)
    ray.get(sender.train.remote(1))
    num = ray.get(sender.send.remote(), timeout=READY_S)
    one = assert_weights(shadowed, sender, 1)
    assert one != before
    os.kill(shadowed.primary, signal.SIGKILL)
    assert assert_weights(shadowed, sender, 1) == one
    # Without a shadow, and in the midst of an update: the trainer's group knows nothing of it.
    ray.get(sender.train.remote(2))
    ray.get(sender.send.remote(0, num // 2), timeout=READY_S)
    os.kill(shadowed.primary, signal.SIGKILL)
    assert shadowed.said(temperature=0.0).token_ids == one
    ray.get(sender.send.remote(num // 2, None), timeout=READY_S)
    two = assert_weights(shadowed, sender, 2)
    assert two != one
    # Nobody is left who maps them; the actor has them still.
    wait_until(lambda: shadowed.state in ("alone", "guarded"), READY_S)
    for pid in shadowed.processes():
        os.kill(pid, signal.SIGKILL)
    assert assert_weights(shadowed, sender, 2) == two
    paths = [record.path for record in shadowed.history[num_faults:]]
    assert paths == ["shadow", "cold", "cold"]
    # An update that its trainer broke off is forgotten when the next one begins.
    ray.get(sender.send.remote(0, 3), timeout=READY_S)
    ray.get(sender.train.remote(3))
    ray.get(sender.send.remote(), timeout=READY_S)
    assert assert_weights(shadowed, sender, 3) != two


class Parrot:
    """An agent instance as OpenRLHF's own executor of several turns wants it: two turns, one word between."""

    def __init__(self) -> None:
        self.num_turns = 0

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        return states

    async def step(self, state: dict[str, Any]) -> dict[str, Any]:
        import torch

        self.num_turns += 1
        return {
            "rewards": torch.tensor(float(len(state["action_text"]))),
            "environment_feedback": "" if self.num_turns == 2 else "again",
            "done": self.num_turns == 2,
        }


def use_upstreams_executor(actor: Any, num_turns: int) -> None:
    from openrlhf.utils import agent

    executor = agent.SingleTurnAgentExecutor()
    if num_turns > 1:
        executor = agent.MultiTurnAgentExecutor(type("Instance", (Parrot, agent.AgentInstanceBase), {}))
    actor.of_belayer, actor.executor = getattr(actor, "of_belayer", actor.executor), executor


@pytest.mark.parametrize("num_turns", [1, 2])
def test_upstreams_own_executors_read_its_answers(
    shadowed: Shadowed,
    tokenizer: Any,  # noqa: F811
    num_turns: int,
) -> None:
    shadowed.see(lambda actor: use_upstreams_executor(actor, num_turns))
    # Turns end by one of many stop tokens, which has no part in a turn's text.
    stops = list(range(0, 512, 4))
    given = sampling(max_tokens=20, stop_token_ids=stops, skip_special_tokens=True)
    (sample,) = samples(shadowed.actor, tokenizer, [{"number": 0}], max_length=60, sampling_params=given)
    shadowed.see(lambda actor: setattr(actor, "executor", actor.of_belayer))
    ids, ranges, logprobs = (
        sample[name] for name in ("observation_tokens", "action_ranges", "rollout_log_probs")
    )
    assert len(ranges) == num_turns
    assert len(logprobs) == len(ids)
    sampled = {at for start, stop in ranges for at in range(start, stop)}
    assert all((logprobs[at] != 0.0) == (at in sampled) for at in range(len(ids)))
    assert all(ids[stop - 1] in stops for _, stop in ranges)
    if num_turns == 2:
        texts = [tokenizer.decode(ids[start : stop - 1], skip_special_tokens=True) for start, stop in ranges]
        assert sample["reward"] == sum(map(len, texts))


def test_a_pause_keeps_requests_and_gives_no_token(shadowed: Shadowed) -> None:
    import ray

    said = shadowed.said(temperature=0.0).token_ids
    ray.get(shadowed.actor.pause_generation.remote())
    asking = shadowed.actor.generate.remote(list(b"hello"), sampling(temperature=0.0, max_tokens=30))
    assert ray.wait([asking], timeout=2.0)[0] == []
    ray.get(shadowed.actor.resume_generation.remote())
    assert ray.get(asking, timeout=30).outputs[0].token_ids == said


def test_a_killed_actor_leaves_nothing(shadowed: Shadowed) -> None:
    """In the midst of building a shadow, too."""
    if shadowed.state == "guarded":
        os.kill(shadowed.primary, signal.SIGKILL)
        wait_until(lambda: shadowed.state == "alone")
    wait_until(lambda: len(marked(shadowed.pid)) > 2, 30.0)  # the next shadow's first process
    directory = Path(shadowed.see(lambda actor: str(actor.llm.pair.directory)))
    owner = Path(shadowed.see(lambda actor: str(actor.llm.pair._seat.process.directory)))
    processes = {*shadowed.processes(), *marked(shadowed.pid)}
    shared = {name for pid in processes for name in mapped(pid)}
    os.kill(shadowed.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in processes | set(marked(shadowed.pid))), 30.0)
    wait_until(lambda: not directory.exists() and not owner.exists(), 10.0)
    assert not [name for name in shared if (Path("/dev/shm") / name).exists()]


def marked(user: int) -> list[int]:
    """Processes of engines whose user is that one."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BELAYER_ENGINE_USER") == str(user):
                found.append(process.pid)
        except psutil.Error:
            continue
    return [pid for pid in found if is_running(pid)]


def is_running(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mapped(pid: int) -> set[str]:
    return set(shared_memory_of((pid,)))


def test_an_option_that_a_pair_cannot_honour_ends_the_actors_construction(cluster: None) -> None:  # noqa: F811
    import ray

    refused = new_actor(AGENT, enable_sleep_mode=True)
    with pytest.raises(ray.exceptions.RayActorError, match=r"ShadowUnavailable.*--vllm\.enable_sleep"):
        ray.get(refused.get_num_unfinished_requests.remote(), timeout=READY_S)
