"""Plain frozen data of the rollout side: what is asked of an engine, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from belayer_rollout.errors import InvalidRequest

__all__ = [
    "EngineRequest",
    "FinishReason",
    "Generation",
    "ModelInfo",
    "OnVersionChange",
    "SamplingParams",
    "Segment",
    "TokenChunk",
]

FinishReason = Literal["stop", "length", "abort"]
OnVersionChange = Literal["continue", "restart", "fail"]

MOST_SEED = 2**63 - 1
"""Engines keep a seed in a signed 64-bit number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Names and meanings are vLLM's.

    Raises:
        InvalidRequest: a value out of range."""

    max_tokens: int = 16
    """At most so many new tokens, over all workers that take part."""
    min_tokens: int = 0
    """No stop token, end of sequence or stop string before so many."""
    temperature: float = 1.0
    """0.0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    seed: int | None = None
    """None: the client draws one, and journals it."""
    stop: tuple[str, ...] = ()
    """Stop strings. The token that completes one is the last of ``token_ids``; they need a tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    exact_resume: bool = False
    """Draw by (seed, position) alone, so that a take-over gives the tokens that no fault would have given.
    Every engine of the client must know how; near-ties may still flip where another batch shape
    changes the logits' last bits."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the engine as it is: parameters that Belayer has no word for."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        wrong = [
            (self.max_tokens < 1, "max_tokens must be at least 1"),
            (not 0 <= self.min_tokens <= self.max_tokens, "min_tokens must be within 0..max_tokens"),
            (not self.temperature >= 0.0, "temperature must be 0.0 or more"),
            (not 0.0 < self.top_p <= 1.0, "top_p must be within (0, 1]"),
            (self.top_k < 0, "top_k must be 0 (all) or more"),
            (not 0.0 <= self.min_p <= 1.0, "min_p must be within [0, 1]"),
            (self.seed is not None and not 0 <= self.seed <= MOST_SEED, "seed must be within 0..2**63-1"),
            (not all(self.stop), "a stop string must not be empty"),
        ]
        for is_wrong, message in wrong:
            if is_wrong:
                raise InvalidRequest(f"{message}: {self}")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt at the rest of a request: what a client sends to one worker.

    ``params`` holds what is left to do (max_tokens and min_tokens already shrunk) and no stop strings: the
    client watches for those itself, as only it sees the text on both sides of a take-over."""

    request_id: str
    """Of this attempt; unique."""
    token_ids: Sequence[int]
    """The prompt, and after it the tokens that earlier attempts gave."""
    params: SamplingParams
    position: int = 0
    """How many tokens of ``token_ids`` are generated ones: the position of the next draw."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some new tokens of a stream, each with its logprob (natural log; of the model's own distribution,
    before temperature and filters)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    worker: str
    weight_version: int
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a stream, which may hold no token."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the end of sequence."""
    start: int | None = field(default=None, compare=False)
    """How many generated tokens come before this chunk, over all attempts (`EngineRequest.position` for the
    first of an attempt), where the engine counts them: it lets a client see that a chunk came twice or was
    lost. None where it cannot tell."""


class Segment(NamedTuple):
    """Tokens ``start:stop`` of a generation came from this worker under these weights."""

    start: int
    stop: int
    worker: str
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of a request. ``logprobs`` has one natural log per token id."""

    request_id: str
    session: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    segments: tuple[Segment, ...] = ()
    failovers: int = 0
    """How often another attempt had to go on where a worker broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a worker says of the model it serves; None or empty where it cannot say."""

    name: str = ""
    max_model_len: int | None = None
    """Prompt and new tokens together, at most."""
    eos_token_ids: tuple[int, ...] = ()
