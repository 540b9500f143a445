"""The HTTP engine against a real server process that breaks in every way there is."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from belayer_rollout.bench.scripted_model import STOP_TOKEN, TokenSource
from belayer_rollout.bench.scripted_process import ScriptedServer
from belayer_rollout.bench.scripted_script import Settings
from belayer_rollout.engines.base import EngineWorker
from belayer_rollout.engines.http import HttpWorker
from belayer_rollout.errors import (
    RequestRejected,
    RolloutError,
    UpdateFailed,
    WorkerBusy,
    WorkerFault,
    WorkerGarbled,
    WorkerGone,
)
from belayer_rollout.types import EngineRequest, ModelInfo, SamplingParams, TokenChunk

T = TypeVar("T")
PROMPT = tuple(range(10, 30))
DEADLINE_S = 60.0
"""Against hanging; nothing here takes a second."""
UNSCRIPTED = {f: getattr(Settings(), f) for f in Settings.__dataclass_fields__}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def server(shared_server: ScriptedServer) -> ScriptedServer:
    """A server for tests that leave it alive, with nothing scripted."""
    shared_server.control(**UNSCRIPTED)
    return shared_server


def run_with(url: str, use: Callable[[HttpWorker], Awaitable[T]], **options: Any) -> T:
    async def go() -> T:
        worker = HttpWorker(url, name="w", **options)
        try:
            return await asyncio.wait_for(use(worker), DEADLINE_S)
        finally:
            await worker.close()

    return asyncio.run(go())


def request(
    max_tokens: int = 20,
    *,
    name: str = "r",
    prompt: tuple[int, ...] = PROMPT,
    position: int = 0,
    **params: Any,
) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | params))
    return EngineRequest(name, prompt, sampling, position)


async def read(worker: HttpWorker, asked: EngineRequest, into: list[TokenChunk]) -> list[TokenChunk]:
    async for chunk in worker.generate(asked):
        into.append(chunk)
    return into


def tokens_of(chunks: list[TokenChunk]) -> tuple[int, ...]:
    return tuple(i for chunk in chunks for i in chunk.token_ids)


def expected(num: int, source: TokenSource | None = None) -> list[tuple[int, float]]:
    source = source or TokenSource(PROMPT)
    return [source.next(False) for _ in range(num)]


def generate(url: str, asked: EngineRequest, **options: Any) -> list[TokenChunk]:
    return run_with(url, lambda worker: read(worker, asked, []), **options)


def broken(url: str, asked: EngineRequest) -> tuple[list[TokenChunk], RolloutError]:
    """What came before the fault, and the fault."""
    chunks: list[TokenChunk] = []

    async def use(worker: HttpWorker) -> RolloutError:
        with pytest.raises(RolloutError) as caught:
            await read(worker, asked, chunks)
        return caught.value

    return chunks, run_with(url, use)


def test_it_is_an_engine_worker() -> None:
    assert isinstance(HttpWorker("http://127.0.0.1:1"), EngineWorker)


@pytest.mark.parametrize("burst", [1, 3])
def test_tokens_come_id_for_id_each_with_its_logprob(server: ScriptedServer, burst: int) -> None:
    server.control(burst=burst, version=3)
    chunks = generate(server.url, request(20))
    assert tokens_of(chunks) == tuple(i for i, _ in expected(20))
    assert [p for chunk in chunks for p in chunk.logprobs] == [p for _, p in expected(20)]
    assert {len(chunk.token_ids) for chunk in chunks[:-1]} == {burst}
    assert {(c.worker, c.weight_version) for c in chunks} == {("w", 3)}
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_what_is_asked_for_is_what_arrives(server: ScriptedServer) -> None:
    generate(server.url, request(7, min_tokens=3, name="attempt-4"))
    assert server.log()["requests"][-1] == {
        "prompt": list(PROMPT),
        "max_tokens": 7,
        "min_tokens": 3,
        "request_id": "attempt-4",
    }


def test_a_stop_token_and_the_end_of_sequence_end_it(server: ScriptedServer) -> None:
    stop = expected(8)[6][0]
    chunks = generate(server.url, request(20, stop_token_ids=(stop,)))
    assert (len(tokens_of(chunks)), chunks[-1].finish_reason, chunks[-1].stop_reason) == (7, "stop", stop)
    server.control(stop_at=len(PROMPT) + 4)
    chunks = generate(server.url, request(20))
    assert (tokens_of(chunks)[4:], chunks[-1].finish_reason, chunks[-1].stop_reason) == (
        (STOP_TOKEN,),
        "stop",
        None,
    )
    assert len(tokens_of(generate(server.url, request(20, ignore_eos=True)))) == 20


def test_logprobs_without_a_json_word_come_through(server: ScriptedServer) -> None:
    server.control(odd_logprobs=True)
    logprobs = [p for chunk in generate(server.url, request(3)) for p in chunk.logprobs]
    assert math.isnan(logprobs[0])
    assert logprobs[1:] == [-math.inf, expected(3)[2][1]]


@pytest.mark.parametrize("exact", [False, True])
def test_sampled_text_goes_on_as_it_would_have_only_when_asked_to_be_exact(
    server: ScriptedServer, exact: bool
) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "exact_resume": exact}
    whole = tokens_of(generate(server.url, request(20, **sampling)))
    assert whole != tokens_of(generate(server.url, request(20, **(sampling | {"seed": 6}))))
    rest = request(8, prompt=PROMPT + whole[:12], position=12, **sampling)
    assert (tokens_of(generate(server.url, rest)) == whole[12:]) is exact


def test_a_version_that_changes_in_mid_stream_is_stamped_token_by_token(server: ScriptedServer) -> None:
    server.control(version=3, version_after=20, version_then=4)
    chunks = generate(server.url, request(50))
    versions = [chunk.weight_version for chunk in chunks for _ in chunk.token_ids]
    assert versions == [3] * 20 + [4] * 30


def test_a_server_that_tells_no_version_gets_the_one_known_at_the_start(server: ScriptedServer) -> None:
    server.control(version=3, version_after=20, version_then=4, tells_version=False)
    chunks = generate(server.url, request(50), weight_version=3)
    assert {chunk.weight_version for chunk in chunks} == {3}


IN_STREAM = {
    "reset": WorkerGone,
    "half_close": WorkerGone,
    "close": WorkerGone,
    "cut_event": WorkerGone,
    "malformed": WorkerGarbled,
    "duplicate": WorkerGarbled,
    "no_ids": WorkerGarbled,
    "few_logprobs": WorkerGarbled,
    "error_event": WorkerGarbled,
}


@pytest.mark.parametrize("kind", IN_STREAM)
@pytest.mark.parametrize("after", [1, 7])
def test_a_stream_that_breaks_gives_all_before_it_and_the_right_fault(
    server: ScriptedServer, kind: str, after: int
) -> None:
    server.control(faults=[{"kind": kind, "after": after}])
    chunks, fault = broken(server.url, request(20))
    assert type(fault) is IN_STREAM[kind]
    assert isinstance(fault, WorkerFault)
    assert fault.worker == "w"
    assert tokens_of(chunks) == tuple(i for i, _ in expected(after))
    # It was scripted once: the next request is whole.
    assert len(tokens_of(generate(server.url, request(20)))) == 20


@pytest.mark.parametrize("kind", ["close", "reset", "half_close"])
def test_a_final_event_that_is_lost_is_a_fault_after_the_last_token(
    server: ScriptedServer, kind: str
) -> None:
    server.control(faults=[{"kind": kind, "after": 20}])
    chunks, fault = broken(server.url, request(20))
    assert isinstance(fault, WorkerGone)
    assert len(tokens_of(chunks)) == 20
    assert chunks[-1].finish_reason is None


def test_a_reset_before_the_first_token_is_a_dead_worker(server: ScriptedServer) -> None:
    server.control(faults=[{"kind": "reset"}])
    assert isinstance(broken(server.url, request())[1], WorkerGone)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRejected),
        (404, RequestRejected),
        (422, RequestRejected),
        (500, WorkerGone),
        (502, WorkerGone),
    ],
)
def test_a_refused_request_is_typed(server: ScriptedServer, status: int, kind: type[RolloutError]) -> None:
    server.control(faults=[{"kind": "status", "status": status}])
    assert type(broken(server.url, request())[1]) is kind


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_says_when_to_come_again(server: ScriptedServer, status: int) -> None:
    server.control(faults=[{"kind": "status", "status": status, "retry_after": "2.5"}])
    fault = broken(server.url, request())[1]
    assert isinstance(fault, WorkerBusy)
    assert fault.retry_after_s == 2.5


def test_a_context_that_is_too_long_is_rejected_with_the_servers_words(server: ScriptedServer) -> None:
    server.control(max_model_len=30)
    fault = broken(server.url, request(20))[1]
    assert isinstance(fault, RequestRejected)
    assert "40 tokens where the context has 30" in str(fault)


def test_a_server_that_is_not_there_is_gone() -> None:
    with socket.socket() as taken:
        # Bound and not listening: nobody else gets the port, and connections to it are refused.
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert isinstance(broken(url, request())[1], WorkerGone)

        async def health(worker: HttpWorker) -> None:
            with pytest.raises(WorkerGone):
                await worker.health()
            with pytest.raises(WorkerGone):
                await worker.start()

        run_with(url, health)


def test_a_server_that_dies_in_mid_stream_leaves_its_tokens_and_is_gone() -> None:
    with ScriptedServer(faults=[{"kind": "die", "after": 11}]) as server:
        chunks, fault = broken(server.url, request(20))
    assert isinstance(fault, WorkerGone)
    assert tokens_of(chunks) == tuple(i for i, _ in expected(11))


def test_a_server_that_hangs_gives_nothing_until_it_goes_on() -> None:
    async def use(worker: HttpWorker) -> list[TokenChunk]:
        stream = worker.generate(request(20))
        chunks = [await anext(stream) for _ in range(11)]
        waiting = asyncio.ensure_future(anext(stream))
        # The process stops itself: this waits for its state, not for a time.
        await _until(lambda: _is_stopped(hung.pid))
        assert not waiting.done()
        hung.go_on()
        return [*chunks, await waiting, *[chunk async for chunk in stream]]

    with ScriptedServer(faults=[{"kind": "hang", "after": 11}]) as hung:
        assert len(tokens_of(run_with(hung.url, use))) == 20


def test_health_is_a_completion_and_not_a_page(server: ScriptedServer) -> None:
    async def health(worker: HttpWorker) -> None:
        await worker.health()
        assert server.log()["requests"][-1]["max_tokens"] == 1
        server.control(faults=[{"kind": "status", "status": 500}])
        with pytest.raises(WorkerGone):
            await worker.health()

    run_with(server.url, health)


def test_model_info_is_what_the_server_lists(server: ScriptedServer) -> None:
    server.control(max_model_len=4096)

    async def info(worker: HttpWorker) -> ModelInfo:
        return await worker.model_info()

    assert run_with(server.url, info) == ModelInfo(name="scripted", max_model_len=4096)


def test_closing_a_stream_early_ends_it_in_the_server(server: ScriptedServer) -> None:
    server.control(pace_s=0.01)
    aborted = server.log()["aborted"]

    async def use(worker: HttpWorker) -> None:
        stream = worker.generate(request(10_000))
        await anext(stream)
        assert server.log()["running"] == 1
        await stream.aclose()  # type: ignore[attr-defined]
        await _until(lambda: bool(server.log()["aborted"] == aborted + 1))

    run_with(server.url, use)


def test_abort_ends_that_attempt_alone(server: ScriptedServer) -> None:
    server.control(pace_s=0.01)

    async def use(worker: HttpWorker) -> None:
        doomed, other = (worker.generate(request(n, name=name)) for n, name in ((10_000, "a"), (30, "b")))
        await anext(doomed)
        await anext(other)
        await worker.abort("a")
        await worker.abort("unknown")
        rest = [chunk async for chunk in doomed]
        assert rest[-1].finish_reason == "abort"
        assert len(tokens_of([chunk async for chunk in other])) == 29
        await _until(lambda: bool(server.log()["running"] == 0))

    run_with(server.url, use)


def test_a_thousand_streams_run_at_once_and_queueing_is_no_fault() -> None:
    num = 1000

    async def use(worker: HttpWorker) -> None:
        streams = asyncio.gather(*(read(worker, request(4, name=f"r{n}"), []) for n in range(num)))
        # All of them are in the server before the first has a token.
        await _until(lambda: bool(burdened.log()["running"] == num))
        assert burdened.log()["tokens"] == 0
        burdened.control(hold=False)
        for chunks in await streams:
            assert tokens_of(chunks) == tuple(i for i, _ in expected(4))
        assert len(burdened.log()["requests"]) == num

    with ScriptedServer(hold=True) as burdened:
        run_with(burdened.url, use)


def test_weights_from_a_directory_are_put_in_force(server: ScriptedServer, tmp_path: Path) -> None:
    server.control(version=3, tells_version=False)

    async def use(worker: HttpWorker) -> None:
        assert await worker.weight_version() == 3
        await worker.update_weights(4, tmp_path)
        assert await worker.weight_version() == 4
        server.control(update_status=500)
        with pytest.raises(UpdateFailed, match="answered 500") as caught:
            await worker.update_weights(5, tmp_path)
        assert caught.value.version == 4
        with pytest.raises(UpdateFailed, match="as a directory"):
            await worker.update_weights(5, {})
        assert {c.weight_version for c in await read(worker, request(3), [])} == {4}

    run_with(server.url, use, weight_version=3, update_path="/update_weights")


def test_a_server_without_a_path_for_weights_says_so(server: ScriptedServer, tmp_path: Path) -> None:
    async def use(worker: HttpWorker) -> None:
        with pytest.raises(UpdateFailed, match="update_path"):
            await worker.update_weights(5, tmp_path)

    run_with(server.url, use)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - it is of another process
        await asyncio.sleep(0.01)
