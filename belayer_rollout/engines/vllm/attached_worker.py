"""vLLM workers on an owner's memory: scratch KV until they are activated, other weights at one call.

``AttachedCPUWorker`` and ``AttachedGPUWorker`` are named as vLLM's ``worker_cls``. What a pair asks of them
(by ``collective_rpc``) are the methods that begin with ``belayer_``; they answer in plain dicts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from belayer_rollout.engines.vllm.extension import end_with
from belayer_rollout.engines.vllm.loader import mapper_of, plain_linears, weights_of
from belayer_rollout.engines.vllm.tensors import tensor_at
from belayer_rollout.errors import RolloutError
from belayer_rollout.memory import device as device_check
from belayer_rollout.memory.client import OwnerClient
from belayer_rollout.memory.orphans import USER

__all__ = ["AttachedCPUWorker", "AttachedGPUWorker"]


class _Arena(TorchFunctionMode):
    """Within: the one flat int8 tensor of zeros that vLLM's KV cache is cut from lies in scratch memory."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self.mapper = mapper_of(memory)
        self.address = 0
        self.num_bytes = 0
        self.is_live = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8 or not isinstance(args[0], int):
            return func(*args, **kwargs)
        if self.address:
            raise RuntimeError("vLLM allocates more than one KV buffer: this version is not supported")
        self.num_bytes = -(-args[0] // self.mapper.granularity) * self.mapper.granularity
        self.address = self.mapper.map_scratch(self.num_bytes)
        device = torch.device(kwargs.get("device") or "cpu")
        return tensor_at(self.address, self.num_bytes, device)[: args[0]].view(torch.int8)

    def activate(self, owner: Path, epoch: int) -> None:
        """Put the owner's arena where scratch was. Every view of it stays valid."""
        with OwnerClient(owner) as client:
            handle = client.activate(epoch, self.num_bytes)
        try:
            self.mapper.map(handle, self.num_bytes, "write", at=self.address)
        finally:
            os.close(handle)
        self.is_live = True


class _Attached:
    """What both kinds of worker add to vLLM's."""

    vllm_config: Any
    model_runner: Any
    device: torch.device

    def init_device(self) -> None:
        # As early as a worker can: until its start has come through nobody asks it to.
        if user := os.environ.get(USER):
            end_with(int(user))
        super().init_device()  # type: ignore[misc]

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        # vLLM allocates the KV cache within this context, for sleep mode; the other tags stay its own.
        if tag == "kv_cache":
            return self._arena
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return context

    @property
    def _arena(self) -> _Arena:
        arena: _Arena | None = self.__dict__.get("_belayer_arena")
        if arena is None:
            options = self.vllm_config.load_config.model_loader_extra_config
            arena = self.__dict__["_belayer_arena"] = _Arena(options.get("memory", "host"))
        return arena

    def belayer_activate(self, epoch: int) -> dict[str, Any]:
        """Check the device, follow the weights in force, and map the live arena."""
        began = time.perf_counter()
        try:
            device_check.check_device(self.device)
            checked = time.perf_counter()
            weights = weights_of(self.model_runner.get_model())
            version = weights.follow()
            self._arena.activate(weights.owner, epoch)
        except (RolloutError, OSError) as error:
            return _refusal(error)
        return {
            "version": version,
            "check_s": checked - began,
            "map_s": time.perf_counter() - checked,
        }

    def belayer_follow(self) -> dict[str, Any]:
        """Map the weights in force."""
        try:
            return {"version": weights_of(self.model_runner.get_model()).follow()}
        except (RolloutError, OSError) as error:
            return _refusal(error)

    def belayer_fill(self, path: str, version: int) -> dict[str, Any]:
        """Load a checkpoint into the owner's other buffer and commit it. This worker then has it mapped."""
        model = self.model_runner.get_model()
        before = [(module, dict(vars(module)), _tensors_of(module)) for module in model.modules()]
        try:
            with weights_of(model).rewriting(version), plain_linears():
                self.model_runner.reload_weights(weights_iterator=_checkpoint(Path(path)))
        except Exception as error:  # noqa: BLE001  whatever it is, the weights of before are in force
            # A reload that broke off leaves modules on the meta device and its own book-keeping half-way.
            for module, attributes, tensors in before:
                vars(module).clear()
                vars(module).update(attributes)
                for held, was in zip(_held_by(module), tensors, strict=True):
                    held.clear()
                    held.update(was)
                get_layerwise_info(module).reset()
            return _refusal(error)
        return {"version": version}

    def belayer_republish(self, owner: str) -> dict[str, Any]:
        """Give the weights to another owner, in place of one that died."""
        try:
            return {"version": weights_of(self.model_runner.get_model()).republish(Path(owner))}
        except (RolloutError, OSError) as error:
            return _refusal(error)

    def belayer_state(self) -> dict[str, Any]:
        """Sizes and addresses, for tests and the status page. Bytes."""
        weights = weights_of(self.model_runner.get_model())
        return {
            "pid": os.getpid(),
            "version": weights.version,
            "weights_address": weights.address,
            "weights_bytes": weights.num_bytes,
            "arena_address": self._arena.address,
            "arena_bytes": self._arena.num_bytes,
            "is_live": self._arena.is_live,
        }


class AttachedCPUWorker(_Attached, CPUWorker):
    """On CPU."""


class AttachedGPUWorker(_Attached, Worker):
    """On a CUDA device, whose memory the owner holds by VMM."""


def _refusal(error: Exception) -> dict[str, Any]:
    return {"refused": f"{type(error).__name__}: {error}"}


def _held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(module._parameters), dict(module._buffers)


def _checkpoint(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(str(file) for file in path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {path}")
    yield from safetensors_weights_iterator(files, use_tqdm_on_load=False)
