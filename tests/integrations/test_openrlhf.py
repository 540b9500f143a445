"""OpenRLHF's own RolloutRayActor and SamplesGenerator on container envs: case C09, exact tokens under faults,
baselines, alignment, cancellation. One actor with a vLLM engine serves them all."""

from __future__ import annotations

import ast
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from belayer_integrations.openrlhf import EngineFailed

from belayer_env.sandbox.layers import open_layers
from belayer_env.store import Store
from tests.integrations.openrlhf_env import MAX_TURN_TOKENS, MAX_TURNS, STEP_LIMIT_S, command

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.criu,
    pytest.mark.timeout(600),
    # Ray's and vLLM's own.
    pytest.mark.filterwarnings("ignore"),
]

ROOT = Path(__file__).parents[2]
AGENT = Path(__file__).parent / "openrlhf_agent.py"
NUM_PROMPTS = 8
MAX_LENGTH = 200
SEED = 11
container = pytest.mark.parametrize("runtime", ["runc"], indirect=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, on this host, with this checkout's code in its workers."""
    import ray

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={
            "env_vars": {
                "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / ".mypy"])),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "OMP_NUM_THREADS": "1",
            }
        },
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def actor(cluster: None) -> Any:
    return new_actor()


def new_actor(agent: Path = AGENT) -> Any:
    """A rollout actor as `create_vllm_engines` makes it, on CPUs."""
    import ray
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    from belayer_rollout.models import ensure_model

    made = RolloutRayActor.options(num_cpus=0, num_gpus=0).remote(
        model=str(ensure_model("tiny")),
        num_gpus=1,
        distributed_executor_backend="uni",
        agent_func_path=str(agent),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 26,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
    )
    ray.get(made.get_num_unfinished_requests.remote(), timeout=300)
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from belayer_rollout.models import ensure_model

    return AutoTokenizer.from_pretrained(ensure_model("tiny"))


@pytest.fixture
def store_root(runtime: object, store_dir: Path) -> Iterator[Path]:
    """All envs of a test are closed at its end."""
    root = store_dir / "openrlhf"
    yield root
    with Store(root) as store:
        wait_until(lambda: store.homes() == [], 20.0)  # what was given up ends in the background
        assert {episode.state for episode in store.episodes()} <= {"closed"}
    open_layers(store_dir).drop(root)


@pytest.fixture
def label(store_root: Path, image: str, tmp_path: Path) -> dict[str, Any]:
    return {"image": image, "store": str(store_root), "notes": str(tmp_path), "number": 0, "fault": ""}


def sampling(**given: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 1.0, "logprobs": 1, "min_tokens": 1, "seed": SEED, "skip_special_tokens": False}
        | given
    )


def ask(actor: Any, tokenizer: Any, label: dict[str, Any], **given: Any) -> Any:
    """One prompt, sent as `SamplesGenerator` sends it."""
    return actor.generate_responses.remote(
        prompt=given.pop("prompt", f"Episode {label['number']}: "),
        label=label,
        sampling_params=given.pop("sampling_params", None) or sampling(),
        max_length=given.pop("max_length", MAX_LENGTH),
        hf_tokenizer=tokenizer,
        num_samples=given.pop("num_samples", 1),
    )


def samples(
    actor: Any, tokenizer: Any, labels: Sequence[dict[str, Any]], **given: Any
) -> list[dict[str, Any]]:
    """One sample for each label, all under way at once."""
    import ray

    refs = [ask(actor, tokenizer, label, **given) for label in labels]
    return [sample for found in ray.get(refs, timeout=300) for sample in found]


def row(sample: dict[str, Any]) -> dict[str, Any]:
    """All of a sample but what recovery cost. (Another batch may change the last bits of a logprob.)"""
    row = {name: value for name, value in sample.items() if name not in ("extra_logs", "label")}
    return row | {"rollout_log_probs": [round(logprob, 4) for logprob in row["rollout_log_probs"]]}


def notes(label: dict[str, Any]) -> list[list[str]]:
    """The actions of each ledger, of the episodes of one number."""
    found = [json.loads(path.read_text()) for path in Path(label["notes"]).iterdir() if path.is_file()]
    return [note["actions"] for note in found if note["label"] == str(label["number"])]


