"""What the journal gives back: one request with its tokens, and the lists that `belayer rollout status`
shows."""

from __future__ import annotations

from dataclasses import dataclass

from belayer_rollout.types import FinishReason, SamplingParams, TokenChunk

__all__ = ["JournalledRequest", "RequestSummary", "SessionSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalledRequest:
    """All that the journal knows of one request."""

    request_id: str
    session: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    chunks: tuple[tuple[int, TokenChunk], ...] = ()
    """(index of its first token, chunk) in order and without a gap. Neighbours from the same worker and
    weight version are joined: their borders are not those that were appended."""
    finish_reason: FinishReason | None = None
    """None: it is not finished, and can be resumed."""
    stop_reason: int | str | None = None
    failovers: int = 0

    @property
    def length(self) -> int:
        """How many tokens it has so far."""
        return sum(len(chunk.token_ids) for _, chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """One session, for a list."""

    session: str
    requests: int
    unfinished: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """One request, for a list."""

    request_id: str
    session: str
    prompt_tokens: int
    tokens: int
    finish_reason: FinishReason | None
    failovers: int
    owner_pid: int | None
    """The process that runs it now; None when it is finished, or when nobody alive does."""
