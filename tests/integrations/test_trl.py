"""TRL's GRPOTrainer on container envs: case C09, token for token alignment, a training under faults, tool
calls."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from belayer_integrations.encoding import Encoder
from belayer_integrations.trl import container_reward, environment_factory, make_rollout_func

from belayer_env import ContainerEnv, Limits, Task
from belayer_env.runtimes import open_runtime
from belayer_env.sandbox.layers import open_layers
from belayer_env.store import Store
from tests.memory_sandbox import Faults, FaultyRuntime

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.criu,
    pytest.mark.timeout(300),
    # TRL's and torch's own: vLLM's newest version, an experimental argument, deprecations among themselves.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("runtime", ["runc"], indirect=True),
    pytest.mark.usefixtures("runtime"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo_container.py"
NUM_SAMPLES = 8
STEP_LIMIT_S = 10.0
WORDS = ["<pad>", "<end>", "<unknown>", "begin", "a", "b", "c", "ok", *map(str, range(30))]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example, by its path; it imports torch and TRL."""
    spec = importlib.util.spec_from_file_location("trl_grpo_container", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def store(runtime: object, store_dir: Path) -> Iterator[Store]:
    """All envs of a test are closed at its end."""
    root = store_dir / "trl"
    with Store(root) as store:
        yield store
        assert store.homes() == []
        assert {episode.state for episode in store.episodes()} <= {"closed"}
    open_layers(store_dir).drop(root)


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def tiny_model(tokenizer: Any, base: type[Any] | None = None) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return (base or Qwen3ForCausalLM)(config)


def make_trainer(prompts: Sequence[Any], tmp_path: Path, **given: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = given.pop("tokenizer", None) or word_tokenizer()
    config = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2 * NUM_SAMPLES,
        "num_generations": 2,
        "max_completion_length": 40,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **given.pop("config", {}),
    }
    return GRPOTrainer(
        model=given.pop("model", None) or tiny_model(tokenizer),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        args=GRPOConfig(**config),
        **given,
    )


class Watched(ContainerEnv):
    """Keeps what each ledger holds at its end."""

    ledgers: dict[str, list[str]] = {}  # noqa: RUF012 - cleared by the test that reads it

    def close(self) -> None:
        if self._episode is not None:
            self.ledgers[self.task.env["NUMBER"]] = [step.action for step in self._episode.ledger.steps]
        super().close()


class Doomed(ContainerEnv):
    """Killed in its second step, all its checkpoints damaged, and no fresh sandbox to be had either."""

    faults: Faults
    takes_fresh_too = True

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if len(self.episode.ledger) == 1:
            ref = self.checkpoint()
            damage(self._store, ref.id)
            if self.takes_fresh_too:
                for _ in range(50):
                    self.faults.arm("create", "before", "refuse")
            self.episode.sandbox.kill()
        return super().step(action)


def damage(store: Store, checkpoint_id: str) -> None:
    images = [path for path in (store.root / "checkpoints").rglob("*.img") if checkpoint_id in str(path)]
    assert images
    for image in images:
        image.write_bytes(image.read_bytes()[:-1] + b"?")


def broken_reward(sandbox: object, ledger: object) -> float:
    raise LookupError("the reward of number two")


def count_reward(sandbox: Any, ledger: Any) -> float:
    return float(sandbox.run("echo $n").output)


def c09_task(number: int, image: str, *, with_faults: bool) -> Task:
    """Counts its steps in the shell, and says how many."""
    hangs = with_faults and number == 6
    return Task(
        image=image,
        env={"NUMBER": str(number)},
        setup=[f"n=0; turn() {{ {'sleep 999' if hangs else 'n=$((n+1)); echo $n ok'}; }}"],
        reward=broken_reward if with_faults and number == 2 else count_reward,
    )


def c09_env(
    store: Store, image: str, *, with_faults: bool, takes_fresh_too: bool = True
) -> Callable[..., ContainerEnv]:
    def make(task: Task, **options: Any) -> ContainerEnv:
        number = int(task.env["NUMBER"])
        if with_faults and number == 7:
            raise PermissionError("the constructor of number seven")
        options |= {"store": store, "policy": "adaptive"}
        if with_faults and number == 4:
            faults = Faults()
            runtime = FaultyRuntime(open_runtime("runc", store), faults)
            doomed = Doomed(task, **options | {"runtime": runtime})
            doomed.faults, doomed.takes_fresh_too = faults, takes_fresh_too
            return doomed
        return Watched(task, **options)

    return make


def c09_rollout_func(store: Store, image: str, **given: Any) -> Any:
    with_faults = given["with_faults"]
    return make_rollout_func(
        lambda prompt: c09_task(int(str(prompt).split()[1]), image, with_faults=with_faults),
        max_turns=4,
        max_turn_tokens=2,
        parse_action=lambda text: f"turn '{text}'",
        step_timeout_s=STEP_LIMIT_S,
        env=c09_env(store, image, **given),
    )


def c09_rollout(store: Store, image: str, tmp_path: Path, **given: Any) -> tuple[Mapping[str, Any], float]:
    rollout = c09_rollout_func(store, image, **given)
    trainer = make_trainer(["begin"], tmp_path, rollout_func=rollout, reward_funcs=container_reward)
    random.seed(0)
    began = time.monotonic()
    result = rollout([f"begin {number}" for number in range(NUM_SAMPLES)], trainer)
    took_s = time.monotonic() - began
    assert rollout.close()
    return result, took_s


def row(result: Mapping[str, Any], number: int) -> dict[str, Any]:
    """All of a sample but what recovery cost. (Another batch may change the last bits of a logprob.)"""
    row = {name: values[number] for name, values in result.items() if name != "container_recoveries"}
    return row | {"logprobs": [round(logprob, 4) for logprob in row["logprobs"]]}


def test_four_bad_episodes_take_no_sibling_with_them(store: Store, image: str, tmp_path: Path) -> None:
    calm, _ = c09_rollout(store, image, tmp_path, with_faults=False)
    assert calm["container_reward"] == [sum(range(1, 5))] * NUM_SAMPLES
    result, took_s = c09_rollout(store, image, tmp_path, with_faults=True)
    # The slowest limit, and what one reset and some steps take on a busy machine.
    assert took_s < STEP_LIMIT_S + 30
    for number in (0, 1, 3, 5):
        assert row(result, number) == row(calm, number)
    for number, text in (
        (2, "LookupError: the reward of number two"),
        (4, "RecoveryFailed: "),
        (6, f"TimeoutError: the step took longer than step_timeout_s={STEP_LIMIT_S:g}"),
        (7, "PermissionError: the constructor of number seven"),
    ):
        assert result["container_error"][number].startswith(text)
        assert result["container_reward"][number] is None
        mask = result["env_mask"][number]
        assert not any(mask)
        assert len(mask) == len(result["logprobs"][number]) == len(result["completion_ids"][number]) > 0


def test_with_a_fresh_sandbox_to_be_had_damaged_checkpoints_are_no_failure(
    store: Store, image: str, tmp_path: Path
) -> None:
    calm, _ = c09_rollout(store, image, tmp_path, with_faults=False)
    result, _ = c09_rollout(store, image, tmp_path, with_faults=True, takes_fresh_too=False)
    assert row(result, 4) == row(calm, 4)
    assert result["container_recoveries"][4] == 1


def test_training_goes_on_with_the_samples_that_are_left(store: Store, image: str, tmp_path: Path) -> None:
    import torch

    rollout = c09_rollout_func(store, image, with_faults=True)
    trainer = make_trainer(
        [f"begin {number}" for number in range(NUM_SAMPLES)],
        tmp_path,
        rollout_func=rollout,
        reward_funcs=container_reward,
    )
    trainer.train()
    assert rollout.close()
    logged = trainer.state.log_history[0]
    assert logged["reward"] == sum(range(1, 5))
    assert logged["container/failed"] == 2 * 4
    assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())


