"""The endpoint: what OpenAI's clients send is answered as vLLM's server would, and faults do not show."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from belayer_rollout.client import RolloutClient
from belayer_rollout.serve import make_app, run_app
from belayer_rollout.types import SamplingParams
from tests.rollout.byte_tokenizer import ByteTokenizer
from tests.rollout.scripted import Fault, Kind, ScriptedWorker, undisturbed

PROMPT = [11, 12, 13]


class ChatTokenizer(ByteTokenizer):
    """Bytes, and a template."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert not return_dict
        if any(message["role"] not in ("system", "user", "assistant") for message in messages):
            raise ValueError("unknown role")
        return self.encode("".join(f"{message['role']}:{message['content']}\n" for message in messages))


@dataclass
class Served:
    url: str
    http: aiohttp.ClientSession
    client: RolloutClient
    workers: list[ScriptedWorker]

    async def post(self, path: str, /, **body: Any) -> tuple[int, Any]:
        headers = body.pop("headers", {})
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def events(self, path: str, /, **body: Any) -> list[Any]:
        async with self.http.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200
            lines = [line async for line in answer.content if line.strip()]
        assert all(line.startswith(b"data: ") for line in lines)
        return [line[6:].strip() if b"[DONE]" in line else json.loads(line[6:]) for line in lines]


@asynccontextmanager
async def served(*workers: ScriptedWorker, tokenizer: bool = True) -> AsyncIterator[Served]:
    fleet = list(workers) or [ScriptedWorker(gap_s=0.001)]
    decoder = ChatTokenizer() if tokenizer else None
    async with RolloutClient(fleet, tokenizer=decoder) as client:
        runner, port = await run_app(
            make_app(client, model="toy", tokenizer=decoder), host="127.0.0.1", port=0
        )
        try:
            async with aiohttp.ClientSession() as http:
                yield Served(f"http://127.0.0.1:{port}", http, client, fleet)
        finally:
            await runner.cleanup()


async def until(is_so: Callable[[], bool]) -> None:
    """`run` sets the deadline."""
    while not is_so():  # noqa: ASYNC110 - nothing tells of what is waited for
        await asyncio.sleep(0.005)


def run(test: Callable[[Served], Awaitable[None]], *workers: ScriptedWorker, tokenizer: bool = True) -> None:
    async def body() -> None:
        async with served(*workers, tokenizer=tokenizer) as one:
            await asyncio.wait_for(test(one), 30)

    asyncio.run(body())


def test_token_ids_go_in_and_come_out_with_their_logprobs() -> None:
    async def test(server: Served) -> None:
        status, answer = await server.post(
            "/v1/completions", prompt=PROMPT, max_tokens=20, seed=1, logprobs=0, return_token_ids=True,
            ignore_eos=True,
        )  # fmt: skip
        wanted = undisturbed(PROMPT, SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
        (choice,) = answer["choices"]
        assert status == 200
        assert choice["token_ids"] == list(wanted.token_ids)
        assert choice["logprobs"]["token_logprobs"] == [
            None if value != value or abs(value) == float("inf") else value for value in wanted.logprobs
        ]
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["finish_reason"] == "length"
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}

    run(test)


