"""What goes over the wire: OpenAI's completion and chat bodies, with vLLM's additions for token ids. Pure.

A parameter that changes the outcome and that Belayer cannot honour is refused, never ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from belayer_rollout.errors import InvalidRequest
from belayer_rollout.types import Generation, SamplingParams, TokenChunk

__all__ = ["ChatBody", "CompletionBody", "chat_chunk", "chat_result", "completion_chunk", "completion_result"]

_HARMLESS = frozenset({"user", "store", "metadata", "service_tier", "stream_options", "skip_special_tokens"})
"""Fields that clients send and that change no token."""

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "tools": ([],), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "top_logprobs": (0,),
}  # fmt: skip
"""Fields that Belayer has no word for, and the values of them that ask for nothing."""


class _Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="allow", strict=False)

    model: str = ""
    stream: bool = False
    n: int = Field(default=1, ge=1, le=128)
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    exact_resume: bool = False
    session: str = ""

    @model_validator(mode="after")
    def _refuse_the_unknown(self) -> _Body:
        for name, value in (self.model_extra or {}).items():
            if name in _HARMLESS or value is None or value in _NEUTRAL.get(name, ()):
                continue
            raise ValueError(f"{name}={value!r} is not supported here")
        return self

    def sampling(self, max_tokens: int) -> list[SamplingParams]:
        """One for each of the ``n`` completions; with a seed, each has its own.

        Raises:
            InvalidRequest: a value out of range."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return [
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(0, self.top_k),  # vLLM's -1 is "all" as well
                min_p=self.min_p,
                seed=None if self.seed is None else self.seed + index,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                exact_resume=self.exact_resume,
            )
            for index in range(self.n)
        ]


BodyT = TypeVar("BodyT", bound=_Body)


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: str | list[int]
    max_tokens: int = 16
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @classmethod
    def read(cls, data: Any) -> CompletionBody:
        """From parsed JSON.

        Raises:
            InvalidRequest: it is not such a body; the message names the field."""
        return _read(cls, data)


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @classmethod
    def read(cls, data: Any) -> ChatBody:
        """From parsed JSON.

        Raises:
            InvalidRequest: it is not such a body; the message names the field."""
        return _read(cls, data)


def completion_result(
    body: CompletionBody, made: Sequence[tuple[Generation, str]], model: str, created_s: int
) -> dict[str, Any]:
    """The whole answer, for the generations and their texts."""
    choices = [{"text": text, "logprobs": _text_logprobs(body, one)} for one, text in made]
    return _result("text_completion", body, choices, made, model, created_s)


def chat_result(
    body: ChatBody, made: Sequence[tuple[Generation, str]], model: str, created_s: int
) -> dict[str, Any]:
    """The whole answer, for the generations and their texts."""
    choices = [
        {"message": {"role": "assistant", "content": text}, "logprobs": _chat_logprobs(body, one)}
        for one, text in made
    ]
    return _result("chat.completion", body, choices, made, model, created_s)


def completion_chunk(
    body: CompletionBody, chunk: TokenChunk, text: str, *, request_id: str, model: str, created_s: int
) -> dict[str, Any]:
    """One event of a stream."""
    choice = {"text": text, "logprobs": _text_logprobs(body, chunk)}
    return _chunk("text_completion", body, choice, chunk, request_id, model, created_s)


def chat_chunk(
    body: ChatBody, chunk: TokenChunk, text: str, *, request_id: str, model: str, created_s: int
) -> dict[str, Any]:
    """One event of a stream."""
    choice = {"delta": {"role": "assistant", "content": text}, "logprobs": _chat_logprobs(body, chunk)}
    return _chunk("chat.completion.chunk", body, choice, chunk, request_id, model, created_s)


def _result(
    kind: str,
    body: _Body,
    choices: Sequence[dict[str, Any]],
    made: Sequence[tuple[Generation, str]],
    model: str,
    created_s: int,
) -> dict[str, Any]:
    generations = [generation for generation, _ in made]
    return {
        "id": generations[0].request_id,
        "object": kind,
        "created": created_s,
        "model": model,
        "choices": [
            {"index": index, **choice, **_ending(generation), **_ids(body, generation)}
            for index, (choice, generation) in enumerate(zip(choices, generations, strict=True))
        ],
        "usage": _usage(generations),
        "belayer": [_provenance(generation) for generation in generations],
    }


def _chunk(
    kind: str,
    body: _Body,
    choice: dict[str, Any],
    chunk: TokenChunk,
    request_id: str,
    model: str,
    created_s: int,
) -> dict[str, Any]:
    token_ids = {"token_ids": list(chunk.token_ids)} if body.return_token_ids else {}
    return {
        "id": request_id,
        "object": kind,
        "created": created_s,
        "model": model,
        "choices": [{"index": 0, **choice, **_ending(chunk), **token_ids}],
        "weight_version": chunk.weight_version,
    }


def _ending(made: Generation | TokenChunk) -> dict[str, Any]:
    return {"finish_reason": made.finish_reason, "stop_reason": made.stop_reason}


def _read(kind: type[BodyT], data: Any) -> BodyT:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()
        )
        raise InvalidRequest(wrong) from error


def _names(token_ids: Sequence[int]) -> list[str]:
    """vLLM's names of tokens where the ids matter and not the text."""
    return [f"token_id:{token}" for token in token_ids]


def _finite(logprobs: Sequence[float]) -> list[float | None]:
    """JSON has no word for infinities and NaN; null says that there is no number, a clamped one would lie."""
    return [logprob if math.isfinite(logprob) else None for logprob in logprobs]


def _text_logprobs(body: CompletionBody, made: Generation | TokenChunk) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    return {"token_logprobs": _finite(made.logprobs), "tokens": _names(made.token_ids)}


def _chat_logprobs(body: ChatBody, made: Generation | TokenChunk) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return {
        "content": [
            {"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for name, logprob in zip(_names(made.token_ids), _finite(made.logprobs), strict=True)
        ]
    }


def _ids(body: _Body, generation: Generation) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    return {
        "token_ids": list(generation.token_ids),
        "prompt_token_ids": list(generation.prompt_token_ids),
    }


def _usage(generations: Sequence[Generation]) -> dict[str, int]:
    prompt = len(generations[0].prompt_token_ids)
    made = sum(len(generation.token_ids) for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _provenance(generation: Generation) -> dict[str, Any]:
    """Who made which tokens under which weights, and through how many faults."""
    return {
        "request_id": generation.request_id,
        "failovers": generation.failovers,
        "segments": [segment._asdict() for segment in generation.segments],
    }
