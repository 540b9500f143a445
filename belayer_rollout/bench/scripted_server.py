"""An engine server that follows a script: the protocol of `engines.http`, a model that computes nothing, and
every way to break that a real server has. A process of its own, for tests and for the bench of the client.

    python -m belayer_rollout.bench.scripted_server [--port 0] [--settings JSON]

It prints `ready PORT`, and ends when its standard input does. `POST /control` changes `Settings`,
`GET /control/log` says what was asked of it. Events are written to the transport as bytes: the server has to
be faster than the client that it measures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

from aiohttp import web

from belayer_rollout.bench.scripted_model import STOP_TOKEN, TokenSource
from belayer_rollout.bench.scripted_script import Fault, Faults, Settings

__all__ = ["ScriptedEngine", "main"]

MOST_UNSENT_BYTES = 2**16
"""A stream whose reader is slower than this waits."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops what is unsent and sends an RST."""
EVENT = (
    'data: {"id":"cmpl-scripted","object":"text_completion","created":1,"model":"scripted",'
    '"choices":[{"index":0,"text":" %d","logprobs":{"text_offset":[0],"token_logprobs":[%s],'
    '"tokens":[%s],"top_logprobs":[%s]},"finish_reason":%s,"stop_reason":%s,"token_ids":[%s]}]%s}\n\n'
)
USAGE = ',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}'


class ScriptedEngine:
    """The application and what it keeps."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.faults = Faults(settings.faults)
        self.released = asyncio.Event()
        self._release()
        self.requests: list[dict[str, Any]] = []
        self.tokens = 0
        self.running = 0
        self.aborted = 0

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [
                web.post("/v1/completions", self.complete),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.post("/update_weights", self.update_weights),
                web.post("/control", self.control),
                web.get("/control/log", self.log),
            ]
        )
        return app

    async def models(self, request: web.Request) -> web.Response:
        """One model, with its context length."""
        model = {"id": "scripted", "object": "model", "max_model_len": self.settings.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def health(self, request: web.Request) -> web.Response:
        """Well, sooner or later."""
        await asyncio.sleep(self.settings.health_s)
        return web.Response()

    async def update_weights(self, request: web.Request) -> web.Response:
        """A new version, if the script lets it."""
        given = await request.json()
        if self.settings.update_status == 200:
            self.settings.version = int(given["weight_version"])
        return web.json_response(
            {"success": self.settings.update_status == 200}, status=self.settings.update_status
        )

    async def control(self, request: web.Request) -> web.Response:
        """Change settings; new faults replace those still to come."""
        given = await request.json()
        try:
            self.settings.update(given)
        except (TypeError, ValueError) as exc:
            return web.Response(status=400, text=str(exc))
        if "faults" in given:
            self.faults = Faults(self.settings.faults)
        self._release()
        return web.Response()

    async def log(self, request: web.Request) -> web.Response:
        """What was asked, and how it goes."""
        return web.json_response(
            {
                "requests": self.requests,
                "tokens": self.tokens,
                "running": self.running,
                "aborted": self.aborted,
            }
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Stream tokens."""
        body = await request.json()
        self.requests.append(
            {
                "prompt": body["prompt"],
                "max_tokens": body["max_tokens"],
                "min_tokens": body.get("min_tokens", 0),
                "request_id": request.headers.get("X-Request-Id", ""),
            }
        )
        if (fault := self.faults.refusal()) is not None:
            headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            return web.Response(status=fault.status, headers=headers, text="as the script says")
        length = len(body["prompt"]) + body["max_tokens"]
        if body["max_tokens"] < 1 or length > self.settings.max_model_len:
            message = f"{length} tokens where the context has {self.settings.max_model_len}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            return response
        self.running += 1
        try:
            whole = await _Stream(self, body, transport).run()
        finally:
            self.running -= 1
        if whole:
            await response.write_eof()
        else:
            self.aborted += transport.is_closing()
        return response

    def _release(self) -> None:
        if self.settings.hold:
            self.released.clear()
        else:
            self.released.set()


