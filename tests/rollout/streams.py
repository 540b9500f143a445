"""Requests to a worker, whole or cut short, and what came of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from belayer_rollout.engines.base import EngineWorker
from belayer_rollout.types import EngineRequest, SamplingParams, TokenChunk

_ids = itertools.count()


@dataclass
class Stream:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    last: TokenChunk | None = None

    @property
    def reason(self) -> str | None:
        return self.last.finish_reason if self.last else None


async def stream(
    worker: EngineWorker,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    after: Sequence[int] = (),
    at_most: int | None = None,
    on_token: Callable[[Stream], Any] | None = None,
    request_id: str | None = None,
) -> Stream:
    """The rest of a request that has had the tokens ``after``; left early after ``at_most`` tokens."""
    left = replace(
        params,
        max_tokens=params.max_tokens - len(after),
        min_tokens=max(0, params.min_tokens - len(after)),
    )
    request = EngineRequest(request_id or f"test-{next(_ids)}", (*prompt, *after), left, position=len(after))
    got = Stream()
    chunks = worker.generate(request)
    async for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.logprobs)
        assert chunk.worker == worker.name
        assert got.last is None or got.last.finish_reason is None
        got.token_ids += chunk.token_ids
        got.logprobs += chunk.logprobs
        got.versions += [chunk.weight_version] * len(chunk.token_ids)
        got.last = chunk
        if on_token is not None:
            on_token(got)
        if at_most is not None and len(got.token_ids) >= at_most:
            break
    await chunks.aclose()  # type: ignore[attr-defined]
    return got


async def streams(
    worker: EngineWorker, requests: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[Stream]:
    return await asyncio.gather(*[stream(worker, prompt, params) for prompt, params in requests])


def prompts(count: int) -> list[tuple[int, ...]]:
    """Of different lengths, within the byte tokens of the tiny model."""
    return [tuple((7 * i + 3 * j) % 250 + 1 for j in range(5 + 9 * i)) for i in range(count)]
