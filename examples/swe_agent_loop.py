"""An agent that mends a repository in a container, whatever befalls the container.

python examples/swe_agent_loop.py                                   a scripted agent, on the task "bugfix"
python examples/swe_agent_loop.py --task service --chaos 3          the container is killed three times
python examples/swe_agent_loop.py --model NAME --base-url URL/v1    any OpenAI-compatible chat endpoint
python examples/swe_agent_loop.py --model FOLDER                    a model on disk, by vLLM and a shadow
"""
# ruff: noqa: T201

import argparse
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import requests
from belayer_integrations.swe import repository_task, swe_task
from belayer_integrations.swe.records import bundled_records

from belayer_env import ContainerEnv, Conversation, Task, paths

TASKS = Path(__file__).parent / "swe_tasks"
SYSTEM = """You work in a Linux container through its bash shell. Answer with your reasoning, and then exactly
one command in a ```bash block. Its output is the next message. When the task is done, run: submit"""
CONTEXT_TOKENS = 8192
"""For a model on disk."""

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


def chat(model: str, base_url: str, api_key: str, max_tokens: int) -> Policy:
    """A model behind an OpenAI-compatible chat endpoint."""

    def answer(messages: Sequence[Mapping[str, Any]]) -> str:
        response = requests.post(
            f"{base_url}/chat/completions",
            json={"model": model, "messages": messages, "max_tokens": max_tokens},
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=600,
        )
        response.raise_for_status()
        text = response.json()["choices"][0]["message"]["content"] or ""
        return command if (command := last_command(text)) is not None else "echo 'No ```bash block found.'"

    return answer


@contextmanager
def served(folder: str) -> Iterator[str]:
    """The URL of a chat endpoint for a model on disk, which runs until the block ends. Its engine has a
    shadow: like the container's, its death is not the episode's."""
    belayer = Path(sys.executable).with_name("belayer")
    argv = [belayer, "rollout", "serve", "--model", folder, "--name", folder, "--port", "0"]
    argv += ["--journal", ":memory:", "--max-model-len", str(CONTEXT_TOKENS)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stderr or ())
            for line in lines:
                sys.stderr.write(line)
                if (found := re.search(r"Serving on (\S+)", line)) is not None:
                    break
            else:
                raise SystemExit(f"belayer rollout serve ended with status {server.wait()}")
            threading.Thread(target=lambda: sys.stderr.writelines(lines), daemon=True).start()
            yield found[1]
        finally:
            server.terminate()


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
    parser.add_argument("--model", help="its name at --base-url, or a folder; else a scripted agent")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each of the model's turns")
    parser.add_argument("--most-steps", type=int, default=50)
    parser.add_argument("--chaos", type=int, default=0, metavar="N", help="kill the container N times")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    task, solution = load_task(given.task)
    local = served(given.model) if given.model and Path(given.model).is_dir() else nullcontext(given.base_url)
    with local as url:
        policy = (
            chat(given.model, url, given.api_key, given.max_tokens) if given.model else scripted(solution)
        )
        reward, _ = run_episode(task, policy, most_steps=given.most_steps, chaos=given.chaos, seed=given.seed)
    raise SystemExit(0 if reward == 1.0 else 1)


if __name__ == "__main__":
    main()
