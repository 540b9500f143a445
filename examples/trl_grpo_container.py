"""A tiny model learns a container task by GRPO (TRL), on a CPU, while its containers are killed all along.

python examples/trl_grpo_container.py                        one training run
python examples/trl_grpo_container.py --faults 0.1           of ten commands, one finds its container killed
python examples/trl_grpo_container.py --faults 0.1 --plain   the same, on an env that does not recover
python examples/trl_grpo_container.py --faults 0.1 --seeds 3 --plot curves.png      all three, and a picture

The model speaks words, and each word is a command. To earn the whole reward it must make a directory, go
there, set a variable, write the variable to a file there, and start a process: state in files, in the shell
and in processes, over five turns, and all of it gone if the container is.

The plain env does what a wrapper around a container does without Belayer: where its container is found dead,
it starts a fresh one, runs the command there, and says nothing. The model's context then tells of a state
that is not there: the trajectory is corrupted.
"""
# ruff: noqa: T201

import argparse
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from belayer_integrations.trl import container_reward, make_rollout_func
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from belayer_env import ContainerEnv, Task, paths
from belayer_env.ledger import Ledger
from belayer_env.sandbox.base import Sandbox

COMMANDS = {
    "make": "mkdir work",
    "enter": "cd ~/work",
    "name": "colour=red",
    "write": '[ "$PWD" = ~/work ] && echo "$colour" >seal',
    "serve": "kill -0 $! || { sleep 1000 & }",
    "wait": "true",
}
CHECKS = (
    "[ -d ~/work ]",
    '[ "$PWD" = ~/work ]',
    '[ "$colour" = red ]',
    '[ "$(cd ~/work && cat seal)" = red ]',
    "kill -0 $!",
)
MAX_TURNS = 8
ITERATIONS = 3  # over each batch: containers cost more than this model's gradients
WORDS = ["<pad>", "<end>", "<unknown>", "begin", "ok", "no", *COMMANDS]


def reward(sandbox: Sandbox, ledger: Ledger) -> tuple[float, bool]:
    """A fifth for each check; asked in the sandbox's own shell, as that is where the state is."""
    asked = "; ".join(f"{{ {check}; }} 2>/dev/null && echo y" for check in CHECKS)
    score = sandbox.run(asked).output.count("y") / len(CHECKS)
    return score, score == 1.0


def task_of(prompt: Any, *, is_plain: bool) -> Task:
    """The one task there is."""
    image = f"rootfs:{paths.test_image()}"
    return Task(image=image, reward=reward, replay="never" if is_plain else "always")


def command_of(text: str) -> str | None:
    """A word of the model as a command that says "ok" or "no"."""
    command = COMMANDS.get(text.strip())
    return f"{{ {command}; }} >/dev/null 2>&1 && echo ok || echo no" if command else "echo no"


@dataclass
class Drills:
    """Faults to come, and what came of them."""

    rate: float = 0.0
    seed: int = 0
    kills: int = 0
    episodes: int = 0
    corrupted: int = 0
    numbers: Any = field(default_factory=itertools.count)


class DrilledEnv(ContainerEnv):
    """A container env whose container is killed now and then: before a command, or while it runs."""

    def __init__(self, task: Task, *, drills: Drills, **options: Any) -> None:
        super().__init__(task, **options)
        self.drills = drills
        self.draw = random.Random(f"{drills.seed} {next(drills.numbers)}")
        drills.episodes += 1

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A step, and perhaps a fault."""
        if self.draw.random() < self.drills.rate:
            self.drills.kills += 1
            if self.draw.random() < 0.5:
                self.episode.sandbox.kill()
            else:
                threading.Timer(self.draw.uniform(0.0, 0.003), self.episode.sandbox.kill).start()
        return super().step(action)


class PlainEnv(DrilledEnv):
    """Without recovery: a fresh container takes the dead one's place, and the episode goes on in it."""

    is_corrupted = False

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A step; after a fault, in an empty container."""
        had_steps = len(self.episode.ledger) > 0
        result = super().step(action)
        while "rollback" in result[-1]:
            if had_steps and not self.is_corrupted:
                self.is_corrupted = True
                self.drills.corrupted += 1
            result = ContainerEnv.step(self, action)
        return result


@dataclass(kw_only=True)
class Run:
    """One training run. ``rewards``: the mean of each batch; ``final``: of the last ten. ``tested``: the mean
    of 32 episodes of the trained model, without faults. ``corrupted``: trajectories that went on in an empty
    container; ``lost``: those that failed."""

    arm: str
    seed: int
    rewards: list[float]
    final: float
    tested: float
    episodes: int
    kills: int
    recoveries: int
    rollbacks: int
    corrupted: int
    lost: int
    seconds: float


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """About a hundred thousand parameters, as they come."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def last(rewards: Sequence[float]) -> float:
    """The reward is a state's: that of an episode is its last."""
    return rewards[-1] if rewards else 0.0


