"""VllmWorker: vLLM's in-process `AsyncLLM` as an EngineWorker. Tokens in, tokens out; no tokenizer needed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from belayer_rollout.engines.base import WeightSource
from belayer_rollout.engines.probe import prove_generating
from belayer_rollout.engines.vllm.extension import EXTENSION, LEFTOVER
from belayer_rollout.engines.vllm.outputs import chunks, end_tokens, version_starts
from belayer_rollout.engines.vllm.params import EXACT_PROCESSOR, sampling_arguments
from belayer_rollout.engines.vllm.processes import (
    END_S,
    DeathWatch,
    EngineProcesses,
    end_marked,
    engine_environment,
)
from belayer_rollout.engines.vllm.weights import check_complete, staged
from belayer_rollout.errors import (
    EngineMissing,
    RequestRejected,
    SetupError,
    UpdateFailed,
    WorkerBusy,
    WorkerFault,
    WorkerGone,
    WorkerHung,
)
from belayer_rollout.shared_memory import remove_shared_memory, shared_memory_of
from belayer_rollout.types import EngineRequest, ModelInfo, TokenChunk

__all__ = ["VllmWorker"]

KV_BYTES = 1 << 30
"""Always set: without it vLLM measures and takes what is free on the host, its neighbours' share too."""

