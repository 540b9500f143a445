"""Weights on their way into an engine: checked, and written where its processes can read them."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from belayer_rollout.engines.base import WeightSource

__all__ = ["check_complete", "staged", "tensor_shapes"]

SHARED_MEMORY = Path("/dev/shm")


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor in a directory of safetensors files; reads their headers only.

    Raises:
        ValueError: there are none, or one is damaged."""
    shapes: dict[str, tuple[int, ...]] = {}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"no *.safetensors in {directory}")
    for path in paths:
        with path.open("rb") as file:
            try:
                # The format: length of the header (64 bits, little-endian), the header as JSON, the data.
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, path.stat().st_size)))
                header.pop("__metadata__", None)
                ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
                shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
            except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is no safetensors file") from error
        if path.stat().st_size != 8 + length + ends:
            raise ValueError(f"{path} is cut short: {path.stat().st_size} of {8 + length + ends} bytes")
    return shapes


def check_complete(model: Path, update: Path) -> None:
    """Say what an update lacks that the model's own files have. More tensors than those may be fine (a tied
    head), which the engine decides; fewer would leave a mix.

    Raises:
        ValueError: a tensor is missing, or its shape is another."""
    have, want = tensor_shapes(update), tensor_shapes(model)
    if missing := sorted(want.keys() - have.keys()):
        raise ValueError(f"{len(missing)} tensors are missing, among them {missing[0]}")
    for name, shape in want.items():
        if have[name] != shape:
            raise ValueError(f"{name} has shape {have[name]}, the model's is {shape}")


@contextmanager
def staged(source: WeightSource) -> Iterator[Path]:
    """A directory of safetensors files for this source: itself, or its tensors written to shared memory.

    Raises:
        ValueError, OSError: the tensors cannot be written."""
    if not isinstance(source, Mapping):
        yield Path(source)
        return
    size = sum(tensor.numel() * tensor.element_size() for tensor in source.values())
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size * 1.1
    with tempfile.TemporaryDirectory(prefix="belayer-weights-", dir=SHARED_MEMORY if roomy else None) as name:
        _write(source, Path(name) / "model.safetensors")
        yield Path(name)


def _write(tensors: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()  # safetensors refuses tied tensors and views
        seen.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    save_file(plain, path)