@pytest.mark.parametrize("kind", ["die", "no logprobs", "duplicate"])
def test_a_worker_that_breaks_in_mid_stream_does_not_show(kind: Kind) -> None:
    async def test(server: Served) -> None:
        events = await server.events(
            "/v1/completions", prompt=PROMPT, max_tokens=20, seed=1, return_token_ids=True, ignore_eos=True
        )
        assert events[-1] == b"[DONE]"
        tokens = [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]
        wanted = undisturbed(PROMPT, SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
        assert tokens == list(wanted.token_ids)
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"
        assert sum(len(worker.requests) for worker in server.workers) == 3

    broken = ScriptedWorker("w0", deque([Fault(kind, 7)]), gap_s=0.001)
    run(test, broken, ScriptedWorker("w1", deque([Fault(kind, 7)]), gap_s=0.001))


def test_text_is_decoded_and_cut_at_its_stop_string_across_a_stream() -> None:
    text = "one, two; three"

    def spoken() -> ScriptedWorker:
        return ScriptedWorker(gap_s=0.001, tokens=[(byte, -0.5) for byte in text.encode()])

    async def test(server: Served) -> None:
        asked = {"prompt": "say", "max_tokens": 15, "stop": "; t"}
        _, answer = await server.post("/v1/completions", **asked)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one, two", "stop", "; t")
        events = await server.events("/v1/completions", **asked)
        pieces = [event["choices"][0]["text"] for event in events[:-1]]
        assert "".join(pieces) == "one, two"
        _, answer = await server.post("/v1/completions", **asked, include_stop_str_in_output=True)
        assert answer["choices"][0]["text"] == "one, two; t"

    run(test, spoken())


def test_a_chat_is_laid_out_by_the_models_template() -> None:
    async def test(server: Served) -> None:
        messages = [{"role": "user", "content": "hi"}]
        _, answer = await server.post(
            "/v1/chat/completions", messages=messages, max_tokens=5, logprobs=True, ignore_eos=True
        )
        assert list(server.workers[0].requests[0].token_ids) == list(b"user:hi\n")
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert len(answer["choices"][0]["logprobs"]["content"]) == 5
        events = await server.events("/v1/chat/completions", messages=messages, max_tokens=5, ignore_eos=True)
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        status, answer = await server.post(
            "/v1/chat/completions", messages=[{"role": "robot", "content": ""}], max_tokens=5
        )
        assert (status, "template" in answer["error"]["message"]) == (400, True)

    run(test)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens"),
        ({"prompt": PROMPT, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": PROMPT, "top_q": 3}, "top_q"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": PROMPT, "n": 2, "stream": True}, "n > 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], word: str) -> None:
    async def test(server: Served) -> None:
        status, answer = await server.post("/v1/completions", **body)
        assert (status, word in answer["error"]["message"]) == (400, True)
        assert server.workers[0].requests == []

    run(test)


def test_neutral_values_of_unknown_parameters_are_taken() -> None:
    async def test(server: Served) -> None:
        status, _ = await server.post(
            "/v1/completions",
            prompt=PROMPT,
            logit_bias={},
            presence_penalty=0,
            user="me",
            best_of=1,
            suffix=None,
        )
        assert status == 200

    run(test)


def test_text_without_a_tokenizer_and_a_body_that_is_no_json_are_refused() -> None:
    async def test(server: Served) -> None:
        status, answer = await server.post("/v1/completions", prompt="text")
        assert (status, "tokenizer" in answer["error"]["message"]) == (400, True)
        async with server.http.post(server.url + "/v1/completions", data=b"{") as reply:
            assert reply.status == 400

    run(test, tokenizer=False)


def test_each_of_n_completions_has_its_own_seed() -> None:
    async def test(server: Served) -> None:
        _, answer = await server.post("/v1/completions", prompt=PROMPT, n=3, seed=5, max_tokens=8)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert sorted(request.params.seed or 0 for request in server.workers[0].requests) == [5, 6, 7]

    run(test)


def test_a_caller_that_goes_away_ends_its_request_in_the_engine() -> None:
    async def test(server: Served) -> None:
        reading = asyncio.ensure_future(
            server.post("/v1/completions", prompt=PROMPT, max_tokens=100_000, ignore_eos=True)
        )
        await until(lambda: server.workers[0].given > 0)
        reading.cancel()
        await until(lambda: server.client.status().in_flight == 0)
        assert server.workers[0].aborted or server.workers[0].put_down

    run(test)


def test_a_named_request_is_taken_up_again() -> None:
    async def test(server: Served) -> None:
        headers = {"X-Belayer-Request": "mine"}
        asked = asyncio.ensure_future(
            server.post(
                "/v1/completions",
                prompt=PROMPT,
                max_tokens=50,
                headers=headers,
                return_token_ids=True,
                ignore_eos=True,
                seed=3,
            )
        )
        await until(lambda: server.workers[0].given > 0)
        status, again = await server.get("/belayer/requests/mine")
        _, first = await asked
        assert status == 200
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        status, answer = await server.get("/belayer/requests/nobodys")
        assert (status, answer["error"]["type"]) == (404, "UnknownRequest")

    run(test, ScriptedWorker(gap_s=0.01))


def test_status_metrics_models_and_health_tell_of_the_workers() -> None:
    async def test(server: Served) -> None:
        await server.post("/v1/completions", prompt=PROMPT, max_tokens=5, ignore_eos=True)
        _, status = await server.get("/belayer/status")
        assert status["workers"][0]["name"] == "w0"
        assert status["workers"][0]["sent"] == 1
        async with server.http.get(server.url + "/metrics") as answer:
            assert "belayer" in await answer.text()
        _, models = await server.get("/v1/models")
        assert models["data"][0]["id"] == "toy"
        assert (await server.get("/health"))[0] == 200

    run(test)


def test_weights_come_by_path_and_a_failure_says_which_version_is_in_force() -> None:
    async def test(server: Served) -> None:
        status, answer = await server.post("/belayer/weights", version=4, path="/somewhere")
        assert (status, answer) == (200, {"version": 4})
        assert server.workers[0].updates == [4]
        status, answer = await server.post("/belayer/weights", version="x")
        assert status == 400

    run(test)
