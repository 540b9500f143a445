"""HfWorker: a transformers model in this process as an EngineWorker, for small models and debugging.

Plain on purpose: each request is decoded by itself, with a KV cache of its own, in one of a few threads;
nothing is batched, and the others wait their turn. For throughput take vLLM.

Every draw is one by (seed, position), whether exact_resume is asked for or not."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from belayer_rollout.draws import Draw, choose
from belayer_rollout.engines.base import WeightSource
from belayer_rollout.engines.probe import prove_generating
from belayer_rollout.errors import (
    EngineMissing,
    RequestRejected,
    SetupError,
    UpdateFailed,
    WorkerFault,
    WorkerGone,
)
from belayer_rollout.types import (
    MOST_SEED,
    EngineRequest,
    FinishReason,
    ModelInfo,
    SamplingParams,
    TokenChunk,
)

__all__ = ["HfWorker"]


class HfWorker:
    """One model on the CPU or one GPU. A closed one is not opened again."""

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "hf",
        device: str = "cpu",
        dtype: str = "auto",
        weight_version: int = 0,
        threads: int = 1,
    ) -> None:
        """``dtype``: a torch dtype's name, or "auto" for the checkpoint's. ``threads``: requests decoded at
        once; steps still take turns, so a second one only keeps a long request from blocking a short one."""
        self._path = str(model)
        self._name = name
        self._device = device
        self._dtype = dtype
        self._version = weight_version
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"belayer-{name}")
        self._starting = asyncio.Lock()
        self._step = threading.Lock()
        """Held for a step of the model, and while weights change: no step ever sees a mix."""
        self._turn = threading.Lock()
        """Held by whoever waits for the step lock: a busy decoder would otherwise take it again and again."""
        self._model: Any = None
        self._ends: tuple[int, ...] = ()
        self._running: dict[str, _Stream] = {}
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def supports_exact_resume(self) -> bool:
        return True

    @property
    def recovers_itself(self) -> bool:
        return False

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineMissing: torch or transformers is not installed.
            SetupError: there is no such model."""
        async with self._starting:
            if self._closed:
                raise WorkerGone(f"{self._name} is closed", worker=self._name)
            if self._model is None:
                self._model = await asyncio.to_thread(self._load)

    async def model_info(self) -> ModelInfo:
        config = self._alive().config
        return ModelInfo(
            name=self._path, max_model_len=config.max_position_embeddings, eos_token_ids=self._ends
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        self._check(request)
        stream = _Stream(asyncio.get_running_loop())
        self._running[request.request_id] = stream
        self._threads.submit(stream.feed, lambda: self._chunks(request, stream))
        try:
            while True:
                item = await stream.queue.get()
                if isinstance(item, WorkerFault):
                    raise item
                if isinstance(item, Exception):
                    raise WorkerFault(f"{self._name}: {item!r}", worker=self._name) from item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            stream.aborted.set()
            del self._running[request.request_id]

    async def abort(self, request_id: str) -> None:
        if stream := self._running.get(request_id):
            stream.aborted.set()

    async def health(self) -> None:
        await prove_generating(self)

    async def weight_version(self) -> int:
        self._alive()
        return self._version

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """See `EngineWorker.update_weights`. All tensors are checked and brought to the device before the
        first is put in force; running requests compute their KV cache anew."""
        self._alive()
        try:
            await asyncio.to_thread(self._replace, version, source)
        except (ValueError, OSError, RuntimeError) as error:
            raise UpdateFailed(f"weights {version}: {error}", version=self._version) from error

    async def close(self) -> None:
        self._closed = True
        for stream in list(self._running.values()):
            stream.aborted.set()
            stream.queue.put_nowait(WorkerGone(f"{self._name} was closed", worker=self._name))
        async with self._starting:
            await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
            self._model = None

    # Private from here on; what is not async runs in a thread.

    def _alive(self) -> Any:
        if self._closed or self._model is None:
            state = "closed" if self._closed else "not started"
            raise WorkerGone(f"{self._name} is {state}", worker=self._name)
        return self._model

    def _check(self, request: EngineRequest) -> None:
        config = self._alive().config
        tokens = request.token_ids
        if not tokens or not all(0 <= token < config.vocab_size for token in tokens):
            raise RequestRejected(f"a prompt needs token ids within 0..{config.vocab_size - 1}")
        if len(tokens) >= config.max_position_embeddings:
            raise RequestRejected(f"{len(tokens)} tokens leave no room in {config.max_position_embeddings}")
        if request.params.extra:
            raise RequestRejected(f"{self._name} knows nothing of {', '.join(request.params.extra)}")

    def _load(self) -> Any:
        if find_spec("torch") is None or find_spec("transformers") is None:
            raise EngineMissing("torch or transformers is not installed. Try: pip install 'belayer[models]'")
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(self._path, dtype=self._dtype)
        except (OSError, ValueError) as error:
            raise SetupError(f"{error}\nCheck the model's directory {self._path!r}") from error
        ids = model.generation_config.eos_token_id
        self._ends = tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)
        return model.to(self._device).eval()

    def _chunks(self, request: EngineRequest, stream: _Stream) -> Iterator[TokenChunk]:
        """One chunk per token; the last has the reason."""
        import torch

        params = request.params
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MOST_SEED))
        never_yet = torch.tensor(sorted({*self._ends, *params.stop_token_ids}), dtype=torch.long)
        tokens = list(request.token_ids)
        state = _Cache(-1)
        for made in range(params.max_tokens):
            if stream.aborted.is_set():
                yield TokenChunk((), (), self._name, self._version, "abort")
                return
            with self._stepping(), torch.inference_mode():
                version = self._version
                if state.version != version:
                    state = _Cache(version)
                logits = state.advance(self._model, tokens)
                scores = logits.clone()
                if made < params.min_tokens:
                    scores[:, never_yet.to(scores.device)] = float("-inf")
                token = int(choose(scores, [Draw.of(params, request.position + made)]))
                logprob = float(logits.log_softmax(-1)[0, token])
            tokens.append(token)
            reason, why = self._ended(params, token, made + 1, len(tokens))
            yield TokenChunk((token,), (logprob,), self._name, version, reason, why)
            if reason is not None:
                return

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        with self._turn:
            self._step.acquire()
        try:
            yield
        finally:
            self._step.release()

    def _ended(
        self, params: SamplingParams, token: int, made: int, length: int
    ) -> tuple[FinishReason | None, int | None]:
        if made >= params.min_tokens:
            if token in self._ends and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        full = made == params.max_tokens or length >= self._model.config.max_position_embeddings
        return ("length" if full else None), None

    def _replace(self, version: int, source: WeightSource) -> None:
        import torch

        given = source if isinstance(source, Mapping) else _read(Path(source))
        model = self._model
        # Tied parameters appear once in the first and under each of their names in the second.
        parameters = dict(model.named_parameters())
        if missing := sorted(parameters.keys() - given.keys()):
            raise ValueError(f"{len(missing)} tensors are missing, among them {missing[0]}")
        if unknown := sorted(given.keys() - model.state_dict().keys()):
            raise ValueError(f"the model has no {unknown[0]}")
        ready = {}
        for name, parameter in parameters.items():
            if given[name].shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(given[name].shape)}, not {tuple(parameter.shape)}")
            ready[name] = given[name].detach().to(parameter.device, parameter.dtype)
        with self._turn, self._step, torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(ready[name])
            self._version = version


class _Cache:
    """The KV cache of a request, good for the weights that made it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._fed = 0
        self._past: Any = None

    def advance(self, model: Any, tokens: list[int]) -> Any:
        """Feed what is new; the logits after the last token, [1, vocabulary], float32."""
        import torch

        new = torch.tensor([tokens[self._fed :]], device=model.device)
        out = model(input_ids=new, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past, self._fed = out.past_key_values, len(tokens)
        return out.logits[:, -1].float()


class _Stream:
    """From a decoding thread to the task that waits for its chunks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        self.aborted = threading.Event()
        self._loop = loop

    def feed(self, chunks: Callable[[], Iterator[TokenChunk]]) -> None:
        """Runs in the thread."""
        try:
            for chunk in chunks():
                self._hand_over(chunk)
        except Exception as error:  # noqa: BLE001 - raised where the chunks are read
            self._hand_over(error)

    def _hand_over(self, item: TokenChunk | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


def _read(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"no *.safetensors in {directory}")
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}
