"""A model's tensors in the owner's memory: views by address, listing them, putting them into modules."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import nn

from belayer_rollout.errors import OwnerDamaged, SetupError
from belayer_rollout.memory.layout import Kind, Layout, Placed, TensorSpec, plan_layout
from belayer_rollout.memory.memfd import bytes_at

__all__ = ["install_views", "layout_of", "tensor_at", "write_tensors"]


class _DeviceBytes:
    """Bytes of an accelerator at an address, as the CUDA array interface says it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Those bytes as a flat uint8 tensor, without a copy. It keeps nothing mapped."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return torch.frombuffer(bytes_at(address, num_bytes), dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)


def layout_of(model: nn.Module) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Where each of the model's tensors will lie, and the tensors by name.

    Raises:
        SetupError: a tensor that can't be laid out flat."""
    found: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[int, str] = {}
    specs: list[TensorSpec] = []
    for name, tensor, kind in _named_tensors(model):
        if name in found or name in aliases:
            continue
        if id(tensor) in names:
            aliases[name] = names[id(tensor)]
            continue
        if not tensor.is_contiguous() and kind != "attribute":
            raise SetupError(f"{name} is not laid out densely: this model's weights can't be shared yet")
        names[id(tensor)] = name
        found[name] = tensor
        specs.append(TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind))
    try:
        return plan_layout(specs, aliases), found
    except ValueError as error:
        raise SetupError(f"this model's weights can't be shared: {error}") from error


def write_tensors(layout: Layout, tensors: dict[str, torch.Tensor], region: torch.Tensor) -> None:
    """Copy each tensor to its place in ``region`` (flat uint8)."""
    for name, place in layout.tensors.items():
        _view(region, place).copy_(tensors[name])


def install_views(model: nn.Module, layout: Layout, region: torch.Tensor) -> None:
    """Make every parameter and buffer of the model a view of ``region``.

    Works on a model on the meta device as well; class and attributes of a parameter (its weight loader)
    stay, so that vLLM can load into it later.

    Raises:
        OwnerDamaged: the layout is not that of this model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    installed: dict[str, torch.Tensor] = {}
    for name, place in layout.tensors.items():
        module, leaf = _owner_of(modules, name)
        view = _view(region, place)
        if place.kind == "param":
            view = _as_parameter(view, module._parameters.get(leaf), name)
        installed[name] = view
    aliases = ((name, installed[target]) for name, target in layout.aliases.items())
    for name, tensor in (*installed.items(), *aliases):
        module, leaf = _owner_of(modules, name)
        kind = layout.tensors[layout.aliases.get(name, name)].kind
        if kind == "attribute":
            # Small constants, and what vLLM derives from weights: each worker's own, as some are written to.
            if getattr(vars(module).get(leaf), "is_meta", False):
                setattr(module, leaf, tensor.clone())
            continue
        module._parameters.pop(leaf, None)
        module._buffers.pop(leaf, None)
        if kind == "param":
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor, persistent=kind == "buffer")
    left = [name for name, tensor, _ in _named_tensors(model) if tensor.is_meta]
    if left:
        raise OwnerDamaged(f"the owner's weights lack {', '.join(left[:8])}")


def _view(region: torch.Tensor, place: Placed) -> torch.Tensor:
    dtype = getattr(torch, place.dtype)
    flat = region[place.offset : place.offset + place.num_bytes].view(dtype)
    assert flat.numel() == prod(place.shape)
    return flat.view(place.shape)


def _as_parameter(view: torch.Tensor, old: torch.Tensor | None, name: str) -> torch.Tensor:
    if old is None:
        return nn.Parameter(view, requires_grad=False)
    if tuple(old.shape) != tuple(view.shape) or old.dtype != view.dtype:
        raise OwnerDamaged(
            f"{name} is {tuple(old.shape)} {old.dtype} here, {tuple(view.shape)} {view.dtype} there"
        )
    if not old.is_meta:
        # In place: the tensor object itself may be held elsewhere.
        old.data = view
        return old
    new = nn.Parameter(view, requires_grad=False)
    new.__class__ = old.__class__
    new.__dict__.update(old.__dict__)
    return new


def _owner_of(modules: dict[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return modules[path], leaf
    except KeyError as error:
        raise OwnerDamaged(f"this model has no place for the owner's {name}") from error


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor, Kind]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, "param"
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                transient = leaf in module._non_persistent_buffers_set
                yield f"{path}.{leaf}".lstrip("."), buffer, "transient" if transient else "buffer"
        for leaf, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{leaf}".lstrip("."), value, "attribute"