def test_when_no_env_can_be_made_the_reason_is_raised(store: Store, image: str, tmp_path: Path) -> None:
    rollout = make_rollout_func(lambda prompt: Task(image="rootfs:/nowhere"), max_turns=2, store=store)
    trainer = make_trainer(["begin"], tmp_path, rollout_func=rollout, reward_funcs=container_reward)
    with pytest.raises(Exception, match="nowhere"):
        rollout(["begin"] * 2, trainer)


def test_tokens_masks_and_logprobs_are_those_of_the_episode(store: Store, image: str, tmp_path: Path) -> None:
    """Under rollbacks too: what the model sampled and was not undone are the ledger's actions, and each
    logprob is the one that the trainer computes for the whole sequence."""
    import torch

    class Unlucky(Watched):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if (
                self.task.env["NUMBER"] != "0"
                and len(self.episode.ledger) == 3
                and not self.telemetry.recoveries
            ):
                self.episode.sandbox.kill()
            return super().step(action)

    def task_of(prompt: Any) -> Task:
        number = int(str(prompt).split()[1])
        second = "echo $RANDOM" if number == 2 else "echo ok"  # no replay tells the same story
        setup = [f'n=0; turn() {{ n=$((n+1)); if [ $n = 2 ]; then {second}; else echo "$n ok"; fi; }}']
        return Task(image=image, env={"NUMBER": str(number)}, setup=setup)

    Watched.ledgers.clear()
    rollout = make_rollout_func(
        task_of,
        max_turns=6,
        max_turn_tokens=3,
        parse_action=lambda text: f"turn '{text}'",
        env=Unlucky,
        policy="never",
        store=store,
    )
    trainer = make_trainer(
        ["begin"], tmp_path, rollout_func=rollout, reward_funcs=container_reward, config={"temperature": 0.7}
    )
    was_training = trainer.model.training
    result = rollout([f"begin {number}" for number in range(3)], trainer)
    assert trainer.model.training is was_training
    assert result["container_error"] == [None] * 3
    assert result["container_recoveries"] == [0, 1, 1]
    assert result["container_rollbacks"] == [0, 0, 1]
    encoder = Encoder.of_trainer(trainer)
    for number in range(3):
        prompt, completion, mask, logprobs = (
            result[name][number] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")
        )
        actions = [f"turn '{encoder.text(turn)}'" for turn in turns_of(completion, mask, trainer)]
        assert actions == Watched.ledgers[str(number)]
        assert len(actions) == 6
        with torch.no_grad():
            ids = torch.tensor([prompt + completion])
            logits = trainer.model(ids).logits[0, len(prompt) - 1 : -1] / 0.7
        own = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()
        for token_logprob, logprob, is_sampled in zip(own, logprobs, mask, strict=True):
            assert logprob == (pytest.approx(token_logprob, abs=1e-4) if is_sampled else 0.0)