class _Stream:
    """One answer on its way."""

    def __init__(self, engine: ScriptedEngine, body: dict[str, Any], transport: asyncio.Transport) -> None:
        settings = engine.settings
        exact = body.get("vllm_xargs") or {}
        sampled = body.get("temperature", 1.0) > 0
        self.engine = engine
        self.transport = transport
        self.source = TokenSource(
            body["prompt"],
            vocab=settings.vocab,
            seed=exact.get("belayer_seed", body.get("seed") or 0) if sampled else None,
            draw=exact.get("belayer_position", 0),
            stop_at=None if body.get("ignore_eos") else settings.stop_at,
        )
        self.max_tokens: int = body["max_tokens"]
        self.min_tokens: int = body.get("min_tokens", 0)
        self.stop_ids = frozenset((*body.get("stop_token_ids", ()), STOP_TOKEN))
        self.ignore_eos: bool = body.get("ignore_eos", False)
        options = body.get("stream_options") or {}
        self.usage = settings.tells_usage and options.get("continuous_usage_stats", False)
        self.num_prompt = len(body["prompt"])
        self.count = 0
        self.last = b""

    async def run(self) -> bool:
        """Send all of it. False: it did not come to its proper end."""
        settings, engine, transport = self.engine.settings, self.engine, self.transport
        await asyncio.sleep(settings.probe_s if self.max_tokens == 1 else settings.queue_s)
        await engine.released.wait()
        while not transport.is_closing():
            if (fault := engine.faults.due(self.count, engine.tokens)) is not None:
                if not await self._break(fault):
                    return False
                continue
            event, is_last = self._next_event()
            self._write(event)
            if is_last:
                self._write(b"data: [DONE]\n\n")
                return True
            await asyncio.sleep(settings.pace_s)
            while transport.get_write_buffer_size() > MOST_UNSENT_BYTES:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.001)
        return False

    def _next_event(self) -> tuple[bytes, bool]:
        settings = self.engine.settings
        ids: list[int] = []
        logprobs: list[str] = []
        reason, stop = "null", "null"
        while reason == "null" and len(ids) < settings.burst:
            token, logprob = self.source.next(self.count + len(ids) >= self.min_tokens)
            ids.append(token)
            logprobs.append(repr(logprob))
            count = self.count + len(ids)
            if token in self.stop_ids and count > self.min_tokens:
                if token != STOP_TOKEN:
                    reason, stop = '"stop"', str(token)
                elif not self.ignore_eos:
                    reason = '"stop"'
            elif count == self.max_tokens:
                reason = '"length"'
        if settings.odd_logprobs:
            logprobs = [("NaN", "-Infinity", p)[i % 3] for i, p in enumerate(logprobs, self.count)]
        self._count(len(ids))
        if reason != "null" and self.engine.faults.is_due(self.count, self.engine.tokens):
            # The tokens are out; what says that they are all is not.
            return self._event(ids, logprobs, "null", "null"), False
        return self._event(ids, logprobs, reason, stop), reason != "null"

    def _count(self, num: int) -> None:
        settings = self.engine.settings
        self.count += num
        self.engine.tokens += num
        if settings.version_after is not None and self.count > settings.version_after:
            settings.version, settings.version_after = settings.version_then, None

    def _event(self, ids: list[int], logprobs: list[str], reason: str, stop: str) -> bytes:
        tells_version = self.engine.settings.tells_version
        more = f',"weight_version":{self.engine.settings.version}' if tells_version else ""
        if self.usage:
            more += USAGE % (self.num_prompt, self.num_prompt + self.count, self.count)
        names = ",".join([f'"token_id:{i}"' for i in ids])
        top = ",".join([f'{{"token_id:{i}":{p}}}' for i, p in zip(ids, logprobs, strict=False)])
        parts = (ids[0], ",".join(logprobs), names, top, reason, stop, ",".join(map(str, ids)), more)
        return (EVENT % parts).encode()

    def _write(self, event: bytes) -> None:
        self.last = event
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))

    async def _break(self, fault: Fault) -> bool:
        """Let it happen. True: the stream goes on."""
        transport = self.transport
        sock = transport.get_extra_info("socket")
        match fault.kind:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
                return True
            case "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                transport.abort()
            case "half_close":
                sock.shutdown(socket.SHUT_WR)
                while not transport.is_closing():  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.01)
            case "close":
                transport.write(b"0\r\n\r\n")
                transport.close()
            case "cut_event":
                event, _ = self._next_event()
                self._write(event[: len(event) // 2])
                transport.write(b"0\r\n\r\n")
                transport.close()
            case "malformed":
                self._write(b'data: {"choices": [{"token_ids": [\n\n')
            case "error_event":
                self._write(b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n')
            case "duplicate":
                self._write(self.last)
                return True
            case "no_ids":
                event, _ = self._next_event()
                self._write(event.replace(b'"token_ids"', b'"ids"'))
            case "few_logprobs":
                self._count(2)
                self._write(self._event([5, 6], ["-0.5"], "null", "null"))
        return False


async def serve(port: int, settings: Settings) -> None:
    """Until standard input ends."""
    runner = web.AppRunner(ScriptedEngine(settings).app(), access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096)
    await site.start()
    ((_, port),) = runner.addresses
    sys.stdout.write(f"ready {port}\n")
    sys.stdout.flush()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    # Streams may be on their way, to clients that are gone or hang: nothing to wait for.
    os._exit(0)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--settings", default="{}", help="JSON; see scripted_script.Settings")
    args = parser.parse_args(argv)
    settings = Settings()
    settings.update(json.loads(args.settings))
    asyncio.run(serve(args.port, settings))


if __name__ == "__main__":
    main()
