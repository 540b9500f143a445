"""How many tokens a second one client process carries, from a server that computes nothing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from belayer_rollout.bench.scripted_process import ScriptedServer
from belayer_rollout.client import RolloutClient
from belayer_rollout.engines.http import HttpWorker
from belayer_rollout.types import SamplingParams

__all__ = ["client_throughput"]


async def client_throughput(journal: Path | None, *, in_flight: int = 1000, num_tokens: int = 100) -> float:
    """Tokens per second with so many requests at once, each of so many tokens, that come one by one and as
    fast as they are read."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
    with ScriptedServer() as server:
        async with RolloutClient([HttpWorker(server.url)], journal=journal) as client:
            await client.generate([1], params)  # what is done once is done
            began = time.monotonic()
            made = await asyncio.gather(
                *(client.generate([5, index], params, session=str(index)) for index in range(in_flight))
            )
            took = time.monotonic() - began
    return sum(len(one.token_ids) for one in made) / took
