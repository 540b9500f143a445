"""A request in flight: what it asks, what has come of it, and the attempt that works on it now."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from belayer_rollout.continuation import Done, is_stop_token
from belayer_rollout.errors import WorkerFault
from belayer_rollout.outlet import Outlet
from belayer_rollout.stops import StopWatch
from belayer_rollout.types import (
    Generation,
    ModelInfo,
    OnVersionChange,
    SamplingParams,
    Segment,
    TokenChunk,
)

__all__ = ["Run", "Streak"]


@dataclass(slots=True)
class Streak:
    """What went wrong since the last new token. A token ends it: a request may live through any number of
    faults as long as it gets on between them."""

    faults: int = 0
    refusals: int = 0
    since: float | None = None
    """When it first stood still."""
    avoid: set[str] = field(default_factory=set)
    """Workers that broke in it."""


class Run:
    """The state of one request, kept by the task that drives it."""

    __slots__ = (
        "_source",
        "_sources",
        "ahead",
        "attempts",
        "broke_at",
        "commit",
        "ended_by",
        "failovers",
        "first_token_at",
        "has_begun",
        "has_id",
        "is_ending",
        "is_open",
        "last",
        "logprobs",
        "outlet",
        "params",
        "prompt",
        "request_id",
        "restarts",
        "rule",
        "sent_at",
        "session",
        "silent_since",
        "stops",
        "streak",
        "strikes",
        "task",
        "telling",
        "tokens",
        "tried",
        "verdict",
        "version",
        "watch_stops",
        "worker",
    )

    def __init__(
        self,
        request_id: str,
        session: str,
        prompt: Sequence[int],
        params: SamplingParams,
        rule: OnVersionChange,
        *,
        watch_stops: Callable[[], StopWatch] | None = None,
        outlet: Outlet | None = None,
        has_id: bool = True,
    ) -> None:
        self.request_id = request_id
        self.has_id = has_id
        """The caller gave the id, and may come back with it."""
        self.session = session
        self.prompt = tuple(prompt)
        self.params = params
        self.rule = rule
        self.watch_stops = watch_stops
        self.outlet = outlet
        self.task: asyncio.Task[Generation] | None = None
        self.ended_by: Literal["cancel", "close"] | None = None
        self.is_ending = False
        """Cancelled by a caller or the client: see `end`."""
        self.is_open = False
        """The journal has it."""
        self.telling: asyncio.Task[None] | None = None
        """Tells a worker to drop an attempt."""

        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self._sources: list[tuple[int, str, int]] = []
        """(first token, worker, weight version), where one of the two changes."""
        self._source: tuple[str, int] = ("", 0)
        """Of the last token."""
        self.version: int | None = None
        self.stops = watch_stops() if watch_stops else None
        self.last: TokenChunk | None = None
        """The final tokens: handed on when the journal knows that they are final."""

        self.failovers = 0
        self.restarts = 0
        self.attempts = 0
        self.streak = Streak()
        self.tried: list[str] = []
        self.broke_at: float | None = None
        self.first_token_at: float | None = None
        """Of the attempt that works now."""

        # Of the running attempt; the watch reads them.
        self.worker: str | None = None
        self.sent_at = 0.0
        self.silent_since = math.inf
        """Since when its worker owes a token; infinite while nobody waits for one."""
        self.has_begun = False
        self.verdict: WorkerFault | None = None
        """Set by the watch, which then cancels the task."""
        self.strikes = 0
        """How often the watch cancelled it."""

        self.commit: asyncio.Future[None] | None = None
        self.ahead = 0
        """Tokens handed to the journal for that commit."""

    def end(self, by: Literal["cancel", "close"] | None = None) -> None:
        """Cancel it."""
        self.is_ending = True
        self.ended_by = self.ended_by or by
        if self.task is not None:
            self.task.cancel()

    def begin_attempt(self, worker: str, now: float) -> None:
        """It is sent to a worker."""
        self.worker = worker
        self.sent_at = self.silent_since = now
        self.has_begun = False
        self.first_token_at = None
        self.verdict = None
        self.strikes = 0

    def end_attempt(self) -> None:
        """Nobody waits for a token of it any more."""
        self.worker = None
        self.silent_since = math.inf

    def take(self, chunk: TokenChunk) -> None:
        """Its tokens are the next ones."""
        worker, version = chunk.worker, chunk.weight_version
        if version != self._source[1] or worker != self._source[0] or not self.tokens:
            self._source = (worker, version)
            self._sources.append((len(self.tokens), worker, version))
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Who made which of the tokens."""
        stops = [start for start, *_ in self._sources[1:]]
        return tuple(
            Segment(start, stop, worker, version)
            for (start, worker, version), stop in zip(
                self._sources, [*stops, len(self.tokens)][: len(self._sources)], strict=True
            )
        )

    def until_stop(self, chunk: TokenChunk, info: ModelInfo) -> tuple[TokenChunk, str | None]:
        """The chunk cut after the token that completes a stop string, and that string; the chunk as it is if
        none is complete. Needs ``stops``."""
        assert self.stops is not None
        ids = chunk.token_ids
        # As in vLLM, a token that ends the request by itself gives no text.
        is_end = chunk.finish_reason == "stop" or (
            len(self.tokens) + len(ids) > self.params.min_tokens
            and is_stop_token(ids[-1], self.params, info) is not None
        )
        found = self.stops.feed(ids[:-1] if is_end else ids)
        if found is None:
            return chunk, None
        kept, stop = found
        cut = TokenChunk(
            ids[:kept], chunk.logprobs[:kept], chunk.worker, chunk.weight_version, start=chunk.start
        )
        return cut, stop

    def restore(self, chunks: Sequence[TokenChunk], info: ModelInfo) -> Done | None:
        """Take what a journal has; the end, if those tokens hold a stop string."""
        for chunk in chunks:
            stop = None
            if self.stops is not None and chunk.token_ids:
                chunk, stop = self.until_stop(chunk, info)
            self.take(chunk)
            self.version = chunk.weight_version
            if stop is not None:
                return Done("stop", stop)
        return None

    def chunks(self, ended: Generation | None) -> Iterator[TokenChunk]:
        """Its tokens so far as chunks, for a stream that goes on with them; the last one says how it
        ``ended``, if it has."""
        for start, stop, worker, version in self.segments:
            yield TokenChunk(
                tuple(self.tokens[start:stop]), tuple(self.logprobs[start:stop]), worker, version
            )
        if ended is not None:
            yield TokenChunk((), (), *self.last_source, ended.finish_reason, ended.stop_reason)

    @property
    def last_source(self) -> tuple[str, int]:
        """Worker and weight version of the last token."""
        return self._source

    def start_over(self) -> None:
        """Back to the prompt: every token is dropped."""
        self.tokens.clear()
        self.logprobs.clear()
        self._sources.clear()
        self._source = ("", 0)
        self.version = None
        self.stops = self.watch_stops() if self.watch_stops else None

    def generation(self, done: Done) -> Generation:
        """What came of it."""
        return Generation(
            request_id=self.request_id,
            session=self.session,
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=done.finish_reason,
            stop_reason=done.stop_reason,
            segments=self.segments,
            failovers=self.failovers,
        )
