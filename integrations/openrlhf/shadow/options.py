"""What a shadow pair is told, and from OpenRLHF's engine arguments to the pair's. Pure. Bytes, seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from belayer_env.errors import InvalidInput, SetupError

__all__ = ["PairArguments", "ShadowOptions", "ShadowUnavailable", "pair_arguments"]

UPSTREAM_EXTENSION = "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"
"""Its part, receiving weights, is done in the actor."""

PLAIN_FORMATS = ("auto", "hf", "safetensors")


class ShadowUnavailable(SetupError):
    """An option of OpenRLHF or vLLM that a shadow pair cannot honour; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowOptions:
    """See `agent_executor`.

    Raises:
        InvalidInput: a value that is not positive."""

    kv_cache_bytes: int | None = None
    """For KV, of each of the two engines. None: what the actor's engine arguments say, or 1 GiB on CPUs. On
    CUDA it has to be said, as OpenRLHF gives an engine a share of the device, and here two share it."""
    stall_s: float = 60.0
    """An engine with requests that gives no token for so long is replaced. Prefill gives none."""
    wait_s: float = 900.0
    """How long a request waits for an engine where none is left and another one is being built."""

    def __post_init__(self) -> None:
        for name in ("kv_cache_bytes", "stall_s", "wait_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"{name} must be positive, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairArguments:
    """For a `ShadowPair`, and for those who speak to its user."""

    model: str
    engine_args: Mapping[str, Any]
    seed: int
    has_processed_logprobs: bool
    """OpenRLHF wants logprobs of the distribution that is drawn from, after temperature and filters."""


def pair_arguments(
    model: str,
    changed: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    options: ShadowOptions,
    is_cuda: bool,
) -> PairArguments:
    """``changed``: those of vLLM's AsyncEngineArgs that are not at their defaults.

    Raises:
        ShadowUnavailable: one of them cannot be honoured."""
    left = dict(changed)
    why = next((why for is_wrong, why in _refusals(left, environment) if is_wrong), None)
    if why is not None:
        raise ShadowUnavailable(f"shadow=True does not go together with {why}")
    mode = left.pop("logprobs_mode", "raw_logprobs")
    for name in ("model", "load_format", "worker_extension_cls", "limit_mm_per_prompt"):
        left.pop(name, None)
    if options.kv_cache_bytes is not None:
        left["kv_cache_memory_bytes"] = options.kv_cache_bytes
    if is_cuda and left.get("kv_cache_memory_bytes") is None:
        raise ShadowUnavailable(
            "shadow=True needs to know how much of the device is for KV, as two engines share it: "
            "shadow=ShadowOptions(kv_cache_bytes=...) in place of --vllm.gpu_memory_utilization"
        )
    return PairArguments(
        model=model,
        engine_args=left,
        seed=left.get("seed") or 0,
        has_processed_logprobs=mode == "processed_logprobs",
    )


def _refusals(given: Mapping[str, Any], environment: Mapping[str, str]) -> list[tuple[bool, str]]:
    def is_many(name: str) -> bool:
        return int(given.get(name) or 1) > 1

    return [
        (
            is_many("tensor_parallel_size"),
            "--vllm.tensor_parallel_size above 1: both engines of a pair map one worker's weights",
        ),
        (
            is_many("pipeline_parallel_size")
            or is_many("data_parallel_size")
            or is_many("decode_context_parallel_size")
            or is_many("prefill_context_parallel_size"),
            "an engine of several workers (pipeline, data or context parallel)",
        ),
        (
            given.get("distributed_executor_backend") not in (None, "uni", "mp"),
            f"distributed_executor_backend={given.get('distributed_executor_backend')!r}: an engine's "
            "processes have to be on its actor's node",
        ),
        (
            bool(given.get("enable_sleep_mode")),
            "--vllm.enable_sleep (hybrid engines, --train.colocate_all): its weights outlive the engine, and "
            "so cannot make room for the trainer's",
        ),
        (
            any(given.get("limit_mm_per_prompt", {}).values()),
            "--data.max_images_per_prompt: the pair takes token ids only",
        ),
        (
            environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0",
            "--train.full_determinism_enable: its engine lives in the actor's own process, and dies with it",
        ),
        (
            bool(given.get("speculative_config") or given.get("spec_method") or given.get("spec_model")),
            "speculative decoding: the draft model's weights would not be shared",
        ),
        (bool(given.get("enable_lora")), "enable_lora: adapters are not shared"),
        (
            given.get("load_format", "auto") not in PLAIN_FORMATS
            or bool(given.get("model_loader_extra_config")),
            "a load_format of its own: the pair has one",
        ),
        (given.get("worker_cls", "auto") != "auto", "a worker_cls of its own: the pair has one"),
        (
            given.get("worker_extension_cls", "") not in ("", UPSTREAM_EXTENSION),
            "a worker_extension_cls of its own: calls into the worker would reach one engine of the two",
        ),
        (
            given.get("logprobs_mode", "raw_logprobs") not in ("raw_logprobs", "processed_logprobs"),
            f"logprobs_mode={given.get('logprobs_mode')!r}: those are no logprobs",
        ),
    ]