def mean(rewards: Sequence[float | None]) -> float:
    """Of the trajectories that count."""
    return statistics.fmean(reward for reward in rewards if reward is not None)


def train(*, arm: str, seed: int, batches: int, faults: float, is_plain: bool) -> Run:
    """One training run, of as many batches of 16 episodes."""
    started_s = time.monotonic()
    drills = Drills(rate=faults, seed=seed)
    rollout = make_rollout_func(
        partial(task_of, is_plain=is_plain),
        max_turns=MAX_TURNS,
        max_turn_tokens=1,
        parse_action=command_of,
        total=last,
        env=partial(PlainEnv if is_plain else DrilledEnv, drills=drills),
        policy="never" if is_plain else "adaptive",
    )
    rewards: list[float] = []
    counts = {"container_recoveries": 0, "container_rollbacks": 0, "lost": 0}

    def rollout_func(prompts: list[Any], trainer: Any) -> Any:
        result = rollout(prompts, trainer)
        rewards.append(mean(result["container_reward"]))
        for name in ("container_recoveries", "container_rollbacks"):
            counts[name] += sum(result[name])
        counts["lost"] += sum(reward is None for reward in result["container_reward"])
        return result

    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    trainer = GRPOTrainer(
        model=make_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=container_reward,
        rollout_func=rollout_func,
        train_dataset=Dataset.from_dict({"prompt": ["begin"] * 100}),
        args=GRPOConfig(
            output_dir="unused",
            max_steps=batches * ITERATIONS,
            per_device_train_batch_size=16,
            num_generations=16,
            max_completion_length=2 * MAX_TURNS,
            num_iterations=ITERATIONS,
            learning_rate=2e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=15,
            seed=seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    counted = Drills(**asdict(drills) | {"numbers": None})
    drills.rate = 0.0
    tested = rollout(["begin"] * 32, trainer)["container_reward"]
    rollout.close()
    return Run(
        arm=arm,
        seed=seed,
        rewards=rewards,
        final=statistics.fmean(rewards[-10:]),
        tested=mean(tested),
        episodes=counted.episodes,
        kills=counted.kills,
        recoveries=counts["container_recoveries"],
        rollbacks=counts["container_rollbacks"],
        corrupted=counted.corrupted,
        lost=counts["lost"],
        seconds=time.monotonic() - started_s,
    )


def table(runs: Sequence[Run]) -> str:
    """What came of each arm, as Markdown: the mean over its seeds, and the least and the greatest."""
    lines = [
        "| | last ten batches | trained model, no faults | kills | new containers | corrupted | lost | of |",
        "| --- " * 8 + "|",
    ]
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm]
        means = [
            f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for values in ([run.final for run in of_arm], [run.tested for run in of_arm])
        ]
        names = ("kills", "recoveries", "corrupted", "lost", "episodes")
        sums = [str(sum(getattr(run, name) for run in of_arm)) for name in names]
        lines.append(f"| {' | '.join([arm, *means, *sums])} |")
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """A curve an arm: the mean over its seeds, five batches at a time, and from the least to the greatest."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for arm in dict.fromkeys(run.arm for run in runs):
        curves = [
            [statistics.fmean(run.rewards[max(0, at - 4) : at + 1]) for at in range(len(run.rewards))]
            for run in runs
            if run.arm == arm
        ]
        batches = range(1, len(curves[0]) + 1)
        columns = list(zip(*curves, strict=True))
        style = "--" if "Belayer" in arm else "-"  # it may lie on the one without faults
        (line,) = axes.plot(batches, [statistics.fmean(column) for column in columns], style, label=arm)
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(batches, low, high, alpha=0.15, color=line.get_color())
    axes.set(xlabel="batches of 16 episodes", ylabel="mean reward", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=float, default=0.0, metavar="RATE", help="kills per command")
    parser.add_argument("--plain", action="store_true", help="an env that does not recover")
    parser.add_argument("--batches", type=int, default=60, help="of 16 episodes each")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="run all three arms, and draw their curves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each run, a line of JSON")
    given = parser.parse_args()
    belayer = ("faults, with Belayer", given.faults, False)
    plain = ("faults, plain env", given.faults, True)
    calm = ("no faults", 0.0, False)
    one = plain if given.plain else belayer if given.faults else calm
    runs = []
    for seed in range(given.seeds):
        for arm, faults, is_plain in (calm, belayer, plain) if given.plot else (one,):
            run = train(arm=arm, seed=seed, batches=given.batches, faults=faults, is_plain=is_plain)
            print(
                f"{arm}, seed {seed}: {run.final:.2f} in {run.seconds:.0f} s",
                flush=True,
            )
            runs.append(run)
            if given.json:
                with given.json.open("a") as file:
                    print(json.dumps(asdict(run)), file=file)
    print(table(runs))
    if given.plot:
        plot(runs, given.plot)


if __name__ == "__main__":
    main()
