"""Workers in this process that do what a script says: honest engines in all else, so that the undisturbed
result of any request is known."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal
from zlib import crc32

from belayer_rollout.engines.base import WeightSource
from belayer_rollout.errors import RequestRejected, UpdateFailed, WorkerBusy, WorkerFault, WorkerGone
from belayer_rollout.types import EngineRequest, FinishReason, ModelInfo, SamplingParams, TokenChunk

__all__ = ["EOS", "Fault", "ScriptedWorker", "Undisturbed", "bits", "undisturbed"]

VOCAB = 60
EOS = 7
UNTOLD: Final = "die before the end is told"

Kind = Literal[
    "die",
    "die before the end is told",
    "end early",
    "hang",
    "stuck stream",
    "no logprobs",
    "no ids",
    "duplicate",
    "skip",
    "too many",
    "abort",
    "busy",
    "reject",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one attempt, once it has given so many tokens of its own."""

    kind: Kind
    after: int = 0
    retry_after_s: float | None = None


def _hash(context: Iterable[int], state: int = 0) -> int:
    for token in context:
        state = crc32(struct.pack("<q", token), state)
    return state


def _logprob(state: int) -> float:
    if state % 31 == 0:
        return float("-inf")
    return float("nan") if state % 37 == 0 else -(state % 9973) / 1000


def tokens_of(
    context: Sequence[int], params: SamplingParams, *, eos: int | None = EOS, limit: int | None = None
) -> list[tuple[int, float, FinishReason | None, int | None]]:
    """(token, logprob, finish reason, stop reason) of every token that an engine gives for this context:
    a pure function of it. The rules of stopping are vLLM's."""
    state = _hash(context)
    made: list[tuple[int, float, FinishReason | None, int | None]] = []
    while True:
        token = state % VOCAB
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos or eos is None else {eos})
        while len(made) < params.min_tokens and token in ends:
            token = (token + 1) % VOCAB
        reason: FinishReason | None = None
        stop: int | None = None
        if token in ends:
            reason, stop = "stop", None if token == eos and not params.ignore_eos else token
        elif len(made) + 1 >= params.max_tokens or (limit and len(context) + len(made) + 1 >= limit):
            reason = "length"
        made.append((token, _logprob(state), reason, stop))
        if reason is not None:
            return made
        state = _hash([token], state)


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a request comes to without any fault."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop_reason: int | None


def undisturbed(prompt: Sequence[int], params: SamplingParams, **model: int | None) -> Undisturbed:
    """The result of one engine that nothing happens to."""
    made = tokens_of(prompt, params, **model)
    reason = made[-1][2]
    assert reason is not None
    return Undisturbed(tuple(t for t, *_ in made), tuple(p for _, p, *_ in made), reason, made[-1][3])


def bits(logprobs: Sequence[float]) -> bytes:
    """So that NaN equals NaN."""
    return struct.pack(f"<{len(logprobs)}d", *logprobs)