def turns_of(completion: Sequence[int], mask: Sequence[int], trainer: Any) -> Iterator[list[int]]:
    """Runs of sampled tokens."""
    turn: list[int] = []
    for token, is_sampled in zip([*completion, 0], [*mask, 0], strict=True):
        if is_sampled:
            turn.append(token)
        elif turn:
            yield turn
            turn = []


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupt_in_a_reward_passes_and_leaves_nothing(
    store: Store, image: str, tmp_path: Path, interrupt: type[BaseException]
) -> None:
    def reward(*_: object) -> float:
        raise interrupt

    rollout = make_rollout_func(
        lambda prompt: Task(
            image=image,
            env={"PAUSE": "50" if prompt == "c" else "0"},
            reward=reward if prompt == "b" else None,
        ),
        max_turns=3,
        max_turn_tokens=1,
        parse_action=lambda text: "sleep $PAUSE",
        store=store,
    )
    trainer = make_trainer(["begin"], tmp_path, rollout_func=rollout, reward_funcs=container_reward)
    began = time.monotonic()
    with pytest.raises(interrupt):
        rollout(["a", "b", "c"], trainer)
    assert time.monotonic() - began < 40  # the command of "c" takes longer


def test_an_interrupt_while_containers_work_passes_at_once(store: Store, image: str, tmp_path: Path) -> None:
    rollout = make_rollout_func(
        lambda prompt: Task(image=image, limits=Limits(step_timeout_s=60)),
        max_turns=3,
        max_turn_tokens=1,
        parse_action=lambda text: "sleep 50",
        store=store,
    )
    trainer = make_trainer(["begin"], tmp_path, rollout_func=rollout, reward_funcs=container_reward)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(4.0, signal.pthread_kill, (main, signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rollout(["a", "b"], trainer)
    assert time.monotonic() - began < 30


def test_the_example_learns_the_same_under_faults(
    example: ModuleType, store_dir: Path, runtime: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches: not the proof that it learns (docs/trl.md has that), but that faults change no reward,
    and that nothing is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(store_dir / "state"))
    runs = [
        example.train(arm="", seed=0, batches=3, faults=faults, is_plain=is_plain)
        for faults, is_plain in ((0.0, False), (0.2, False), (0.2, True))
    ]
    calm, recovered, plain = runs
    assert recovered.kills > 10
    assert recovered.recoveries > 0
    assert (recovered.lost, recovered.rollbacks, recovered.corrupted) == (0, 0, 0)
    assert recovered.rewards == calm.rewards
    assert plain.corrupted > 10
    assert plain.rewards != calm.rewards
    with Store(store_dir / "state" / "belayer") as store:
        assert store.homes() == []
        assert {episode.state for episode in store.episodes()} == {"closed"}
    open_layers(store_dir).drop(store_dir / "state")


# -- environment_factory


def chat_tokenizer() -> Any:
    """Bytes, and a chat template that TRL knows."""
    import trl
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(BPE({character: n for n, character in enumerate(alphabet)}, []))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    return tokenizer


def scripted_model(tokenizer: Any, script: Callable[[str], str]) -> Any:
    """A real model, but for its generation: what it says is a function of the text of its context."""
    import torch
    from transformers import Qwen3ForCausalLM

    class Scripted(Qwen3ForCausalLM):
        def generate(self, input_ids: Any, **_: Any) -> Any:
            said = [tokenizer.encode(script(tokenizer.decode(ids))) for ids in input_ids]
            width = max(map(len, said))
            pad = tokenizer.pad_token_id
            return torch.cat(
                [input_ids, torch.tensor([ids + [pad] * (width - len(ids)) for ids in said])], dim=1
            )

    return tiny_model(tokenizer, Scripted)


def tool_call(command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def three_turns(context: str) -> str:
    """``turn a``, twice, and a last word."""
    return tool_call("turn a") if context.count("<tool_response>") < 2 else "Done.<|im_end|>"


def test_environments_survive_c09_in_trls_own_tool_loop(store: Store, image: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    factory = environment_factory(
        lambda row: c09_task(row["number"], image, with_faults=True),
        step_timeout_s=STEP_LIMIT_S,
        env=c09_env(store, image, with_faults=True),
    )
    seen: list[tuple[str | None, float | None]] = []
    texts: list[str] = []

    def look(completions: Any, environments: Any, number: Any, **_: Any) -> list[None]:
        seen.extend((environment.error, environment.get_reward()) for environment in environments)
        texts.extend(json.dumps(completion) for completion in completions)
        assert list(number) == sorted(number)
        return [None] * len(environments)

    prompts = [[{"role": "user", "content": f"Task {number}."}] for number in range(NUM_SAMPLES)]
    from datasets import Dataset

    with factory:
        trainer = make_trainer(
            prompts,
            tmp_path,
            tokenizer=tokenizer,
            model=scripted_model(tokenizer, three_turns),
            environment_factory=factory,
            reward_funcs=[look],
            config={"max_completion_length": 1500, "max_steps": 1, "shuffle_dataset": False},
        )
        trainer.train_dataset = Dataset.from_dict({"prompt": prompts, "number": list(range(NUM_SAMPLES))})
        trainer.train()
    assert len(seen) == 2 * NUM_SAMPLES
    for number in range(NUM_SAMPLES):
        for error, reward in seen[2 * number : 2 * number + 2]:
            if number in (2, 4, 6, 7):
                assert error is not None
                assert reward is None
            else:
                assert (error, reward) == (None, 1 + 2)
    assert "1 ok" in texts[0]
    assert "the constructor of number seven" in texts[14]
    assert trainer.state.log_history[0]["rewards/ContainerEnvironment/mean"] == 3.0


def test_an_environment_tells_of_a_rollback_and_forgets_its_rewards(store: Store, image: str) -> None:
    environments = []

    def make(task: Task, **options: Any) -> ContainerEnv:
        environments.append(ContainerEnv(task, **options))
        return environments[-1]

    factory = environment_factory(
        lambda row: Task(image=image, instruction=row["what"], reward=lambda sandbox, ledger: 1.0),
        policy="never",
        env=make,
        store=store,
    )
    with factory:
        environment = factory()
        assert environment.reset(what="Look.", other=1) == "Look."
        environment.bash("echo a")
        environment.bash("cat /proc/sys/kernel/random/uuid")
        environments[0].episode.sandbox.kill()
        assert "rolled back" in environment.bash("echo b")
        assert environment.get_reward() == 1.0
        assert environment.reset(what="Again.") == "Again."
        assert environment.get_reward() == 0
        assert environment.bash("echo c") == "c\n"
    assert environment.bash("echo d") == "[the episode is over]\n"
    factory.close()


def test_environments_that_nobody_closed_end_with_the_process(
    store_dir: Path, runtime: object, image: str, tmp_path: Path
) -> None:
    import subprocess

    program = f"""
from belayer_env import Task
from belayer_integrations.trl import environment_factory
factory = environment_factory(lambda row: Task(image={image!r}), store={str(store_dir / "forgotten")!r})
environment = factory()
environment.reset()
print(environment.bash("echo here"), end="")
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("here\n", "", 0)
    with Store(store_dir / "forgotten") as store:
        assert store.homes() == []
        assert {episode.state for episode in store.episodes()} == {"closed"}
    open_layers(store_dir).drop(store_dir / "forgotten")
