"""The HTTP face of a rollout client: aiohttp handlers that translate, and decide nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from belayer_rollout.client import RolloutClient
from belayer_rollout.errors import (
    InvalidRequest,
    Misuse,
    RequestCancelled,
    RequestRejected,
    RolloutError,
    UnknownRequest,
    UpdateFailed,
    WeightVersionChanged,
    WorkerFault,
)
from belayer_rollout.serve.wire import (
    ChatBody,
    CompletionBody,
    chat_chunk,
    chat_result,
    completion_chunk,
    completion_result,
)
from belayer_rollout.text import TextStream
from belayer_rollout.types import Generation, SamplingParams

__all__ = ["make_app", "run_app"]

SESSION_HEADER = "X-Belayer-Session"
REQUEST_HEADER = "X-Belayer-Request"
"""A name that the caller gives its request: sent again after a lost connection, it goes on where it was."""

MOST_BODY_BYTES = 64 * 1024 * 1024
ROOM_TOKENS = 16
"""What a chat answer may take where neither the caller nor the model says how long."""

_HTTP_STATUS: Sequence[tuple[type[RolloutError], int]] = (
    (UnknownRequest, 404),
    (Misuse, 400),
    (RequestRejected, 400),
    (RequestCancelled, 499),
    (WeightVersionChanged, 409),
    (UpdateFailed, 503),
    (WorkerFault, 503),
    (RolloutError, 503),
)


class _Endpoint:
    """What the handlers share."""

    def __init__(self, client: RolloutClient, model: str, tokenizer: Any | None) -> None:
        self.client = client
        self.model = model
        self.tokenizer = tokenizer

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = CompletionBody.read(await _json(request))
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = list(self._tokenizer("a prompt of text").encode(prompt))
        requests = body.sampling(body.max_tokens)
        if body.stream:

            def event(chunk: Any, text: str, request_id: str, created_s: int) -> dict[str, Any]:
                return completion_chunk(
                    body, chunk, text, request_id=request_id, model=self.model, created_s=created_s
                )

            return await self._stream(request, body, prompt, requests, event)
        made = await self._generate(request, body, prompt, requests)
        return web.json_response(completion_result(body, made, self.model, int(time.time())))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = ChatBody.read(await _json(request))
        tokenizer = self._tokenizer("a chat")
        # Templates hold arbitrary code of the model's makers and may raise anything.
        try:
            prompt = tokenizer.apply_chat_template(
                body.messages, add_generation_prompt=True, return_dict=False, **body.chat_template_kwargs
            )
        except Exception as error:
            raise InvalidRequest(f"the model's chat template takes no such messages: {error}") from error
        info = await self.client.model_info()
        longest = ROOM_TOKENS if info.max_model_len is None else max(1, info.max_model_len - len(prompt))
        requests = body.sampling(body.max_completion_tokens or body.max_tokens or longest)
        if body.stream:

            def event(chunk: Any, text: str, request_id: str, created_s: int) -> dict[str, Any]:
                return chat_chunk(
                    body, chunk, text, request_id=request_id, model=self.model, created_s=created_s
                )

            return await self._stream(request, body, prompt, requests, event)
        made = await self._generate(request, body, prompt, requests)
        return web.json_response(chat_result(body, made, self.model, int(time.time())))

    async def models(self, request: web.Request) -> web.Response:
        info = await self.client.model_info()
        entry = {"id": self.model, "object": "model", "max_model_len": info.max_model_len}
        return web.json_response({"object": "list", "data": [entry]})

    async def health(self, request: web.Request) -> web.Response:
        """200 if a worker is there that would be sent a request now."""
        status = self.client.status()
        is_served = any(worker.is_fit for worker in status.workers)
        return web.json_response({"served": is_served}, status=200 if is_served else 503)

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(self.client.status()))

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self.client.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def resume(self, request: web.Request) -> web.Response:
        """What came of a request whose caller lost its connection: waits until it is finished."""
        generation = await self.client.resume(request.match_info["request_id"])
        body = CompletionBody(prompt=[], return_token_ids=True, logprobs=0)
        made = [(generation, self._text(body, generation))]
        return web.json_response(completion_result(body, made, self.model, int(time.time())))

    async def cancel(self, request: web.Request) -> web.Response:
        await self.client.cancel(request.match_info["request_id"])
        return web.Response(status=204)

    async def weights(self, request: web.Request) -> web.Response:
        """``{"version": 4, "path": "/a/folder/of/safetensors"}``, the folder being on this host."""
        data = await _json(request)
        try:
            version, path = int(data["version"]), Path(data["path"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest('wanted: {"version": NUMBER, "path": FOLDER}') from error
        await self.client.update_weights(version, path)
        return web.json_response({"version": version})

    def _tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise InvalidRequest(
                f"{what} needs a tokenizer: start the server with --tokenizer, or send token ids"
            )
        return self.tokenizer

    async def _generate(
        self,
        request: web.Request,
        body: CompletionBody | ChatBody,
        prompt: Sequence[int],
        requests: Sequence[SamplingParams],
    ) -> list[tuple[Generation, str]]:
        names = _request_ids(request, len(requests))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._one(prompt, params, _session(request, body), name))
                for params, name in zip(requests, names, strict=True)
            ]
        return [(task.result(), self._text(body, task.result())) for task in tasks]

    async def _one(
        self, prompt: Sequence[int], params: SamplingParams, session: str, request_id: str
    ) -> Generation:
        return await self.client.generate(prompt, params, session=session, request_id=request_id)

    async def _stream(
        self,
        request: web.Request,
        body: CompletionBody | ChatBody,
        prompt: Sequence[int],
        requests: Sequence[SamplingParams],
        event: Callable[[Any, str, str, int], dict[str, Any]],
    ) -> web.StreamResponse:
        if len(requests) > 1:
            raise InvalidRequest("n > 1 is not streamed here: send as many requests")
        (request_id,) = _request_ids(request, 1)
        text = self._text_stream(body, prompt)
        chunks = self.client.stream(
            prompt, requests[0], session=_session(request, body), request_id=request_id
        )
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                REQUEST_HEADER: request_id,
            }
        )
        created_s = int(time.time())
        try:
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                piece = text.feed(chunk.token_ids, is_last=chunk.finish_reason is not None) if text else ""
                await response.write(_event(event(chunk, piece, request_id, created_s)))
        except RolloutError as error:
            if not response.prepared:
                raise
            # The status line is out; the stream says it in its own way, and ends without [DONE].
            await response.write(_event(_error_body(error)))
            return response
        finally:
            await chunks.aclose()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _text(self, body: CompletionBody | ChatBody, generation: Generation) -> str:
        stream = self._text_stream(body, generation.prompt_token_ids)
        return stream.feed(generation.token_ids, is_last=True) if stream else ""

    def _text_stream(self, body: CompletionBody | ChatBody, prompt: Sequence[int]) -> TextStream | None:
        if self.tokenizer is None:
            return None
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return TextStream(
            self.tokenizer,
            prompt,
            stop=stop,
            keep_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
        )


def make_app(client: RolloutClient, *, model: str, tokenizer: Any | None = None) -> web.Application:
    """The endpoint, as an application of aiohttp. ``tokenizer``: one of transformers, for text and chats;
    without it, prompts are token ids. The client is the caller's to start and to close."""
    endpoint = _Endpoint(client, model, tokenizer)
    app = web.Application(middlewares=[_typed_errors], client_max_size=MOST_BODY_BYTES)
    app.add_routes(
        [
            web.post("/v1/completions", endpoint.completions),
            web.post("/v1/chat/completions", endpoint.chat),
            web.get("/v1/models", endpoint.models),
            web.get("/health", endpoint.health),
            web.get("/metrics", endpoint.metrics),
            web.get("/belayer/status", endpoint.status),
            web.get("/belayer/requests/{request_id}", endpoint.resume),
            web.delete("/belayer/requests/{request_id}", endpoint.cancel),
            web.post("/belayer/weights", endpoint.weights),
        ]
    )
    return app


async def run_app(app: web.Application, *, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve it; returns the runner, to be cleaned up by the caller, and the port (``port`` 0: a free one).
    A caller that goes away ends its request in the engine."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, runner.addresses[0][1]


@web.middleware
async def _typed_errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
    except* RolloutError as group:
        error = _first(group)
        status = next(code for kind, code in _HTTP_STATUS if isinstance(error, kind))
        answer = web.json_response(_error_body(error), status=status)
    return answer


def _first(group: BaseExceptionGroup[RolloutError]) -> RolloutError:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _error_body(error: RolloutError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": type(error).__name__, "code": None}}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from error


def _request_ids(request: web.Request, count: int) -> list[str]:
    name = request.headers.get(REQUEST_HEADER) or f"cmpl-{uuid.uuid4().hex}"
    return [name] if count == 1 else [f"{name}-{index}" for index in range(count)]


def _session(request: web.Request, body: CompletionBody | ChatBody) -> str:
    return body.session or request.headers.get(SESSION_HEADER, "")
