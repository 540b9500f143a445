"""The proof that an engine generates: a real completion of one token."""

from __future__ import annotations

import uuid

from belayer_rollout.engines.base import EngineWorker
from belayer_rollout.errors import WorkerGarbled
from belayer_rollout.types import EngineRequest, SamplingParams

__all__ = ["prove_generating"]

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)


async def prove_generating(worker: EngineWorker) -> None:
    """Have the worker make one token after the id that every vocabulary has, 0.

    Raises:
        WorkerFault: as its ``generate``, or WorkerGarbled where it gives another number of tokens."""
    # Not of `random`: the stream that programs seed is theirs.
    probe = EngineRequest(f"health-{uuid.uuid4().hex}", (0,), _ONE_TOKEN)
    tokens = [token async for chunk in worker.generate(probe) for token in chunk.token_ids]
    if len(tokens) != 1:
        raise WorkerGarbled(f"{len(tokens)} tokens where 1 was asked for", worker=worker.name)