@container
def test_four_bad_episodes_take_no_sibling_with_them(
    actor: Any, tokenizer: Any, label: dict[str, Any]
) -> None:
    calm = samples(actor, tokenizer, [label | {"number": number} for number in range(NUM_PROMPTS)])
    assert all(sample["extra_logs"]["container_steps"] == MAX_TURNS for sample in calm)
    faults = {2: "reward", 4: "doom", 7: "constructor"}
    labels = [
        label
        | {"number": number, "fault": faults.get(number, ""), "turn": "sleep 999" if number == 6 else ""}
        for number in range(NUM_PROMPTS)
    ]
    began = time.monotonic()
    result = samples(actor, tokenizer, labels)
    # The slowest limit, and what two resets and some steps take on a busy machine.
    assert time.monotonic() - began < STEP_LIMIT_S + 40
    for number in (0, 1, 3, 5):
        assert row(result[number]) == row(calm[number])
        assert result[number]["extra_logs"]["container_failed"] == 0
    for number, text in (
        (2, "LookupError: the reward of number two"),
        (4, "RecoveryFailed: "),
        (6, f"TimeoutError: the step took longer than step_timeout_s={STEP_LIMIT_S:g}"),
        (7, "PermissionError: the constructor of number seven"),
    ):
        lost = result[number]
        assert lost["error"].startswith(text)
        assert (lost["action_ranges"], lost["reward"], lost["truncated"]) == ([], 0.0, False)
        assert lost["rollout_log_probs"] == [0.0] * len(lost["observation_tokens"])
        assert tokenizer.decode(lost["observation_tokens"]) == f"Episode {number}: "
        assert lost["extra_logs"].keys() == calm[0]["extra_logs"].keys()
        assert lost["extra_logs"]["container_failed"] == 1
    retries = [sample["extra_logs"]["container_retries"] for sample in result]
    assert retries == [0, 0, 0, 0, 1, 0, 0, 0]  # of the one that a fault has ended


@container
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", ["kill", "kill during"])
def test_a_killed_container_changes_no_token(
    actor: Any, tokenizer: Any, label: dict[str, Any], fault: str, temperature: float
) -> None:
    label |= {"turn": "sleep 0.6; echo $n ok"}
    given = {"sampling_params": sampling(temperature=temperature)}
    (calm,) = samples(actor, tokenizer, [label], **given)
    (hit,) = samples(actor, tokenizer, [label | {"fault": fault}], **given)
    assert row(hit) == row(calm)
    assert calm["extra_logs"]["container_recoveries"] == 0
    assert hit["extra_logs"]["container_recoveries"] == 1
    assert 0 < hit["extra_logs"]["container_recovery_s"] < 60


