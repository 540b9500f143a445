"""The words of `/v1/completions`, without a network."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from typing import Any

import pytest

from belayer_rollout.engines import completions
from belayer_rollout.engines.completions import CompletionStream, completion_body, refusal
from belayer_rollout.errors import RequestRejected, RolloutError, WorkerBusy, WorkerGarbled, WorkerGone
from belayer_rollout.types import EngineRequest, SamplingParams, TokenChunk


@pytest.fixture(params=["standard", "orjson"] if find_spec("orjson") else ["standard"], autouse=True)
def json_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "standard":
        monkeypatch.setattr(completions, "_fast_loads", None)


def event(ids: Any = (5,), logprobs: Any = (-0.5,), usage: int | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "x", "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
    data: dict[str, Any] = {"choices": [choice | more]}
    if usage is not None:
        data["usage"] = {"completion_tokens": usage}
    return json.dumps(data).encode()


def test_a_chunk_has_ids_logprobs_and_the_end() -> None:
    stream = CompletionStream("w", 4)
    assert stream.chunk(event([5, 6], [-1.0, -2.0])) == TokenChunk((5, 6), (-1.0, -2.0), "w", 4)
    last = stream.chunk(event([7], [-3.0], finish_reason="stop", stop_reason=7))
    assert last == TokenChunk((7,), (-3.0,), "w", 4, "stop", 7)


def test_an_end_may_come_without_tokens_and_events_without_either_are_passed_over() -> None:
    stream = CompletionStream("w", 0)
    assert stream.chunk(b'{"choices": [], "usage": {"completion_tokens": 0}}') is None
    assert stream.chunk(event([], [])) is None
    assert stream.chunk(event([], None, finish_reason="length")) == TokenChunk((), (), "w", 0, "length")


@pytest.mark.parametrize(
    "broken",
    [
        b'{"choices": [',
        b"[1, 2]",
        b'{"error": {"message": "EngineCore died", "code": 500}}',
        b'{"nothing": 1}',
        event(None, [-0.5]),
        event([1, 2], [-0.5]),
        event([1], [-0.5, -0.5]),
        event([1], None),
        event(["1"], [-0.5]),
        event([1, 2.5], [-0.5, -0.5]),
        event([1], [-0.5], finish_reason="content_filter"),
        event([], None, finish_reason="content_filter"),
        json.dumps({"choices": [{"index": 0, "text": "hello"}]}).encode(),
        json.dumps({"choices": [{"token_ids": [1]}]}).encode(),
    ],
)
def test_what_no_engine_may_send_is_garbled(broken: bytes) -> None:
    with pytest.raises(WorkerGarbled) as caught:
        CompletionStream("w", 0).chunk(broken)
    assert caught.value.worker == "w"


@pytest.mark.parametrize("usage", [1, 3])
def test_an_event_that_comes_twice_or_is_lost_is_noticed_by_the_count(usage: int) -> None:
    stream = CompletionStream("w", 0)
    stream.chunk(event(usage=1))
    with pytest.raises(WorkerGarbled, match="twice"):
        stream.chunk(event(usage=usage))


def test_numbers_that_json_has_no_word_for_stay_what_they_are() -> None:
    found = CompletionStream("w", 0).chunk(event([1, 2, 3], [float("nan"), float("-inf"), None]))
    assert found is not None
    assert [math.isnan(p) for p in found.logprobs] == [True, False, True]
    assert found.logprobs[1] == -math.inf


def test_a_version_in_an_event_holds_from_there_on() -> None:
    stream = CompletionStream("w", 3)

    def versioned(version: object) -> int:
        found = stream.chunk(json.dumps(json.loads(event()) | {"weight_version": version}).encode())
        assert found is not None
        return found.weight_version

    assert stream.told_version is None
    assert [versioned(v) for v in (None, "default", 4, "5")] == [3, 3, 4, 5]
    assert stream.told_version == 5


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRejected),
        (404, RequestRejected),
        (422, RequestRejected),
        (429, WorkerBusy),
        (500, WorkerGone),
        (502, WorkerGone),
        (503, WorkerBusy),
    ],
)
def test_a_refusal_is_typed_by_what_the_caller_can_do(status: int, kind: type[RolloutError]) -> None:
    found = refusal("w", status, None, "because", lambda: 0.0)
    assert type(found) is kind
    assert "because" in str(found)


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [(None, None), ("2.5", 2.5), ("-3", 0.0), ("Thu, 01 Jan 1970 00:01:40 GMT", 70.0), ("soon", None)],
)
def test_retry_after_is_seconds_or_a_date(retry_after: str | None, seconds: float | None) -> None:
    found = refusal("w", 429, retry_after, "", lambda: 30.0)
    assert isinstance(found, WorkerBusy)
    assert found.retry_after_s == seconds


def test_a_seed_goes_as_a_seed_or_with_the_position() -> None:
    params = SamplingParams(seed=9, extra={"priority": 3, "logprobs": 1})
    body = completion_body(EngineRequest("r", [1, 2, 3], params, position=2), "m")
    assert (body["seed"], body["prompt"], body["priority"], body["logprobs"]) == (9, [1, 2, 3], 3, 1)
    assert "vllm_xargs" not in body
    exact = SamplingParams(seed=9, exact_resume=True)
    body = completion_body(EngineRequest("r", [1, 2, 3], exact, position=2), "m")
    assert body["vllm_xargs"] == {"belayer_seed": 9, "belayer_position": 2}
    assert "seed" not in body
