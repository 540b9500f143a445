"""A load format of vLLM, ``belayer``: the model lives in the memory of an owner.

The first worker loads the model as vLLM does and publishes what came of it (fused, padded, quantised: vLLM's
own layout, by name). Whoever comes after builds the model on the meta device and puts views of the owner's
pages into it: no copy, no reading of files. Options in ``model_loader_extra_config``: ``owner``, the path of
the owner's socket; ``memory``, its kind (host or cuda:N); ``version``, that of the weights in the files;
``weights``, a directory with those files where they are not the model's own."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from belayer_rollout.engines.vllm.tensors import install_views, layout_of, tensor_at, write_tensors
from belayer_rollout.errors import SetupError
from belayer_rollout.memory.base import MemoryMapper
from belayer_rollout.memory.client import OwnerClient
from belayer_rollout.memory.digest import chunk_digests, root_digest
from belayer_rollout.memory.layout import Layout
from belayer_rollout.memory.memfd import HostMapper, bytes_at

__all__ = ["LOAD_FORMAT", "BelayerLoader", "OwnedWeights", "mapper_of", "plain_linears", "weights_of"]

LOAD_FORMAT = "belayer"


@dataclass(slots=True)
class OwnedWeights:
    """The owner's weights as one worker maps them: read-only, at an address that never changes."""

    owner: Path
    mapper: MemoryMapper
    address: int
    num_bytes: int
    device: torch.device
    version: int
    buffer: int
    layout: Layout

    def republish(self, owner: Path) -> int:
        """Give what is mapped here to another, empty owner, whose memory it is from then on.

        The pages of an owner that died live on in those who map them.

        Raises:
            OwnerGone, OwnerDamaged, UpdateFailed: it can't take it."""
        with OwnerClient(owner) as client:
            draft = client.begin(self.num_bytes)
            try:
                target = self.mapper.map(draft.handle, self.num_bytes, "write")
                try:
                    tensor_at(target, self.num_bytes, self.device).copy_(
                        tensor_at(self.address, self.num_bytes, self.device)
                    )
                finally:
                    self.mapper.unmap(target, self.num_bytes)
                client.commit(draft, self.version, self.layout)
            finally:
                os.close(draft.handle)
        self.owner, self.buffer = owner, -1
        return self.follow()

    def follow(self) -> int:
        """Map what is in force now, in place of what is mapped; returns its version.

        Raises:
            OwnerGone, OwnerDamaged: it can't be had."""
        with OwnerClient(self.owner) as client:
            attached = client.attach()
        try:
            self._check_size(attached.num_bytes)
            if attached.buffer != self.buffer:
                self.mapper.map(attached.handle, self.num_bytes, "read", at=self.address)
            self.version, self.buffer = attached.version, attached.buffer
        finally:
            os.close(attached.handle)
        return self.version

    @contextmanager
    def rewriting(self, version: int) -> Iterator[None]:
        """Within: the same addresses show a writable copy. After it: that copy is in force as ``version``.
        If the block raises, or the commit is refused, the weights of before are mapped again.

        Raises:
            UpdateFailed: another update is under way, or ``version`` is not a later one.
            OwnerGone, OwnerDamaged: the owner can't take it."""
        with OwnerClient(self.owner) as client:
            before = client.attach()
            draft_handle = -1
            try:
                draft = client.begin(self.num_bytes)
                draft_handle = draft.handle
                self._copy_in_force(before.handle, draft_handle)
                self.mapper.map(draft_handle, self.num_bytes, "write", at=self.address)
                try:
                    yield
                    root = self._root()
                finally:
                    # Writable mappings forbid the freeze; and if it fails, this is what is in force.
                    self.mapper.map(before.handle, self.num_bytes, "read", at=self.address)
                client.commit(draft, version, before.layout, root)
            finally:
                for handle in (before.handle, draft_handle):
                    if handle >= 0:
                        os.close(handle)
        self.follow()

    def _copy_in_force(self, source: int, target: int) -> None:
        """Everything first: tensors that an update does not bring (scales, caches) stay as they are."""
        addresses = [
            self.mapper.map(source, self.num_bytes, "read"),
            self.mapper.map(target, self.num_bytes, "write"),
        ]
        try:
            old, new = (tensor_at(address, self.num_bytes, self.device) for address in addresses)
            new.copy_(old)
        finally:
            for address in addresses:
                self.mapper.unmap(address, self.num_bytes)

    def _root(self) -> str | None:
        if self.device.type != "cpu":
            return None
        view = memoryview(bytes_at(self.address, self.num_bytes)).cast("B")
        return root_digest(chunk_digests(lambda start, stop: view[start:stop], self.num_bytes))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes != self.num_bytes:
            raise SetupError(f"the owner holds another model: {num_bytes} bytes, not {self.num_bytes}")


