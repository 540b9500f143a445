"""Where the drill is played: a Ray of its own, rollout actors as OpenRLHF makes them (on CPUs), and batches
by its own `SamplesGenerator`. Seconds, tokens."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from belayer_integrations.openrlhf.bench.faults import Fault
from belayer_integrations.openrlhf.bench.outcome import Outcome, Told
from belayer_integrations.openrlhf.bench.task import DIRECTORY, IMAGE, MAX_TURNS

from belayer_env.runtimes import open_sweeper
from belayer_env.store import Store
from belayer_rollout.models import ensure_model

__all__ = ["Stage"]

SEED = 11
MAX_LENGTH = 480
MIN_TURN_TOKENS = 24
END_OF_TURN = tuple(range(0, 256, 16))
"""Tokens that end a turn: the tiny model, whose parameters are random, has none that it ends on by itself."""

START_S = 300.0
SETTLE_S = 20.0
_POLL_S = 0.02


class Stage:
    """Made by `open`. One batch at a time."""

    def __init__(self, directory: Path, num_samples: int) -> None:
        self._directory = directory
        self._num_samples = num_samples
        self._num_runs = 0
        self._processes: dict[Any, list[psutil.Process]] = {}
        self._store = Store(directory / "store")
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(ensure_model("tiny"))

    @classmethod
    @contextlib.contextmanager
    def open(cls, directory: Path, image: str, num_samples: int) -> Iterator[Stage]:
        """With Ray; it ends with the stage. ``directory``: for stores, books and notes."""
        import ray

        environment = {
            DIRECTORY: str(directory),
            IMAGE: image,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 * 2**20,
            runtime_env={"env_vars": environment},
        )
        try:
            stage = cls(directory, num_samples)
            try:
                yield stage
            finally:
                stage._store.close()
        finally:
            ray.shutdown()

    def actor(self, kind: Any, agent: str) -> Any:
        """A rollout actor with an engine that answers. ``kind``: its Ray class; ``agent``: the agent file's
        name."""
        import ray

        made = kind.options(num_cpus=0, num_gpus=0).remote(
            model=str(ensure_model("tiny")),
            num_gpus=1,
            distributed_executor_backend="uni",
            agent_func_path=str(Path(__file__).parent / agent),
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_LENGTH + 32,
            max_num_seqs=16,
            kv_cache_memory_bytes=1 << 26,
            worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        )
        ray.get(made.get_num_unfinished_requests.remote(), timeout=START_S)
        self._processes[made] = _processes(made)
        return made

    def batch(self, actor: Any, fault: Fault, *, limit_s: float) -> Outcome:
        """One batch, in which the fault happens; cut off after ``limit_s``."""
        self._num_runs += 1
        run = self._directory / f"run-{self._num_runs}"
        run.mkdir()
        found: list[Any] = []
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                found.extend(self._generate(actor, fault, run))
            except BaseException as error:  # noqa: BLE001 - told in the outcome
                errors.append(error)

        done = threading.Event()
        killing = threading.Thread(target=self._strike, args=(actor, fault, run, done), daemon=True)
        # A daemon: it may wait for ever.
        generating = threading.Thread(target=generate, daemon=True)
        began = time.monotonic()
        killing.start()
        generating.start()
        generating.join(limit_s)
        wall_s = time.monotonic() - began
        was_cut = generating.is_alive()
        done.set()
        killing.join()
        if not was_cut:
            _wait_until(lambda: not self._store.homes(), SETTLE_S)
        return Outcome(
            samples={str(sample.prompts[0]): _told(sample) for sample in found},
            wall_s=wall_s,
            num_sampled=sum(map(int, _lines(run / "tokens"))),
            num_left=len(self._store.homes()),
            error=_text(errors[0]) if errors else "",
            was_cut=was_cut,
        )

    def end(self, actor: Any) -> None:
        """The actor, and all that it leaves: processes and containers."""
        import ray

        # An engine does not notice the death of its actor, and those of the first incarnation are known.
        left = [*self._processes.pop(actor), *_processes(actor)]
        ray.kill(actor)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, SETTLE_S)
        for home in self._store.homes():
            open_sweeper(home.runtime or "runc", self._store).sweep(home.path)

    def _generate(self, actor: Any, fault: Fault, run: Path) -> list[Any]:
        from openrlhf.trainer.ppo_utils import samples_generator as upstream
        from vllm import SamplingParams

        args = SimpleNamespace(
            rollout=SimpleNamespace(batch_size=self._num_samples, n_samples_per_prompt=1),
            vllm=SimpleNamespace(enable_sleep=False),
            algo=SimpleNamespace(
                dynamic_filtering_enable=False, advantage=SimpleNamespace(is_correction_level="token")
            ),
        )
        prompts = [f"Episode {number}: " for number in range(self._num_samples)]
        labels = [
            {"run": str(run), "number": number, "fault": fault.value} for number in range(self._num_samples)
        ]
        loader = [([""] * len(prompts), prompts, labels, [None] * len(prompts))]
        # OpenRLHF gives no seed, and without one no two runs could be compared.
        upstream.SamplingParams = functools.partial(
            SamplingParams, seed=SEED, stop_token_ids=list(END_OF_TURN)
        )
        try:
            generator = upstream.SamplesGenerator(
                SimpleNamespace(args=args), loader, [], self._tokenizer, [actor]
            )
            found, _, _, _ = generator.generate_samples(
                max_len=MAX_LENGTH, temperature=1.0, min_new_tokens=MIN_TURN_TOKENS
            )
        finally:
            upstream.SamplingParams = SamplingParams
        return list(found)

    def _strike(self, actor: Any, fault: Fault, run: Path, done: threading.Event) -> None:
        """The faults of processes, from outside, with a third of all steps begun."""
        if fault not in (Fault.ENGINE, Fault.ACTOR):
            return
        actor_process, *children = _processes(actor)
        engines = [child for child in children if _is_engine(child)]
        wanted = self._num_samples * MAX_TURNS // 3
        while not done.wait(_POLL_S):
            if len(_lines(run / "steps")) >= wanted:
                (actor_process if fault is Fault.ACTOR else engines[0]).kill()
                return


def _processes(actor: Any) -> list[psutil.Process]:
    """The actor's own first, and then those below it; none of a dead one."""
    import ray

    try:
        pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=5.0)
        head = psutil.Process(pid)
        return [head, *head.children(recursive=True)]
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, psutil.Error):
        return []


def _is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "EngineCore" in process.name()
    return False


def _told(sample: Any) -> Told:
    return Told(tuple(sample.sequences[0].tolist()), int(sample.action_mask.sum()))


def _text(error: BaseException) -> str:
    """Its first sentence. (Ray's own begin with a stack; some of vLLM's are given their text twice.)"""
    cause = getattr(error, "cause", None) or error
    text = str(cause) if len(cause.args) < 2 or not isinstance(cause.args[0], str) else cause.args[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0].split('. ')[0].rstrip('.') if lines else ''}"[:120]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < until:
        time.sleep(0.1)
