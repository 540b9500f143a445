"""Where each tensor of a model lies in one flat buffer. Pure: no torch, no I/O. Sizes in bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from belayer_rollout.errors import OwnerDamaged

__all__ = ["ALIGNMENT", "DTYPE_BYTES", "Kind", "Layout", "Placed", "TensorSpec", "plan_layout"]

ALIGNMENT = 256
"""Bytes. What CUDA allocators promise, and a multiple of every cache line and vector register."""

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element, by torch's names."""

Kind = Literal["param", "buffer", "transient", "attribute"]
"""A parameter, a buffer of the state dict, a buffer that is in no state dict (a rotary cache), or a tensor
that a module keeps as a plain attribute."""


class TensorSpec(NamedTuple):
    """A tensor as its worker publishes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind = "param"


class Placed(NamedTuple):
    """A tensor and where it lies: ``num_bytes`` from ``offset`` on, dense, in C order."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    kind: Kind

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """Names to places, in order of offset, and the names that stand for another's tensor (tied heads)."""

    tensors: Mapping[str, Placed]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name -> the name in ``tensors`` that it shares."""

    @property
    def num_bytes(self) -> int:
        """Of the whole buffer, a multiple of ALIGNMENT."""
        ends = [place.offset + place.num_bytes for place in self.tensors.values()]
        return _round_up(max(ends, default=0))

    def to_json(self) -> bytes:
        """One line of JSON: what the owner keeps and hands to whoever attaches."""
        rows = [[name, *place] for name, place in self.tensors.items()]
        return json.dumps({"tensors": rows, "aliases": dict(self.aliases)}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Layout:
        """The inverse of `to_json`.

        Raises:
            OwnerDamaged: it is none, or its tensors overlap."""
        try:
            data = json.loads(text)
            tensors = {
                name: Placed(int(offset), tuple(map(int, shape)), dtype, kind)
                for name, offset, shape, dtype, kind in data["tensors"]
            }
            layout = cls(tensors, dict(data["aliases"]))
            layout._check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OwnerDamaged(f"the owner holds no readable layout: {error!r}") from error
        return layout

    def _check(self) -> None:
        end = 0
        for name, place in sorted(self.tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if place.offset < end or place.offset % ALIGNMENT or min(place.shape, default=0) < 0:
                raise ValueError(f"{name} lies wrong: {place}")
            end = place.offset + place.num_bytes
        for name, target in self.aliases.items():
            if name in self.tensors or target not in self.tensors:
                raise ValueError(f"alias {name} of {target}")


def plan_layout(specs: Iterable[TensorSpec], aliases: Mapping[str, str] | None = None) -> Layout:
    """Place tensors one after the other, each aligned. The same specs give the same layout.

    Raises:
        ValueError: a name twice, an unknown dtype, a negative size, an alias of nothing."""
    tensors: dict[str, Placed] = {}
    offset = 0
    for name, shape, dtype, kind in specs:
        if name in tensors:
            raise ValueError(f"two tensors are named {name}")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{name} has the unknown dtype {dtype}")
        tensors[name] = Placed(offset, tuple(shape), dtype, kind)
        offset = _round_up(offset + tensors[name].num_bytes)
    layout = Layout(tensors, dict(aliases or {}))
    layout._check()
    return layout


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
