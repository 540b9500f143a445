"""The task of the drill, the same for both sides: steps that leave a trace in the container. Runs in rollout
actors. Seconds, tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belayer_integrations.openrlhf.bench.faults import FATAL_STEP, VICTIM, Fault, is_due

from belayer_env import Limits, Task

__all__ = [
    "DIRECTORY",
    "IMAGE",
    "MAX_TURNS",
    "CountsTokens",
    "command",
    "grade",
    "note_step",
    "task_of",
]

DIRECTORY = "BELAYER_BENCH_DIRECTORY"
IMAGE = "BELAYER_BENCH_IMAGE"
"""Environment variables of the actors."""

MAX_TURNS = 5
STEP_LIMIT_S = 5.0
"""Belayer's: OpenRLHF has none, and its examples set none."""

COMMAND_S = 0.5


def task_of(prompt: str, label: Mapping[str, Any]) -> Task:
    """Counts its steps in a file, and says how many."""
    hangs = Fault(label["fault"]) is Fault.ENDLESS and int(label["number"]) == VICTIM
    hang = f"[ $n = {FATAL_STEP} ] && sleep 100000;" if hangs else ""
    return Task(
        image=os.environ[IMAGE],
        env={name.upper(): str(value) for name, value in label.items()},
        setup=[
            f"n=0; turn() {{ n=$((n+1)); echo $1 >>/root/log; sleep {COMMAND_S}; {hang} wc -l </root/log; }}"
        ],
        limits=Limits(step_timeout_s=STEP_LIMIT_S),
    )


def command(text: str) -> str:
    """Whatever the model says is a turn."""
    return f"turn {text.encode().hex() or 'nothing'}"


def grade(label: Mapping[str, Any], step: int, output: str) -> float:
    """A grader with a bug, which one sample meets.

    Raises:
        LookupError: that."""
    if Fault(label["fault"]) is Fault.RAISE and is_due(label, step):
        raise LookupError("the grader's own bug")
    return float(output or 0)


def note_step(label: Mapping[str, Any]) -> None:
    """A command is about to run."""
    with (Path(label["run"]) / "steps").open("a") as file:
        file.write(f"{label['number']}\n")


class _Counted:
    """An engine (the actor) whose turns are counted, in a file that outlives it."""

    def __init__(self, engine: Any, run: str) -> None:
        self._engine = engine
        self._path = Path(run) / "tokens"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's."""
        output = await self._engine.generate(*args, **kwargs)
        with self._path.open("a") as file:
            file.write(f"{len(output.outputs[0].token_ids)}\n")
        return output


class CountsTokens:
    """Put before an `AgentExecutor`: each sample's turns are counted for its run."""

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> Any:
        """See `agent_executor`."""
        counted = _Counted(llm_engine, label["run"])
        return await super().execute(  # type: ignore[misc]
            prompt, label, sampling_params, max_length, hf_tokenizer, counted, images
        )
