"""What a take-over costs: the primary of a real pair is killed in the middle of its requests. Seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer_rollout.bench.tripwire import Tripwire
from belayer_rollout.client import RolloutClient
from belayer_rollout.pair_state import PairState
from belayer_rollout.shadow import ShadowPair
from belayer_rollout.types import SamplingParams

__all__ = ["ENGINE_ARGS", "NUM_TOKENS", "Round", "Stamped", "journal_cost", "play", "prompts", "take_over"]

NUM_REQUESTS = 8
MOST_TRIES = 5
WAITING = 16
"""Requests for each place in the engine, where throughput is measured: so many that the last commit, for
which the last request waits, does not count."""
SPEED_TOKENS = {"tiny": 200, "smollm2": 16}
"""Of each of those requests."""
NUM_TOKENS = {"tiny": 400, "smollm2": 64}
"""Of each request: some seconds of generation on two cores."""

ENGINE_ARGS: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": NUM_REQUESTS,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 28,
    "skip_tokenizer_init": True,
}
"""The same for the pair's engines and for the cold start that they are held against."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """The tokens of one request, and when and from whom each chunk of them came (monotonic seconds)."""

    token_ids: tuple[int, ...]
    chunks: tuple[tuple[float, str], ...]

    def gap_to_another(self, worker: str, moment_s: float) -> float | None:
        """Seconds from then to the next chunk of another worker (what this one had under way does not count);
        None if it was complete."""
        return next((at - moment_s for at, who in self.chunks if at > moment_s and who != worker), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One kill -9 of the primary's EngineCore, with all requests half-way. ``detect_s``: kill -> fault seen.
    ``swap_s``: fault seen -> shadow active. ``first_token_s``: kill -> its first token, of any request.
    ``all_requests_s``: kill -> its first token of every request."""

    path: str
    detect_s: float
    fence_s: float
    check_s: float
    activate_s: float
    swap_s: float
    first_token_s: float
    all_requests_s: float
    token_ids: tuple[tuple[int, ...], ...]


def prompts() -> list[list[int]]:
    """Of different lengths, and ids that both models have."""
    return [[(7 * i + 3 * j) % 250 + 1 for j in range(40 + 9 * i)] for i in range(NUM_REQUESTS)]


async def play(
    client: RolloutClient,
    num_tokens: int,
    *,
    tag: str = "",
    times: int = 1,
) -> list[Stamped]:
    """All requests at once, greedily; each so many ``times``, of which the engine then takes what it can."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)

    async def one(index: int, prompt: Sequence[int]) -> Stamped:
        tokens: list[int] = []
        chunks: list[tuple[float, str]] = []
        async for chunk in client.stream(prompt, params, session=f"{tag}{index}"):
            if chunk.token_ids:
                chunks.append((time.monotonic(), chunk.worker))
                tokens += chunk.token_ids
        return Stamped(tuple(tokens), tuple(chunks))

    return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts() * times)))


async def take_over(pair: ShadowPair, wire: Tripwire, client: RolloutClient, num_tokens: int) -> Round:
    """Wait until the pair has its shadow, play, and kill the primary half-way. ``wire``: the pair as the
    client has it.

    Raises:
        RuntimeError: whenever it was killed, some request had got all its tokens already."""
    for _ in range(MOST_TRIES):
        if (found := await _one_kill(pair, wire, client, num_tokens)) is not None:
            return found
    raise RuntimeError("the engine is always done before it is killed")


async def _one_kill(pair: ShadowPair, wire: Tripwire, client: RolloutClient, num_tokens: int) -> Round | None:
    await pair.wait_for(PairState.GUARDED)
    before = len(pair.history)
    killed_at: list[float] = []
    killed_wall = 0.0
    primary = f"{pair.name}/{pair.epoch}"

    def kill() -> None:
        nonlocal killed_wall
        killed_at.append(time.monotonic())
        killed_wall = time.time()
        os.kill(pair.primary_processes()[0], signal.SIGKILL)

    wire.set(NUM_REQUESTS * num_tokens // 2, kill)
    played = await play(client, num_tokens)
    gaps = [gap for one in played if (gap := one.gap_to_another(primary, killed_at[0])) is not None]
    if len(gaps) < NUM_REQUESTS:
        return None
    found = pair.history[before]
    return Round(
        path=found.path,
        detect_s=found.at - killed_wall,
        fence_s=found.fence_s,
        check_s=found.check_s,
        activate_s=found.activate_s,
        swap_s=found.swap_s,
        first_token_s=min(gaps),
        all_requests_s=max(gaps),
        token_ids=tuple(one.token_ids for one in played),
    )


async def journal_cost(
    pair: ShadowPair, journal: Path, num_tokens: int, rounds: int, say: Callable[[str], Any] = str
) -> list[tuple[float, float]]:
    """(tokens per second with the journal, without) of each round. More requests wait than the engine takes
    at once, as in training: what one waits for its commits another one uses.

    A round is without, with, with, without: what the machine's speed drifts by meanwhile cancels out."""
    found = []
    async with (
        RolloutClient([pair], journal=journal, owns_workers=False) as kept,
        RolloutClient([pair], owns_workers=False) as unkept,
    ):
        for number in range(rounds):
            say(f"with the journal and without, round {number + 1} of {rounds}")
            took_s = {kept: 0.0, unkept: 0.0}
            for turn, client in enumerate((unkept, kept, kept, unkept)):
                began = time.monotonic()
                await play(client, num_tokens, tag=f"{number}-{turn}-", times=WAITING)
                took_s[client] += time.monotonic() - began
            num = 2 * WAITING * NUM_REQUESTS * num_tokens
            found.append((num / took_s[kept], num / took_s[unkept]))
    return found