class BelayerLoader(BaseModelLoader):
    """vLLM's side of the owner. See the module's docstring."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options = dict(load_config.model_loader_extra_config or {})
        self._owner = Path(options.pop("owner"))
        self._memory = str(options.pop("memory", "host"))
        self._version = int(options.pop("version", 0))
        weights = options.pop("weights", None)
        if options:
            raise SetupError(f"unknown options of load format {LOAD_FORMAT}: {sorted(options)}")
        self._files = _Files(weights)

    def download_model(self, model_config: ModelConfig) -> None:
        self._files.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        with plain_linears():
            self._files.load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """As the checkpoint names them; vLLM's ``reload_weights`` asks for it."""
        yield from self._files.get_all_weights(model_config, model)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        if vllm_config.parallel_config.world_size > 1 or vllm_config.speculative_config is not None:
            raise SetupError("an owner serves one worker's model: no tensor parallelism, no draft model")
        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        mapper = mapper_of(self._memory)
        with plain_linears(), OwnerClient(self._owner) as client:
            model: nn.Module | None = None
            if client.health().version is None:
                model = self._files.load_model(vllm_config, model_config, prefix)
                _publish(client, model, mapper, device, self._version)
            attached = client.attach()
            try:
                address = mapper.map(attached.handle, attached.num_bytes, "copy")
                region = tensor_at(address, attached.num_bytes, device)
                if model is not None:
                    # The private copies go as the views come.
                    install_views(model, attached.layout, region)
                else:
                    model = _build(vllm_config, model_config, prefix, attached.layout, region, device)
                # What the build wrote (scales, set to what they are) was the process's own; now none may.
                mapper.map(attached.handle, attached.num_bytes, "read", at=address)
            finally:
                os.close(attached.handle)
        weights = OwnedWeights(
            self._owner,
            mapper,
            address,
            attached.num_bytes,
            device,
            attached.version,
            attached.buffer,
            attached.layout,
        )
        object.__setattr__(model, "_belayer_weights", weights)
        return model.eval()


class _Files(DefaultModelLoader):
    """vLLM's own loader; of the weights in ``directory``, if there is one, in place of the model's."""

    def __init__(self, directory: str | None) -> None:
        super().__init__(LoadConfig(load_format="auto"))
        self._directory = directory

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if self._directory is not None:
            model_config = copy.copy(model_config)
            model_config.model, model_config.revision = self._directory, None
        super().load_weights(model, model_config)


def weights_of(model: nn.Module) -> OwnedWeights:
    """The mapping behind a model that `BelayerLoader` made."""
    weights = getattr(model, "_belayer_weights", None)
    if not isinstance(weights, OwnedWeights):
        raise SetupError(f"this model was not loaded with load format {LOAD_FORMAT}")
    return weights


def mapper_of(memory: str) -> MemoryMapper:
    """The worker's side of that kind of memory ("host..." or "cuda:N")."""
    kind, _, device = memory.partition(":")
    if kind == "cuda":
        from belayer_rollout.memory.cuda import CudaMapper

        return CudaMapper(int(device or 0))
    return HostMapper()


@contextmanager
def plain_linears() -> Iterator[None]:
    """Within: linear layers on CPU compute from the weights themselves.

    vLLM packs them into copies private to the process (oneDNN, AMX), which an owner can't hold and an update
    would not reach. Costs about 1.7x in decoding speed on CPU; other devices pack nothing."""
    packed = layer_utils.dispatch_cpu_unquantized_gemm

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = packed


def _publish(
    client: OwnerClient, model: nn.Module, mapper: MemoryMapper, device: torch.device, version: int
) -> None:
    layout, tensors = layout_of(model)
    draft = client.begin(layout.num_bytes)
    try:
        address = mapper.map(draft.handle, layout.num_bytes, "write")
        try:
            write_tensors(layout, tensors, tensor_at(address, layout.num_bytes, device))
        finally:
            mapper.unmap(address, layout.num_bytes)
        client.commit(draft, version, layout)
    finally:
        os.close(draft.handle)


def _build(
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    prefix: str,
    layout: Layout,
    region: torch.Tensor,
    device: torch.device,
) -> nn.Module:
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        install_views(model, layout, region)
        # Only what is Python's, such as an attention layer's scales as floats: the tensors are done.
        with weights_already_processed():
            process_weights_after_loading(model, model_config, device)
    _reload_onto(model.modules(), device)
    return model


def _reload_onto(modules: Iterable[nn.Module], device: torch.device) -> None:
    # vLLM noted the default device at construction, and a later update would be built on meta.
    for module in modules:
        get_layerwise_info(module).restore_device = device


register_model_loader(LOAD_FORMAT)(BelayerLoader)
