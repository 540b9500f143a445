"""A process with a journal, for tests that kill it: appends to some requests and reports what is durable.

    python -m tests.rollout.journal_child PATH MODE FIRST NUM

Each line on standard output says what the journal had promised when it was written: `REQUEST LENGTH` once the
future of that token was done (strict), or `REQUEST LENGTH CLOCK` when it was appended (relaxed; CLOCK is
time.monotonic, which all processes of a host share)."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Literal

from belayer_rollout.journal import Journal
from belayer_rollout.types import SamplingParams, TokenChunk

PROMPT = (5, 6, 7)


def token(request: str, index: int) -> TokenChunk:
    """Token ``index`` of a request: the same in the child and in the test that reads what is left."""
    seed = sum(request.encode()) * 1000 + index
    return TokenChunk((seed % 50_000,), (-seed / 7,), f"w{index // 40}", index // 60)


async def _stream(journal: Journal, request: str) -> None:
    await journal.open_request(request, "session", PROMPT, SamplingParams(max_tokens=10**6, seed=3))
    index = 0
    while True:
        pending = journal.append(request, index, token(request, index))
        index += 1
        if pending is None:
            _say(f"{request} {index} {time.monotonic()!r}")
            await asyncio.sleep(0.001)
        else:
            await pending
            _say(f"{request} {index}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(path: str, durability: Literal["strict", "relaxed"], first: int, num: int) -> None:
    journal = Journal(path, durability=durability)
    await asyncio.gather(*(_stream(journal, f"r{n}") for n in range(first, first + num)))


if __name__ == "__main__":
    mode: Literal["strict", "relaxed"] = "relaxed" if sys.argv[2] == "relaxed" else "strict"
    asyncio.run(main(sys.argv[1], mode, int(sys.argv[3]), int(sys.argv[4])))