RPC_DEADLINE_S = 300.0
"""For loading weights in every worker; the rest of its calls take milliseconds."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # A forked EngineCore would inherit this process's threads' locks and its sockets and files.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # vLLM's "auto" pins its threads to cores; two engines of one host then share the same few.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Titles are otherwise written over the environment, by which an engine's processes are found.
    "SPT_NOENV": "1",
}


class VllmWorker:
    """One vLLM engine of this process (EngineCore and its workers are children of it).

    Not for use after `close`; a broken one is not mended: make another.

    Seams for what builds on it: ``engine_args`` (``load_format``, ``worker_cls``, ...), ``env``, `rpc`,
    `processes`, `kill`."""

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "vllm",
        engine_args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        weight_version: int = 0,
        exact_resume: bool = True,
    ) -> None:
        """``engine_args``: of vLLM's AsyncEngineArgs, before this class's own. ``env``: environment variables
        of the engine's processes. ``weight_version``: that of ``model`` as it is on disk. ``exact_resume``:
        install the logits processor that draws by (seed, position); not with speculative decoding."""
        self._model = str(model)
        self._name = name
        self._given = dict(engine_args or {})
        self._exact = exact_resume and not self._given.get("speculative_config")
        self._environment = ENVIRONMENT | dict(env or {})
        self._is_local = Path(self._model).is_dir()
        if self._is_local:
            self._environment.setdefault("HF_HUB_OFFLINE", "1")
        if self._exact:
            # The second model runner takes logits processors of another make.
            self._environment.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        self._version = weight_version
        self._mark = uuid.uuid4().hex
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._engine: Any = None
        self._processes = EngineProcesses((), ())
        self._known: list[psutil.Process] = []
        self._shared_memory: set[str] = set()
        """What the engine's processes have shared so far: killed ones leave it behind."""
        self._files: list[Path] = []
        """Likewise, and vLLM leaves them even when it ends in peace."""
        self._ends: tuple[int, ...] = ()
        self._watch: DeathWatch | None = None
        self._streams: dict[str, Any] = {}
        """vLLM's output queue of every running request, by vLLM's own id."""
        self._gone: str | None = None
        """Why the engine is no more; None while it is."""
        self._died = asyncio.Event()
        self._closed = False
        self._scratch: Path | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def supports_exact_resume(self) -> bool:
        return self._exact

    @property
    def recovers_itself(self) -> bool:
        return False

    def processes(self) -> EngineProcesses:
        """EngineCore and its workers, as they were when the engine was ready; empty before."""
        return self._processes

    async def start(self) -> None:
        """Start the engine and have it generate a token, which also compiles what vLLM compiles lazily.

        Raises:
            EngineMissing: vLLM is not installed.
            SetupError: the model or an engine argument is wrong.
            WorkerGone: it died on the way. Whatever is raised, no process is left."""
        async with self._starting:
            if self._engine is not None or self._closed or self._gone is not None:
                self._alive()
                return
            if find_spec("vllm") is None:
                raise EngineMissing("vLLM is not installed in this environment. Try: scripts/install-vllm")
            try:
                self._engine = await self._built()
                if self._closed:
                    raise WorkerGone("closed while it started", worker=self._name)
                self._ends = end_tokens(self._engine.model_config)
                await self._engine.update_weight_version(str(self._version))
                pids = await self.rpc("belayer_pids", deadline_s=RPC_DEADLINE_S)
                self._processes = EngineProcesses.of(pids)
                self._known = [psutil.Process(pid) for pid in self._processes.all]
                files = await self.rpc("belayer_files", deadline_s=RPC_DEADLINE_S)
                self._files = [Path(file) for of_rank in files for file in of_rank]
                self._watch = DeathWatch(self._processes.all, self._on_death)
                await self.rpc("belayer_end_with", os.getpid(), deadline_s=RPC_DEADLINE_S)
                await self.health()
                self._shared_memory |= shared_memory_of(self._processes.all)
            except BaseException as error:
                await self._end(f"it did not start: {error}")
                raise

    async def model_info(self) -> ModelInfo:
        config = self._alive().model_config
        return ModelInfo(
            name=self._model,
            max_model_len=config.max_model_len,
            eos_token_ids=self._ends,
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        engine = self._alive()
        params = self._params(request)
        # As vLLM's renderer hands it on: nothing left to tokenize, so no thread is needed for it.
        prompt = {"type": "token", "prompt_token_ids": list(request.token_ids)}
        with self._translated():
            queue = await engine.add_request(request.request_id, prompt, params)
        self._streams[queue.request_id] = queue
        finished = False
        made = 0
        try:
            self._alive()  # it may have died between the two lines above, when nobody told this queue
            while not finished:
                with self._translated():
                    # Nowait first: a task switch less per token where the engine is ahead.
                    output = queue.get_nowait() or await queue.get()
                finished = output.finished
                completion = output.outputs[0]
                starts = version_starts(engine, queue.request_id, completion, self._version)
                for chunk in chunks(completion, made, starts, self._name, self._ends):
                    made += len(chunk.token_ids)
                    yield chunk
        finally:
            del self._streams[queue.request_id]
            if not finished and self._gone is None:
                with contextlib.suppress(Exception):
                    await engine.abort(queue.request_id, internal=True)

    async def abort(self, request_id: str) -> None:
        if self._engine is not None and self._gone is None:
            # A broken engine has nothing to abort; generate() says that it is broken.
            with contextlib.suppress(Exception):
                await self._engine.abort(request_id)

    async def health(self) -> None:
        await prove_generating(self)

    async def weight_version(self) -> int:
        self._alive()
        return self._version

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """See `EngineWorker.update_weights`. The update must hold every tensor that the model's files have.

        Requests are held, not aborted; their KV is computed anew under the new weights. Until every worker
        has loaded them the old ones are kept beside them, and on any failure written back: twice the memory
        of the weights for that time (on the host, where the model is on an accelerator). A cancelled call
        waits until the update is through or undone."""
        update = asyncio.ensure_future(self._update(version, source))
        try:
            await asyncio.shield(update)
        except asyncio.CancelledError:
            await asyncio.wait({update})
            update.exception()  # looked at: the caller is not there to see it
            raise

    async def rpc(self, method: str, *args: Any, deadline_s: float) -> list[Any]:
        """Call a method of vLLM's worker class (or its extension) in every worker; their answers, by rank.

        Raises:
            WorkerHung: no answer in time.
            WorkerGone: the engine died.
            WorkerFault: the method raised."""
        engine = self._alive()
        call = asyncio.ensure_future(engine.collective_rpc(method, deadline_s, args))
        # vLLM leaves such calls unanswered when its engine dies.
        died = asyncio.ensure_future(self._died.wait())
        try:
            done, _ = await asyncio.wait(
                {call, died}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if call not in done:
                self._alive()
                raise WorkerHung(f"{method} gave no answer in {deadline_s:g} s", worker=self._name)
            with self._translated():
                return list(call.result())
        finally:
            call.cancel()
            died.cancel()

    async def kill(self) -> None:
        """End the engine's processes at once, whatever state they are in, and see them gone (a fence).

        Raises:
            WorkerHung: one is still there 10 s after its SIGKILL."""
        self._on_death(None, "killed")
        if not await self._kill_marked():
            raise WorkerHung("a process is still there 10 s after its SIGKILL", worker=self._name)

    async def close(self) -> None:
        self._closed = True
        if self._starting.locked():
            await self._kill_marked()  # or it would be awaited first
        async with self._starting:
            await self._end("closed")

    # Private from here on.

    async def _built(self) -> Any:
        building = asyncio.ensure_future(asyncio.to_thread(self._build))
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            # The thread cannot be interrupted, but what it waits for can be killed.
            self._closed = True
            while not building.done():
                await self._kill_marked()
                await asyncio.wait({building}, timeout=0.1)
            if building.exception() is None:
                self._engine = building.result()
            raise

    def _build(self) -> Any:
        self._scratch = Path(tempfile.mkdtemp(prefix="belayer-vllm-"))
        with engine_environment(self._mark, self._environment | self._in_scratch(self._scratch)):
            if self._closed:
                raise WorkerGone("closed before it started", worker=self._name)
            try:
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments()))
            except (ValueError, TypeError, OSError, ImportError) as error:
                raise SetupError(
                    f"vLLM refuses to start: {error}\nCheck the model {self._model!r} and engine_args"
                ) from error
            except Exception as error:
                raise WorkerGone(
                    f"vLLM did not start: {error}. Set VLLM_LOGGING_LEVEL=INFO to see why", worker=self._name
                ) from error

    def _in_scratch(self, scratch: Path) -> dict[str, str]:
        """Variables that put vLLM's sockets there, which it leaves behind, and have them go in any case."""
        leftovers = (self._environment.get(LEFTOVER), str(scratch))
        return {"VLLM_RPC_BASE_PATH": str(scratch), LEFTOVER: os.pathsep.join(filter(None, leftovers))}

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": self._model,
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": KV_BYTES,
            "disable_log_stats": True,
            "worker_extension_cls": EXTENSION,
        } | self._given
        # TokenChunk promises the raw model's logprobs.
        arguments["logprobs_mode"] = "raw_logprobs"
        if self._exact:
            arguments["logits_processors"] = [*(arguments.get("logits_processors") or ()), EXACT_PROCESSOR]
        return arguments

    def _params(self, request: EngineRequest) -> Any:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        if request.params.exact_resume and not self._exact:
            raise RequestRejected(f"{self._name} was started without exact_resume")
        vocabulary = self._alive().model_config.get_vocab_size()
        if not request.token_ids or not all(0 <= token < vocabulary for token in request.token_ids):
            # Without a tokenizer vLLM does not look, and its EngineCore dies of the lookup.
            raise RequestRejected(f"vLLM refuses the prompt: it needs token ids within 0..{vocabulary - 1}")
        try:
            arguments = sampling_arguments(request)
            return VllmSamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
        except (ValueError, TypeError, VLLMClientError) as error:
            raise RequestRejected(f"vLLM refuses the parameters: {error}") from error

    async def _update(self, version: int, source: WeightSource) -> None:
        async with self._updating:
            engine = self._alive()
            try:
                with contextlib.ExitStack() as stack:
                    directory = await asyncio.to_thread(stack.enter_context, staged(source))
                    if self._is_local:
                        await asyncio.to_thread(check_complete, Path(self._model), directory)
                    await self._swap(engine, version, directory)
            except (ValueError, OSError) as error:
                raise UpdateFailed(f"weights {version}: {error}", version=self._version) from error

    async def _swap(self, engine: Any, version: int, directory: Path) -> None:
        if engine.model_config.enforce_eager is False and _on_cpu(engine):
            raise ValueError("compiled CPU code holds the old packed weights; start with enforce_eager=True")
        with self._translated():
            # vLLM labels a step when it is done: the label may only change while nothing is under way.
            await engine.pause_generation(mode="keep", clear_cache=False)
        try:
            answers = await self.rpc("belayer_load", str(directory), deadline_s=RPC_DEADLINE_S)
            if failed := [answer for answer in answers if answer is not None]:
                raise ValueError(failed[0])
            with self._translated():
                await engine.update_weight_version(str(version))
                await engine.reset_prefix_cache(reset_running_requests=True)
            self._version = version
            await self.rpc("belayer_forget", deadline_s=RPC_DEADLINE_S)
        except BaseException:
            if self._version != version and self._gone is None:
                try:
                    await self.rpc("belayer_restore", deadline_s=RPC_DEADLINE_S)
                    with self._translated():
                        await engine.update_weight_version(str(self._version))
                except WorkerFault:
                    await self.kill()  # a mix of weights may be in force: better none
                    raise
            raise
        finally:
            if self._gone is None:
                with self._translated():
                    await engine.resume_generation()

    def _alive(self) -> Any:
        dead = self._watch.first_dead() if self._gone is None and self._watch is not None else None
        if dead is not None:
            self._on_death(dead)
        if self._gone is not None:
            raise WorkerGone(f"{self._name}: {self._gone}", worker=self._name)
        if self._engine is None:
            state = "is closed" if self._closed else "was not started"
            raise WorkerGone(f"{self._name} {state}", worker=self._name)
        return self._engine

    def _on_death(self, pid: int | None, why: str | None = None) -> None:
        if self._gone is None:
            role = "EngineCore" if pid in self._processes.cores else "a worker"
            self._gone = why or f"{role} (process {pid}) died"
            self._died.set()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for queue in self._streams.values():
            # vLLM's queues raise what is put into them. It does so itself, unless EngineCore hangs.
            queue.put(WorkerGone(f"{self._name}: {self._gone}", worker=self._name))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """vLLM's errors into ours, at this one place."""
        from vllm.exceptions import GracefulHTTPError, VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except WorkerFault:
            raise
        except EngineDeadError as error:
            self._on_death(None, "vLLM says that its EngineCore died")
            raise WorkerGone(f"{self._name}: {self._gone}", worker=self._name) from error
        except GracefulHTTPError as error:
            raise WorkerBusy(f"{self._name}: {error}", worker=self._name) from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RequestRejected(f"vLLM refuses the request: {error}") from error
        except Exception as error:
            self._alive()
            raise WorkerFault(f"{self._name}: vLLM failed: {error!r}", worker=self._name) from error

    async def _end(self, why: str) -> None:
        """Never raises. Kills: asked to end itself an idle engine took 4 to 10 s on a busy host, a stopped
        one would not at all, and none holds anything that would be lost."""
        engine, self._engine = self._engine, None
        self._on_death(None, why)
        if engine is not None and engine.output_handler is not None:
            engine.output_handler.cancel()  # or it logs the end that we make as an error
        await self._kill_marked()
        if engine is not None:
            with contextlib.suppress(Exception):
                # Its part in this process: sockets, tasks, a monitor thread.
                await asyncio.to_thread(engine.shutdown)
            # vLLM would shut it down once more when it is collected, which at the interpreter's end fails.
            engine.shutdown = lambda timeout=None: None
        for child in multiprocessing.active_children():
            if child.pid in self._processes.cores:
                await asyncio.to_thread(child.join, END_S)  # killed: this reaps it
        await asyncio.to_thread(self._clear_away)

    async def _kill_marked(self) -> bool:
        return await asyncio.to_thread(end_marked, self._mark, self._known, shared=self._shared_memory)

    def _clear_away(self) -> None:
        remove_shared_memory(self._shared_memory)
        for file in self._files:
            file.unlink(missing_ok=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _on_cpu(engine: Any) -> bool:
    return bool(engine.vllm_config.device_config.device_type == "cpu")
