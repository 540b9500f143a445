"""The HTTP engine against vLLM's own server, which all these tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from belayer_rollout.engines.http import HttpWorker
from belayer_rollout.errors import RequestRejected, WorkerGone
from belayer_rollout.types import EngineRequest, ModelInfo, SamplingParams, TokenChunk
from tests.rollout.vllm_server import VllmServer, vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

T = TypeVar("T")
PROMPT = tuple(range(65, 97))
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    from belayer_rollout.models import ensure_model

    with vllm_server(ensure_model("tiny"), tmp_path_factory.mktemp("vllm") / "log") as running:
        yield running


def run_with(server: VllmServer, use: Callable[[HttpWorker], Awaitable[T]], **options: Any) -> T:
    async def go() -> T:
        worker = HttpWorker(server.url, name="v", **options)
        try:
            return await asyncio.wait_for(use(worker), DEADLINE_S)
        finally:
            await worker.close()

    return asyncio.run(go())


def request(
    max_tokens: int, prompt: tuple[int, ...] = PROMPT, position: int = 0, **params: Any
) -> EngineRequest:
    given = {"temperature": 0.0, "ignore_eos": True} | params
    return EngineRequest("r", prompt, SamplingParams(max_tokens=max_tokens, **given), position)


def generate(server: VllmServer, asked: EngineRequest, **options: Any) -> list[TokenChunk]:
    async def use(worker: HttpWorker) -> list[TokenChunk]:
        return [chunk async for chunk in worker.generate(asked)]

    return run_with(server, use, **options)


def tokens_of(chunks: list[TokenChunk]) -> tuple[int, ...]:
    return tuple(i for chunk in chunks for i in chunk.token_ids)


def test_greedy_tokens_have_logprobs_and_go_on_from_the_middle(server: VllmServer) -> None:
    chunks = generate(server, request(24))
    whole = tokens_of(chunks)
    assert len(whole) == 24
    assert chunks[-1].finish_reason == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert all(logprob <= 0.0 for chunk in chunks for logprob in chunk.logprobs)
    assert tokens_of(generate(server, request(24))) == whole
    assert tokens_of(generate(server, request(14, PROMPT + whole[:10], 10))) == whole[10:]


def test_a_stop_token_ends_it_but_not_before_min_tokens(server: VllmServer) -> None:
    whole = tokens_of(generate(server, request(24)))
    stop = whole[5]
    first = whole.index(stop)
    chunks = generate(server, request(24, stop_token_ids=(stop,)))
    assert (tokens_of(chunks), chunks[-1].finish_reason, chunks[-1].stop_reason) == (
        whole[: first + 1],
        "stop",
        stop,
    )
    chunks = generate(server, request(24, stop_token_ids=(stop,), min_tokens=20))
    assert len(tokens_of(chunks)) >= 20
    assert stop not in tokens_of(chunks)[:19]


def test_the_keys_of_exact_resume_are_taken(server: VllmServer) -> None:
    # Without Belayer's logits processor they change nothing, and greedy text needs none.
    asked = request(8, exact_resume=True, seed=2**63 - 1)
    assert tokens_of(generate(server, asked, exact_resume=True)) == tokens_of(generate(server, request(8)))


def test_sampled_tokens_are_repeated_by_their_seed(server: VllmServer) -> None:
    def sample(seed: int) -> tuple[int, ...]:
        return tokens_of(generate(server, request(24, temperature=1.0, seed=seed, top_k=0, min_p=0.01)))

    assert sample(1) == sample(1) != sample(2)


def test_a_prompt_that_is_too_long_is_rejected(server: VllmServer) -> None:
    with pytest.raises(RequestRejected, match="512"):
        generate(server, request(5, PROMPT * 20))


def test_an_unknown_model_is_rejected(server: VllmServer) -> None:
    with pytest.raises(RequestRejected, match="404"):
        generate(server, request(5), model="other")


def test_model_info_and_health_come_from_the_engine(server: VllmServer) -> None:
    async def use(worker: HttpWorker) -> ModelInfo:
        await worker.health()
        return await worker.model_info()

    assert run_with(server, use) == ModelInfo(name="tiny", max_model_len=512)


@pytest.mark.parametrize("way", ["aclose", "abort"])
def test_an_abandoned_request_ends_in_the_engine(server: VllmServer, way: str) -> None:
    async def use(worker: HttpWorker) -> None:
        stream = worker.generate(request(450))
        await anext(stream)
        if way == "abort":
            await worker.abort("r")
            assert [chunk.finish_reason async for chunk in stream][-1] == "abort"
        else:
            await stream.aclose()  # type: ignore[attr-defined]
        while server.metric("vllm:num_requests_running"):  # noqa: ASYNC110 - it is of another process
            await asyncio.sleep(0.05)

    before = server.metric("vllm:generation_tokens_total")
    run_with(server, use)
    assert server.metric("vllm:generation_tokens_total") - before < 450


def test_many_streams_at_once_come_whole(server: VllmServer) -> None:
    whole = tokens_of(generate(server, request(24)))

    async def use(worker: HttpWorker) -> list[tuple[int, ...]]:
        async def one() -> tuple[int, ...]:
            return tokens_of([chunk async for chunk in worker.generate(request(24))])

        return list(await asyncio.gather(*(one() for _ in range(40))))

    found = run_with(server, use)
    assert {len(tokens) for tokens in found} == {24}
    # Another batch shape may flip a near-tie, so not all need to be equal.
    assert whole in found


def test_a_server_killed_in_mid_stream_is_gone(server: VllmServer) -> None:
    """The last test here: nothing is left of the server."""
    chunks: list[TokenChunk] = []

    async def use(worker: HttpWorker) -> None:
        async for chunk in worker.generate(request(450)):
            chunks.append(chunk)
            if len(chunks) == 5:
                server.kill()

    with pytest.raises(WorkerGone):
        run_with(server, use)
    assert 5 <= len(tokens_of(chunks)) < 450
    with pytest.raises(WorkerGone):
        run_with(server, lambda worker: worker.health())
