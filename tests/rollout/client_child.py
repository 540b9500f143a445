"""A client process to be killed: streams request "r" and prints each token as it gets it."""

from __future__ import annotations

import asyncio
import sys

from belayer_rollout.client import RolloutClient
from belayer_rollout.types import SamplingParams
from tests.rollout.scripted import ScriptedWorker

__all__ = ["PARAMS", "PROMPT"]

PROMPT = (11, 12, 13)
PARAMS = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)


async def main(journal: str) -> None:
    async with RolloutClient([ScriptedWorker()], journal=journal) as client:
        async for chunk in client.stream(PROMPT, PARAMS, session="s", request_id="r"):
            for token in chunk.token_ids:
                print(token, flush=True)  # noqa: T201 - what the parent reads


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