@container
@pytest.mark.parametrize("fault", ["", "kill"])
def test_ranges_and_logprobs_are_those_of_the_ledgers_actions(
    actor: Any, tokenizer: Any, label: dict[str, Any], fault: str
) -> None:
    """After a rollback too: what is left is what the container has seen, and each logprob is the one that the
    model has for the whole sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    from belayer_rollout.models import ensure_model

    # No replay tells the same story.
    label |= {"turn": "cat /proc/sys/kernel/random/uuid", "policy": "never", "instruction": "Go. "}
    (sample,) = samples(actor, tokenizer, [label | {"fault": fault}])
    ids, ranges, logprobs = (
        sample[name] for name in ("observation_tokens", "action_ranges", "rollout_log_probs")
    )
    assert tokenizer.decode(ids[: ranges[0][0]]) == "Episode 0: Go. "
    actions = [command(tokenizer.decode(ids[start:stop], skip_special_tokens=True)) for start, stop in ranges]
    assert [actions] == notes(label)
    assert len(actions) == MAX_TURNS
    assert all(0 < stop - start <= MAX_TURN_TOKENS for start, stop in ranges)
    model = AutoModelForCausalLM.from_pretrained(ensure_model("tiny"), dtype=torch.float32)
    with torch.no_grad():
        own = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
    sampled = {at for start, stop in ranges for at in range(start, stop)}
    assert len(logprobs) == len(ids)
    for at, logprob in enumerate(logprobs):
        if at in sampled:
            assert logprob == pytest.approx(own[at - 1, ids[at]].item(), abs=1e-3)
        else:
            assert logprob == 0.0
    assert sample["extra_logs"]["container_rollbacks"] == (fault == "kill")
    assert (sample["extra_logs"]["container_tokens_cut"] > 0) is (fault == "kill")


@container
def test_max_len_bounds_the_whole_context(actor: Any, tokenizer: Any, label: dict[str, Any]) -> None:
    (short,) = samples(actor, tokenizer, [label], max_length=18)
    assert short["truncated"]
    assert len(short["observation_tokens"]) <= 18
    (alone,) = samples(actor, tokenizer, [label], sampling_params=sampling(logprobs=None, max_tokens=1))
    assert alone["rollout_log_probs"] is None
    assert all(stop - start == 1 for start, stop in alone["action_ranges"])


@container
def test_a_lost_sample_leaves_its_siblings_advantages_as_they_are_without_it(
    actor: Any, tokenizer: Any, label: dict[str, Any]
) -> None:
    import torch

    bad = label | {"fault": "constructor", "once": "baseline"}
    generator = samples_generator(actor, tokenizer, [("Count: ", bad), ("Count on: ", label)], num_samples=4)
    found, _, num_consumed, _ = generator.generate_samples(max_len=MAX_LENGTH, temperature=1.0)
    assert (len(found), num_consumed) == (8, 2)
    (one,) = [sample for sample in found if sample.info["container_failed"].item()]
    group = [sample for sample in found if sample.prompts == one.prompts]
    left = [sample for sample in group if sample is not one]
    assert one.rewards.item() == pytest.approx(torch.cat([sample.rewards for sample in left]).mean().item())
    assert one.action_mask.sum() == 0
    assert one.response_length.item() == 0
    assert len({sample.rewards.item() for sample in left}) > 1
    for estimator in ("reinforce_baseline", "dr_grpo"):
        whole = advantages(group, estimator)
        without = advantages(left, estimator)
        assert not whole.pop([sample is one for sample in group].index(True)).any()
        for ours, theirs in zip(whole, without, strict=True):
            torch.testing.assert_close(ours, theirs)
    # These divide by what the group's size is taken for (docs/openrlhf.md): one factor for all.
    for estimator, factor in (("rloo", (4 / 3) / (3 / 2)), ("group_norm", (3 / 2) ** 0.5)):
        whole = advantages(group, estimator)
        del whole[[sample is one for sample in group].index(True)]
        for ours, theirs in zip(whole, advantages(left, estimator), strict=True):
            torch.testing.assert_close(ours, theirs * factor)


def samples_generator(actor: Any, tokenizer: Any, prompts: Sequence[Any], *, num_samples: int) -> Any:
    """OpenRLHF's own, with a data loader of one batch."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    args = SimpleNamespace(
        rollout=SimpleNamespace(batch_size=len(prompts), n_samples_per_prompt=num_samples),
        vllm=SimpleNamespace(enable_sleep=False),
        algo=SimpleNamespace(
            dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="token")
        ),
    )
    texts, labels = zip(*prompts, strict=True)
    loader = [([""] * len(texts), list(texts), list(labels), [None] * len(texts))]
    return SamplesGenerator(SimpleNamespace(args=args), loader, [], tokenizer, [actor])


def advantages(group: Sequence[Any], estimator: str) -> list[Any]:
    """What OpenRLHF's experience maker computes for one group."""
    import copy

    import torch

    maker = upstream("trainer/ppo_utils/experience_maker.py", "compute_advantages_and_returns")
    cumulate = upstream("trainer/ppo_utils/experience_maker.py", "get_cumulative_returns")
    experiences = copy.deepcopy(list(group))
    for at, experience in enumerate(experiences):
        experience.index = [at]
        experience.kl = torch.zeros(experience.action_mask.shape)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=len(group)),
        reward=SimpleNamespace(clip_range=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
        ),
    )
    this = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        advantage_estimator=estimator,
        kl_ctl=SimpleNamespace(value=0.0),
    )
    this.get_cumulative_returns = lambda *given: cumulate(this, *given)
    return [experience.advantages * experience.action_mask for experience in maker(this, experiences)]