@dataclass(eq=False)
class ScriptedWorker:
    """An engine. ``faults``: one entry for each attempt it gets, in order; None is a good one; when they are
    used up all are good."""

    name: str = "w0"
    faults: deque[Fault | None] = field(default_factory=deque)
    gap_s: float = 0.01
    first_s: float = 0.0
    health_s: float = 0.0
    chunk: int = 1
    tells_start: bool = True
    final_event_apart: bool = False
    recovers_itself: bool = False
    supports_exact_resume: bool = True
    info: ModelInfo = field(default_factory=lambda: ModelInfo(name="toy", eos_token_ids=(EOS,)))
    version: int = 3
    version_after: dict[int, int] = field(default_factory=dict)
    """Position of a token -> the version from there on: a weight update in mid-stream."""
    hang_s: float = 500.0
    update_fault: Exception | None = None
    applies_before_fault: bool = False
    start_fault: Exception | None = None
    tokens: list[tuple[int, float]] | None = None
    """Given whatever the context is (from the start of a generation), instead of the toy model's."""

    def __post_init__(self) -> None:
        self.faults = deque(self.faults)
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.put_down: list[str] = []
        self.given = 0
        self.probes = 0
        self.updates: list[int] = []
        self.is_closed = False
        self.starts = 0
        self.kill_count = 0
        self._is_dead = False
        self._hung_until = float("-inf")
        self._news = asyncio.Event()

    # Drills

    def kill(self) -> None:
        """As kill -9: every stream breaks, and it answers nobody."""
        self._is_dead = True
        self.kill_count += 1
        self._tell()

    def revive(self, version: int | None = None) -> None:
        """It is started anew."""
        self._is_dead = False
        self._hung_until = float("-inf")
        self.version = self.version if version is None else version
        self._tell()

    def hang(self, seconds: float | None = None) -> None:
        """As SIGSTOP."""
        now = asyncio.get_running_loop().time()
        self._hung_until = now + (self.hang_s if seconds is None else seconds)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _pass(self, seconds: float) -> None:
        """Time passes, unless it dies meanwhile; while it hangs, more time passes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            if self._is_dead:
                raise WorkerGone(f"{self.name} was killed", worker=self.name)
            left = max(until, self._hung_until) - loop.time()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                pass

    # The protocol

    async def start(self) -> None:
        self.starts += 1
        if self.start_fault is not None:
            raise self.start_fault
        await self._pass(0)

    async def model_info(self) -> ModelInfo:
        await self._pass(0)
        return self.info

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        fault = self.faults.popleft() if self.faults else None
        try:
            if fault and fault.kind == "busy":
                raise WorkerBusy(f"{self.name} is busy", worker=self.name, retry_after_s=fault.retry_after_s)
            limit = self.info.max_model_len
            if (fault and fault.kind == "reject") or (
                limit and len(request.token_ids) + request.params.max_tokens > limit
            ):
                raise RequestRejected("400: too long")
            assert request.params.max_tokens >= 1
            assert not request.params.stop
            await self._pass(self.first_s)
            async for chunk in self._chunks(request, fault):
                self.given += len(chunk.token_ids)
                yield chunk
        finally:
            self.put_down.append(request.request_id)

    async def _chunks(self, request: EngineRequest, fault: Fault | None) -> AsyncIterator[TokenChunk]:
        eos = self.info.eos_token_ids[0] if self.info.eos_token_ids else EOS
        if self.tokens is None:
            made = tokens_of(request.token_ids, request.params, eos=eos)
        else:
            rest = self.tokens[request.position :][: request.params.max_tokens]
            is_all = request.position + len(rest) == len(self.tokens)
            made = [(token, logprob, None, None) for token, logprob in rest[:-1]]
            made.append((*rest[-1], "stop" if is_all else "length", None))
        at = 0
        last: TokenChunk | None = None
        while at < len(made):
            part = made[at : at + self.chunk]
            if fault and fault.kind != UNTOLD and at + len(part) > fault.after:
                part = made[at : max(at, fault.after)]
            await self._pass(self.gap_s)
            if part:
                last = self._chunk(request, at, part)
                at += len(part)
                is_untold = fault is not None and at == len(made)
                yield replace(last, finish_reason=None, stop_reason=None) if is_untold else last
            if fault is not None and at >= fault.after and fault.kind != UNTOLD:
                if fault.kind == "end early":
                    # As a proxy that closes its connection in good order.
                    return
                async for chunk in self._break(fault, request, at, last):
                    yield chunk
                fault = None
        if fault is not None:
            raise WorkerGone(f"{self.name} died before the final event", worker=self.name)
        if self.final_event_apart:
            yield TokenChunk((), (), self.name, self._version_at(request, at - 1), made[-1][2], made[-1][3])

    async def _break(
        self, fault: Fault, request: EngineRequest, at: int, last: TokenChunk | None
    ) -> AsyncIterator[TokenChunk]:
        name, version = self.name, self.version
        if fault.kind == "die":
            raise WorkerGone(f"{name} reset the connection", worker=name)
        if fault.kind == "hang":
            self.hang()
        elif fault.kind == "stuck stream":
            await asyncio.Event().wait()
        elif fault.kind == "no logprobs":
            yield TokenChunk((1, 2), (-0.5,), name, version)
        elif fault.kind == "no ids":
            yield TokenChunk((), (-0.5,), name, version)
        elif fault.kind == "duplicate" and last is not None:
            yield last
        elif fault.kind == "skip":
            yield TokenChunk((1,), (-0.5,), name, version, start=request.position + at + 1)
        elif fault.kind == "too many":
            more = request.params.max_tokens - at + 1
            yield TokenChunk((1,) * more, (0.0,) * more, name, version)
        elif fault.kind == "abort":
            yield TokenChunk((), (), name, version, "abort")

    def _version_at(self, request: EngineRequest, at: int) -> int:
        position = request.position + at
        for start, version in self.version_after.items():
            if position >= start:
                self.version = version
        return self.version

    def _chunk(
        self,
        request: EngineRequest,
        at: int,
        part: list[tuple[int, float, FinishReason | None, int | None]],
    ) -> TokenChunk:
        reason, stop = part[-1][2:]
        if self.final_event_apart:
            reason, stop = None, None
        return TokenChunk(
            tuple(token for token, *_ in part),
            tuple(logprob for _, logprob, *_ in part),
            self.name,
            self._version_at(request, at),
            reason,
            stop,
            start=request.position + at if self.tells_start else None,
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def health(self) -> None:
        self.probes += 1
        await self._pass(self.health_s)

    async def weight_version(self) -> int:
        await self._pass(0)
        return self.version

    async def update_weights(self, version: int, source: WeightSource) -> None:
        self.updates.append(version)
        await self._pass(self.gap_s)
        if self.update_fault is not None:
            fault, self.update_fault = self.update_fault, None
            if self.applies_before_fault:
                self.version = version
            if isinstance(fault, UpdateFailed | WorkerFault):
                raise fault
        self.version = version

    async def close(self) -> None:
        self.is_closed = True
