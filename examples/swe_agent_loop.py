"""An agent that mends a repository in a container, whatever befalls the container.

python examples/swe_agent_loop.py                                   a scripted agent, on the task "bugfix"
python examples/swe_agent_loop.py --task service --chaos 3          the container is killed three times
python examples/swe_agent_loop.py --model NAME --base-url URL/v1    any OpenAI-compatible chat endpoint
"""
# ruff: noqa: T201

import argparse
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from belayer_integrations.swe import repository_task, swe_task
from belayer_integrations.swe.records import bundled_records

from belayer_env import ContainerEnv, Conversation, Task, paths

TASKS = Path(__file__).parent / "swe_tasks"
SYSTEM = """You work in a Linux container through its bash shell. Answer with your reasoning, and then exactly
one command in a ```bash block. Its output is the next message. When the task is done, run: submit"""

Policy = Callable[[Sequence[Mapping[str, Any]]], str]
"""From the messages so far to the model's next one."""


def load_task(name: str) -> tuple[Task, list[str]]:
    """A bundled task, and a solution of it."""
    image = f"rootfs:{paths.test_image()}"
    for record, repository in bundled_records():
        if record.instance_id == name:
            solution = [f"git apply <<'END'\n{record.patch}\nEND", "git diff --stat", "submit"]
            return swe_task(record, image=image, repository=repository), solution
    given = json.loads((TASKS / name / "task.json").read_text())
    task = repository_task(
        TASKS / name / "files",
        image=image,
        instruction=given["instruction"],
        check=given["check"],
        setup=tuple(given.get("setup", ())),
    )
    return task, given["solution"]


def scripted(actions: Sequence[str]) -> Policy:
    """A model that says one line of its script after another; where it is depends on its context alone."""

    def answer(messages: Sequence[Mapping[str, Any]]) -> str:
        return actions[sum(message["role"] == "assistant" for message in messages)]

    return answer


def chat(model: str, base_url: str, api_key: str) -> Policy:
    """A model behind an OpenAI-compatible chat endpoint."""

    def answer(messages: Sequence[Mapping[str, Any]]) -> str:
        response = requests.post(
            f"{base_url}/chat/completions",
            json={"model": model, "messages": messages, "max_tokens": 1024},
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=600,
        )
        response.raise_for_status()
        text = response.json()["choices"][0]["message"]["content"] or ""
        return command if (command := last_command(text)) is not None else "echo 'No ```bash block found.'"

    return answer


def last_command(text: str) -> str | None:
    """The last fenced shell command of a message."""
    found = re.findall(r"```(?:bash|sh)?\n(.*?)```", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


def faults(count: int, seed: int) -> Iterator[Callable[[ContainerEnv], None]]:
    """For each step a drill: ``count`` of them kill the container, before the command or in it."""
    draw = random.Random(seed)
    while count:
        if draw.random() < 0.4:
            yield lambda env: None
            continue
        count -= 1
        delay_s = draw.choice((0.0, draw.uniform(0.001, 0.02)))
        yield lambda env, delay_s=delay_s: kill_after(delay_s, env)
    while True:
        yield lambda env: None


def kill_after(delay_s: float, env: ContainerEnv) -> None:
    """SIGKILL the container: now, or soon, when a command may be running."""
    if delay_s:
        threading.Timer(delay_s, env.episode.sandbox.kill).start()
    else:
        env.episode.sandbox.kill()


def run_episode(
    task: Task, policy: Policy, *, most_steps: int = 50, chaos: int = 0, seed: int = 0
) -> tuple[float, Conversation]:
    """The loop that every agent has, and the two lines that Belayer adds: cut the context when told to."""
    drills = faults(chaos, seed)
    with ContainerEnv(task) as env:
        instruction, _ = env.reset()
        talk = Conversation([{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}])
        reward, terminated = 0.0, False
        for _ in range(most_steps):
            action = policy(talk.messages)
            next(drills)(env)
            observation, reward, terminated, _, info = env.step(action)
            if "rollback" in info:  # the model must not believe what is not so any more
                talk.cut(info["rollback"])
                continue
            print(f"$ {action}\n{observation}")
            talk.add_message({"role": "assistant", "content": action})
            talk.add_message({"role": "user", "content": observation})
            talk.mark_step(talk.last_step + 1)
            if terminated:
                break
        recoveries = env.telemetry.recoveries
        print(f"reward {reward} after {talk.last_step} steps; the container was lost {len(recoveries)} times")
        for recovery in recoveries:
            print(f"  {recovery.rung}, {recovery.num_replayed} steps replayed, {recovery.total_s:.2f} s")
    return reward, talk


def main() -> None:
    """Read the command line, and run one episode."""
    names = [path.parent.name for path in sorted(TASKS.glob("*/task.json"))]
    names += [record.instance_id for record, _ in bundled_records()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=names, default="bugfix")
    parser.add_argument("--model", help="its name at the endpoint; without it, a scripted agent")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--chaos", type=int, default=0, metavar="N", help="kill the container N times")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    task, solution = load_task(given.task)
    policy = chat(given.model, given.base_url, given.api_key) if given.model else scripted(solution)
    reward, _ = run_episode(task, policy, chaos=given.chaos, seed=given.seed)
    raise SystemExit(0 if reward == 1.0 else 1)


if __name__ == "__main__":
    main()
