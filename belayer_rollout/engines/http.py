"""A worker behind HTTP: any OpenAI-compatible server that takes token ids and gives token ids back.

**vLLM** does (0.10 and later): `/v1/completions` with a list of ids as the prompt and `return_token_ids`. It
clamps logprobs below -9999.0 to that. For `exact_resume` it must be started with Belayer's logits processor,
and this worker with ``exact_resume=True``; the request then carries
`vllm_xargs: {"belayer_seed": ..., "belayer_position": ...}`.

**SGLang**: its `/v1/completions` takes ids, and gives text back; ids come from its own `/generate`
(`input_ids`, `return_logprob`, `stream`; each event has `output_ids` and
`meta_info.output_token_logprobs` as (logprob, id, text), the whole list so far unless the server runs with
`--incremental-streaming-output`). A proxy that says these in the words above is what it needs: this worker
answers text without ids by `WorkerGarbled`. `weight_version` in `meta_info` is what an event may carry here
at its top.

**Weight versions.** Tokens of an event that has a `weight_version` (a number) get that one. A server that
does not say gets for a whole request the version known when it was sent: what `update_weights` last put in
force. If such a server's weights change in mid-request, the tokens after it are under the old number."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from belayer_rollout.engines.base import WeightSource
from belayer_rollout.engines.completions import DONE, CompletionStream, completion_body, loads, refusal
from belayer_rollout.engines.sse import EventParser
from belayer_rollout.errors import UpdateFailed, WorkerGarbled, WorkerGone
from belayer_rollout.types import EngineRequest, ModelInfo, SamplingParams, TokenChunk

__all__ = ["HttpWorker"]

CONNECT_S = 10.0
"""Until the server's kernel takes the connection. The only deadline here: the rest are the caller's."""
READ_BYTES = 2**18
"""What a stream may have unread before its server is made to wait."""


class HttpWorker:
    """An `EngineWorker` that speaks to ``url``, such as ``http://host:8000``.

    ``model`` is the name to ask for; empty: the first that the server lists. ``update_path`` is where the
    server takes new weights from a directory that it can read, by a POST of
    `{"model_path": ..., "weight_version": ...}` (SGLang's `/update_weights_from_disk` does); without it
    `update_weights` fails. ``probe_token_ids`` is the prompt of `health`."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        model: str = "",
        api_key: str = "",
        exact_resume: bool = False,
        weight_version: int = 0,
        update_path: str = "",
        probe_token_ids: Sequence[int] = (1,),
    ) -> None:
        self.url = url.rstrip("/")
        self._name = name or self.url
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._exact_resume = exact_resume
        self._version = weight_version
        self._update_path = update_path
        self._probe = EngineRequest(
            "probe", tuple(probe_token_ids), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        )
        self._session: aiohttp.ClientSession | None = None
        self._running: dict[str, aiohttp.ClientResponse] = {}
        self._aborted: set[str] = set()

    @property
    def name(self) -> str:
        """See `EngineWorker`."""
        return self._name

    @property
    def supports_exact_resume(self) -> bool:
        """As it was said to be started."""
        return self._exact_resume

    @property
    def recovers_itself(self) -> bool:
        """Not by what this side knows."""
        return False

    async def start(self) -> None:
        """Find out the model's name. Idempotent.

        Raises:
            WorkerFault: the server does not answer."""
        if not self._model:
            self._model = (await self.model_info()).name

    async def model_info(self) -> ModelInfo:
        """From the server's list of models.

        Raises:
            WorkerFault: it does not answer, or not with a list."""
        with self._translated():
            async with self._client().get(f"{self.url}/v1/models", headers=self._headers) as response:
                await self._check(response)
                text = await response.text()
        try:
            models = loads(text)["data"]
            chosen = next((m for m in models if m["id"] == self._model), None) or models[0]
            length = chosen.get("max_model_len")
            return ModelInfo(name=chosen["id"], max_model_len=None if length is None else int(length))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
            raise WorkerGarbled(
                f"{self._name}: no list of models: {text[:200]!r}", worker=self._name
            ) from exc

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the new tokens; see `EngineWorker`. Closing it early closes the connection, which is what
        aborts the request in the server.

        Raises:
            WorkerGone: refused, reset, ended without a finish reason, or a 5xx.
            WorkerBusy: 429 or 503.
            WorkerGarbled: what came makes no sense.
            RequestRejected: any other 4xx."""
        await self.start()
        stream = CompletionStream(self._name, self._version)
        body = json.dumps(completion_body(request, self._model)).encode()
        headers = {**self._headers, "X-Request-Id": request.request_id}
        with self._translated():
            async with self._client().post(
                f"{self.url}/v1/completions", data=body, headers=headers
            ) as response:
                await self._check(response)
                self._running[request.request_id] = response
                parser, read = EventParser(), response.content.readany
                try:
                    # Flat, and one generator: at tens of thousands of events a second each layer is felt.
                    while data := await read():
                        for event in parser.feed(data):
                            if event == DONE:
                                raise self._gone("it ended the stream without a finish reason")
                            chunk = stream.chunk(event)
                            if chunk is None:
                                continue
                            if stream.told_version is not None:
                                self._version = stream.told_version
                            yield chunk
                            if chunk.finish_reason is not None:
                                return
                    raise self._gone("the connection ended without a finish reason")
                except aiohttp.ClientError:
                    if request.request_id not in self._aborted:
                        raise
                    yield stream.end("abort")
                except ValueError as exc:
                    raise WorkerGarbled(f"{self._name}: {exc}", worker=self._name) from exc
                finally:
                    self._running.pop(request.request_id, None)
                    self._aborted.discard(request.request_id)

    async def abort(self, request_id: str) -> None:
        """Close that attempt's connection; its stream ends with "abort"."""
        if (response := self._running.get(request_id)) is not None:
            self._aborted.add(request_id)
            response.close()

    async def health(self) -> None:
        """A completion of one token: a server's own health page can be fine while its engine is dead.

        Raises:
            WorkerFault: it gives none."""
        async for chunk in self.generate(self._probe):
            if chunk.token_ids:
                return
        raise WorkerGarbled(f"{self._name} ended a completion of one token with none", worker=self._name)

    async def weight_version(self) -> int:
        """What this side put in force, or last saw in an event."""
        return self._version

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """Have the server load a directory.

        Raises:
            UpdateFailed: it cannot, or did not; the version before is in force.
            WorkerGone: it did not answer; which version is in force is then unknown until its events say."""
        if not self._update_path or not isinstance(source, Path):
            raise UpdateFailed(
                f"{self._name} takes no new weights this way: over HTTP they go as a directory that the "
                "server can read, to a server that has a path for it (update_path)",
                version=self._version,
            )
        body = json.dumps({"model_path": str(source), "weight_version": str(version)}).encode()
        with self._translated():
            async with self._client().post(
                f"{self.url}/{self._update_path.lstrip('/')}", data=body, headers=self._headers
            ) as response:
                text = await response.text(errors="replace")
        if response.status != 200 or not _says_success(text):
            raise UpdateFailed(
                f"{self._name} answered {response.status} to new weights: {text[:500]}", version=self._version
            )
        self._version = version

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _client(self) -> aiohttp.ClientSession:
        # Made at the first use, as it belongs to the loop that runs then.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection for each request: one kept from before, and dropped by the server just now,
                # would look like a dead worker. No limit: thousands of streams are open at once.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=READ_BYTES,
                auto_decompress=False,
            )
        return self._session

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            body = await response.text(errors="replace")
            raise refusal(self._name, response.status, response.headers.get("Retry-After"), body, time.time)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError) as exc:
            # OSError holds the connect deadline's TimeoutError, too.
            raise self._gone(f"{type(exc).__name__}: {exc}") from exc

    def _gone(self, what: str) -> WorkerGone:
        return WorkerGone(f"{self._name}: {what}", worker=self._name)


def _says_success(text: str) -> bool:
    try:
        answer: Any = loads(text)
    except ValueError:
        return True
    return not isinstance(answer, dict) or answer.get("success", True) is not False
