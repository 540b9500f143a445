"""What OpenRLHF trains on here: the bundled repositories. A label is a task's name.

python examples/openrlhf_swe/agent.py > examples/openrlhf_swe/prompts.jsonl
"""

import json
from dataclasses import replace
from pathlib import Path

from belayer_integrations.openrlhf import agent_executor, as_user_message
from belayer_integrations.swe import repository_task, swe_task
from belayer_integrations.swe.records import bundled_records

from belayer_env import Limits, Task, paths

IMAGE = f"rootfs:{paths.test_image()}"
FOLDERS = Path(__file__).parents[1] / "swe_tasks"
LIMITS = Limits(output_bytes=2000)  # a model of 4096 tokens has to read it
SYSTEM = """You work in a Linux container through its bash shell. Answer with your reasoning, and then exactly
one command in a ```bash block. Its output is the next message. When the task is done, run: submit"""


def all_tasks() -> dict[str, Task]:
    """By their names; with a data set of your own, a label could be a whole record (`SweRecord.from_row`)."""
    tasks = {
        record.instance_id: swe_task(record, image=IMAGE, repository=repository, limits=LIMITS)
        for record, repository in bundled_records()
    }
    for path in sorted(FOLDERS.glob("*/task.json")):
        given = json.loads(path.read_text())
        task = repository_task(
            path.parent / "files",
            image=IMAGE,
            instruction=given["instruction"],
            check=given["check"],
            setup=tuple(given.get("setup", ())),
        )
        tasks[path.parent.name] = replace(task, limits=LIMITS)
    return tasks


def task_of(prompt: str, label: str) -> Task:
    """The task; its instruction is in the prompt already."""
    return replace(all_tasks()[label], instruction="")


AgentExecutor = agent_executor(
    task_of,
    max_turns=20,
    max_turn_tokens=512,
    encode_observation=as_user_message,
    reset_timeout_s=120,
    step_timeout_s=180,
)

if __name__ == "__main__":
    for name, task in all_tasks().items():
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
        print(json.dumps({"prompt": messages, "label": name}))  # noqa: T201
