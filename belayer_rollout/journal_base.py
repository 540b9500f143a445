"""What a client asks of a journal, and one in memory for those who can lose their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from belayer_rollout.errors import InvalidRequest, UnknownRequest
from belayer_rollout.types import FinishReason, SamplingParams, TokenChunk

__all__ = ["LoggedRequest", "MemoryJournal", "TokenJournal"]


class LoggedRequest(Protocol):
    """A request as the journal has it."""

    @property
    def request_id(self) -> str:
        """Unique in the journal."""
        ...

    @property
    def session(self) -> str:
        """What it belongs to."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """As it was opened."""
        ...

    @property
    def params(self) -> SamplingParams:
        """As it was opened."""
        ...

    @property
    def chunks(self) -> tuple[tuple[int, TokenChunk], ...]:
        """(index of its first token, chunk), in order and without a gap."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """None: not finished."""
        ...

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or stop string that ended it."""
        ...

    @property
    def failovers(self) -> int:
        """How many were noted."""
        ...


class TokenJournal(Protocol):
    """Where a request and its tokens are kept. `belayer_rollout.journal.Journal` is the durable one.

    Each method may raise JournalFault, and a journal that failed once raises it from then on."""

    async def open_request(
        self, request_id: str, session: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """A request begins; durable on return.

        Raises:
            InvalidRequest: the id is taken, by a request of other content."""
        ...

    def append(self, request_id: str, start: int, chunk: TokenChunk) -> asyncio.Future[None] | None:
        """Tokens from index ``start`` on. The future is done once they are durable, and is shared by all
        that one commit covers; None: nobody waits for that."""
        ...

    async def finish(
        self, request_id: str, finish_reason: FinishReason, stop_reason: int | str | None, length: int
    ) -> None:
        """It has ended with ``length`` tokens; durable on return."""
        ...

    async def cut(self, request_id: str, length: int) -> None:
        """Forget the tokens from index ``length`` on."""
        ...

    async def load(self, request_id: str) -> LoggedRequest:
        """What is known of it.

        Raises:
            UnknownRequest: nothing is."""
        ...

    async def note_failover(self, request_id: str, worker: str, cause: str) -> None:
        """A worker broke under it."""
        ...

    async def close(self) -> None:
        """Idempotent, never raises."""
        ...


@dataclass(slots=True, kw_only=True)
class _Record:
    request_id: str
    session: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    chunks: tuple[tuple[int, TokenChunk], ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failovers: int = 0
    parts: list[TokenChunk] = field(default_factory=list)


class MemoryJournal:
    """The journal of a client that asked for none: a worker's death is survived, the client's own is not.
    It forgets a request once it has finished, unless ``keep_finished``."""

    def __init__(self, *, keep_finished: bool = False) -> None:
        self._records: dict[str, _Record] = {}
        self._keep_finished = keep_finished

    async def open_request(
        self, request_id: str, session: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """See `TokenJournal`."""
        record = _Record(
            request_id=request_id, session=session, prompt_token_ids=tuple(prompt_token_ids), params=params
        )
        known = self._records.setdefault(request_id, record)
        if (known.session, known.prompt_token_ids, known.params) != (
            session,
            record.prompt_token_ids,
            params,
        ):
            raise InvalidRequest(f"the journal has another request under the id {request_id!r}")

    def append(self, request_id: str, start: int, chunk: TokenChunk) -> None:
        """Nothing to wait for."""
        self._records[request_id].parts.append(chunk)

    async def finish(
        self, request_id: str, finish_reason: FinishReason, stop_reason: int | str | None, length: int
    ) -> None:
        """See `TokenJournal`."""
        if not self._keep_finished:
            del self._records[request_id]
            return
        await self.cut(request_id, length)
        record = self._records[request_id]
        record.finish_reason, record.stop_reason = finish_reason, stop_reason

    async def cut(self, request_id: str, length: int) -> None:
        """See `TokenJournal`."""
        record = self._records[request_id]
        kept: list[TokenChunk] = []
        for chunk in record.parts:
            room = length - sum(len(part.token_ids) for part in kept)
            if room <= 0:
                break
            kept.append(
                replace(chunk, token_ids=chunk.token_ids[:room], logprobs=chunk.logprobs[:room])
                if len(chunk.token_ids) > room
                else chunk
            )
        record.parts = kept

    async def load(self, request_id: str) -> LoggedRequest:
        """See `TokenJournal`."""
        try:
            record = self._records[request_id]
        except KeyError:
            raise UnknownRequest(f"no request {request_id!r} in this client's memory") from None
        chunks, start = [], 0
        for chunk in record.parts:
            chunks.append((start, chunk))
            start += len(chunk.token_ids)
        record.chunks = tuple(chunks)
        return record

    async def note_failover(self, request_id: str, worker: str, cause: str) -> None:
        """See `TokenJournal`."""
        self._records[request_id].failovers += 1

    async def close(self) -> None:
        """Nothing is held."""
