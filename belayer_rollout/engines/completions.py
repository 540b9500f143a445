"""The words of `/v1/completions` with token ids: what is sent, what comes back, what a refusal means.
Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from email.utils import mktime_tz, parsedate_tz
from typing import Any, cast

from belayer_rollout.errors import RequestRejected, RolloutError, WorkerBusy, WorkerGarbled, WorkerGone
from belayer_rollout.types import EngineRequest, FinishReason, TokenChunk

__all__ = ["DONE", "CompletionStream", "completion_body", "refusal"]

try:
    # Optional: takes a quarter of the time of the standard library for an event.
    from orjson import loads as _fast_loads  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    _fast_loads = None

DONE = b"[DONE]"
NAN = float("nan")
FINISH_REASONS = frozenset(("stop", "length", "abort"))


def completion_body(request: EngineRequest, model: str) -> dict[str, Any]:
    """The JSON of a request. ``params.extra`` comes last, and so wins."""
    params = request.params
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.token_ids),
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        # 0: of the chosen token alone.
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "stream": True,
        # A running count of tokens in each event: the only thing that tells an event that came twice.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if params.exact_resume:
        # The draws come from these two alone; a seed would make the engine keep a generator as well.
        body["vllm_xargs"] = {"belayer_seed": params.seed or 0, "belayer_position": request.position}
    elif params.seed is not None:
        body["seed"] = params.seed
    body.update(params.extra)
    return body


class CompletionStream:
    """Turns the events of one stream into chunks, and notices what no engine may send.

    ``version`` is the weight version known at the start; events that bring a `weight_version` overrule it."""

    __slots__ = ("_count", "_version", "_worker", "told_version")

    def __init__(self, worker: str, version: int) -> None:
        self._worker = worker
        self._version = version
        self._count = 0
        self.told_version: int | None = None
        """What the last event that said one said."""

    def chunk(self, event: bytes) -> TokenChunk | None:
        """The chunk that an event stands for; None when it has neither tokens nor an end.

        Raises:
            WorkerGarbled: it is not JSON, is an error, lacks token ids or logprobs, or came twice."""
        data = self._parse(event)
        try:
            choices = data["choices"]
            if not choices:
                return None
            choice = choices[0]
            reason = choice.get("finish_reason")
            ids = choice.get("token_ids")
            if not ids:
                return self._without_tokens(choice, reason)
            logprobs = choice["logprobs"]["token_logprobs"]
            if len(logprobs) != len(ids):
                raise self._garbled(f"{len(ids)} token ids with {len(logprobs)} logprobs", event)
            if type(ids[0]) is not int or (len(ids) > 1 and set(map(type, ids)) != {int}):
                raise self._garbled("token ids that are no integers", event)
            if None in logprobs:
                # How JSON libraries write a NaN that JSON has no word for: not a number, and so it stays.
                logprobs = [NAN if value is None else value for value in logprobs]
            version = data.get("weight_version")
            if version is not None:
                self._version = _version(version, self._version)
                self.told_version = self._version
            self._count += len(ids)
            usage = data.get("usage")
            if usage is not None and usage.get("completion_tokens", self._count) != self._count:
                raise self._garbled(
                    f"the server counts {usage['completion_tokens']} tokens where {self._count} came: "
                    "an event came twice, or one was lost",
                    event,
                )
            if reason is not None and reason not in FINISH_REASONS:
                raise self._garbled(f"finish_reason {reason!r}", event)
            return TokenChunk(
                tuple(ids),
                tuple(logprobs),
                self._worker,
                self._version,
                reason,
                choice.get("stop_reason") if reason is not None else None,
            )
        except (AttributeError, IndexError, KeyError, TypeError) as exc:
            raise self._garbled(
                "no token ids with their logprobs (return_token_ids, logprobs)", event
            ) from exc

    def end(self, reason: FinishReason) -> TokenChunk:
        """A last chunk that the server did not send."""
        return TokenChunk((), (), self._worker, self._version, reason)

    def _parse(self, event: bytes) -> dict[str, Any]:
        try:
            data = loads(event)
        except ValueError as exc:
            raise self._garbled("not JSON", event) from exc
        if not isinstance(data, dict):
            raise self._garbled("not an object", event)
        if "error" in data:
            raise self._garbled(f"an error in the stream: {data['error']}", event)
        return data

    def _without_tokens(self, choice: dict[str, Any], reason: str | None) -> TokenChunk | None:
        if choice.get("text") and choice.get("token_ids") is None:
            raise WorkerGarbled(
                f"{self._worker} sent text without token ids: its server must know return_token_ids",
                worker=self._worker,
            )
        if reason is None:
            return None
        if reason not in FINISH_REASONS:
            raise WorkerGarbled(f"{self._worker} ended with {reason!r}", worker=self._worker)
        return TokenChunk(
            (), (), self._worker, self._version, cast(FinishReason, reason), choice.get("stop_reason")
        )

    def _garbled(self, what: str, event: bytes) -> WorkerGarbled:
        return WorkerGarbled(f"{self._worker}: {what}; event: {event[:200]!r}", worker=self._worker)


def refusal(
    worker: str, status: int, retry_after: str | None, body: str, now: Callable[[], float]
) -> RolloutError:
    """What an answer other than 200 means. ``now``: seconds since the epoch, for a Retry-After that is a
    date."""
    text = f"{worker} answered {status}: {body.strip()[:500]}"
    if status in (429, 503):
        return WorkerBusy(text, worker=worker, retry_after_s=_seconds(retry_after, now))
    if 400 <= status < 500:
        return RequestRejected(text)
    return WorkerGone(text, worker=worker)


def loads(data: bytes | str) -> Any:
    """JSON, with the NaN and Infinity that Python's servers write and JSON does not know.

    Raises:
        ValueError: it is none."""
    if _fast_loads is not None:
        try:
            return _fast_loads(data)
        except ValueError:
            pass
    # Text at once: for bytes, the standard library first guesses the encoding.
    return json.loads(data.decode() if isinstance(data, bytes) else data)


def _version(given: object, known: int) -> int:
    # SGLang calls its first one "default".
    try:
        return int(cast(Any, given))
    except (TypeError, ValueError):
        return known


def _seconds(retry_after: str | None, now: Callable[[], float]) -> float | None:
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        date = parsedate_tz(retry_after)
        return None if date is None else max(0.0, mktime_tz(date) - now())