def upstream(path: str, name: str) -> Any:
    """One function of the installed OpenRLHF, from a module whose imports want CUDA."""
    import openrlhf
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

    source = (Path(openrlhf.__file__).parent / path).read_text()
    (function,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    scope: dict[str, Any] = {
        "Experience": Experience,
        "apply_length_penalties": apply_length_penalties,
        "itertools": itertools,
        "torch": torch,
    }
    exec("from typing import *", scope)
    if name != "compute_reward":
        scope["compute_reward"] = upstream("models/utils.py", "compute_reward")
    exec(ast.unparse(function), scope)
    return scope[name]


@container
def test_a_cancelled_batch_leaves_no_container(actor: Any, tokenizer: Any, label: dict[str, Any]) -> None:
    import ray

    label |= {"turn": "sleep 50"}
    ref = ask(actor, tokenizer, label, num_samples=2)
    wait_for_containers(label, 2)
    time.sleep(2)  # both are in their commands, or about to be
    began = time.monotonic()
    ray.cancel(ref)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(ref, timeout=30)
    assert time.monotonic() - began < 8
    (after,) = samples(actor, tokenizer, [label | {"turn": ""}])
    assert "error" not in after


@container
def test_a_dead_engine_ends_the_batch_and_leaves_no_container(
    cluster: None, tokenizer: Any, label: dict[str, Any]
) -> None:
    import psutil
    import ray

    doomed = new_actor()
    pid = ray.get(doomed.__ray_call__.remote(lambda self: os.getpid()))
    (engine,) = [
        child for child in psutil.Process(pid).children(recursive=True) if "EngineCore" in child.name()
    ]
    ref = ask(doomed, tokenizer, label | {"turn": "sleep 1; echo $n ok"}, num_samples=2)
    wait_for_containers(label, 2)
    engine.kill()
    with pytest.raises(EngineFailed, match="EngineDeadError"):
        ray.get(ref, timeout=60)
    # The first failure is the batch's: the other sample may be closing still, and needs its process for that.
    with Store(Path(label["store"])) as store:
        wait_until(lambda: not store.homes())
    ray.kill(doomed)


def wait_for_containers(label: dict[str, Any], num: int) -> None:
    with Store(Path(label["store"])) as store:
        wait_until(lambda: len(store.homes()) >= num)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.1)


@container
def test_the_example_is_what_upstream_loads_and_its_prompts_are_its_tasks(runtime: object) -> None:
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

    folder = ROOT / "examples/openrlhf_swe"
    executor = _load_agent_executor(str(folder / "agent.py"))
    module = sys.modules.get("agent_module")
    assert module is None  # upstream keeps it out of there, and so nothing may want it there
    done = subprocess.run([sys.executable, folder / "agent.py"], capture_output=True, text=True, check=True)
    assert done.stdout == (folder / "prompts.jsonl").read_text()
    labels = [json.loads(line)["label"] for line in done.stdout.splitlines()]
    assert labels == ["belayer__wrapline-1", "bugfix", "service", "wheel"]
    assert executor.rollouts.close()


def test_the_flags_of_the_example_are_those_of_the_installed_parser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (ROOT / "examples/openrlhf_swe/train.sh").read_text()
    command_line = (
        script[script.index("-m belayer_integrations.openrlhf.train") :].replace("\\\n", " ").splitlines()[0]
    )
    flags = [word for word in shlex.split(command_line, comments=True)[2:] if word != "$@"]
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *flags])
    args = parsed()
    assert "[Warning]" not in capsys.readouterr().out
    assert Path(args.train.agent_func_path).name == "agent.py"
    assert (ROOT / "examples/openrlhf_swe" / Path(args.train.agent_func_path).name).is_file()
    assert args.reward.remote_url == ["agent"]
    assert args.critic.model_name_or_path is None


def parsed() -> Any:
    """The command line as OpenRLHF's own main program parses and checks it: all of that but the training."""
    import argparse

    import openrlhf

    source = (Path(openrlhf.__file__).parent / "cli/train_ppo_ray.py").read_text()
    (main,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    kept = [node for node in main.body if ast.unparse(node) != "train(args)"]
    assert len(kept) == len(main.body) - 1
    scope: dict[str, Any] = {"argparse": argparse}
    exec("import os; from datetime import datetime", scope)
    exec("\n".join(map(ast.unparse, kept)), scope)
    return scope["args"]
