"""The agent file of OpenRLHF's side: its own `MultiTurnAgentExecutor`, and a container as its examples use an
env. A sandbox of Belayer's, for the same speed, and nothing of what brings one back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch
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
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from belayer_env.runtimes import open_runtime
from belayer_env.sandbox.base import Sandbox
from belayer_env.spec import ExecResult
from belayer_env.store import Store

FOR_EVER_S = 1e6

store = Store(Path(os.environ[DIRECTORY]) / "store")
runtime = open_runtime("runc", store)


class AgentInstance(AgentInstanceBase):
    """One sample's container."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sandbox: Sandbox
        self.steps = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Start it."""
        task = task_of(states["observation"], states["label"])

        def begin() -> Sandbox:
            sandbox = runtime.create(task.sandbox, store.new_home(None, runtime.name))
            for line in task.setup:
                sandbox.run(line)
            return sandbox

        self.sandbox = await asyncio.to_thread(begin)
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run what the model says."""
        self.steps += 1
        done = True
        try:
            result = await asyncio.to_thread(self._run, states["label"], command(states["action_text"]))
            reward = grade(states["label"], self.steps, result.output)
            done = self.steps == MAX_TURNS
        finally:
            if done:
                await asyncio.to_thread(self.sandbox.destroy)
        return {
            "rewards": torch.tensor(reward),
            "environment_feedback": "" if done else result.output,
            "done": done,
        }

    def _run(self, label: dict[str, Any], action: str) -> ExecResult:
        note_step(label)
        strike(label, self.steps, self.sandbox)
        return self.sandbox.run(action, timeout_s=FOR_EVER_S)


class AgentExecutor(CountsTokens, MultiTurnAgentExecutor):
    """Upstream's, with its tokens counted."""

    def __init__(self) -> None:
        super().__init__(AgentInstance)
