"""vLLM as a worker, in this process: `AsyncLLM` with its EngineCore and workers as child processes."""

from __future__ import annotations

from belayer_rollout.engines.vllm.processes import EngineProcesses
from belayer_rollout.engines.vllm.worker import VllmWorker

__all__ = ["EngineProcesses", "VllmWorker"]
