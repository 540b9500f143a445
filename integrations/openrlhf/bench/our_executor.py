"""Belayer's side of the drill: `agent_executor` on the same task. Runs in rollout actors."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from belayer_integrations.openrlhf.bench.faults import strike
from belayer_integrations.openrlhf.bench.task import (
    DIRECTORY,
    MAX_TURNS,
    CountsTokens,
    command,
    grade,
    note_step,
    task_of,
)
from belayer_integrations.openrlhf.executor import agent_executor

from belayer_env import ContainerEnv, Task

__all__ = ["drilled_executor"]


def drilled_executor(**options: Any) -> type[Any]:
    """An `AgentExecutor`. ``options`` go to `agent_executor`."""
    base: Any = agent_executor(
        graded_task,
        max_turns=MAX_TURNS,
        parse_action=command,
        runtime="runc",
        env=_Drilled,
        store=Path(os.environ[DIRECTORY]) / "store",
        **options,
    )

    class AgentExecutor(CountsTokens, base):
        """With its tokens counted."""

    return AgentExecutor


def graded_task(prompt: str, label: dict[str, Any]) -> Task:
    """With its reward."""
    return dataclasses.replace(
        task_of(prompt, label),
        reward=lambda sandbox, ledger: grade(label, len(ledger), ledger.steps[-1].observation),
    )


class _Drilled(ContainerEnv):
    """Meets the label's fault."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        label = {name.lower(): value for name, value in self.task.env.items()}
        note_step(label)
        strike(label, len(self.episode.ledger) + 1, self.episode.sandbox)
        return super().step(action)
