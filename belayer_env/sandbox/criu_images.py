"""The one thing that we change in what CRIU wrote. Pure: bytes in, bytes out.

A CRIU that dumps from inside the sandbox's own network namespace takes it for its own and leaves it out,
which saves two walks through the whole host's connection tracking table (10 ms each at 262,144 buckets, even
with `--empty-ns net`). But then a restore would put the processes into the namespace that CRIU itself is in.
So the inventory is made to say that CRIU was in another one; what a restore reads is then what it reads after
a dump from outside with an empty namespace.
Source: CRIU's images/inventory.proto, images/core.proto, and images.rst for the framing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ImageUnknown", "as_dumped_from_outside"]

_HEADER = struct.Struct("<II")
"""The magic number, and the size of the one message that follows."""
_MAGIC = 0x58313116
"""INVENTORY_MAGIC."""

_ROOT_IDS = 3
"""inventory_entry.root_ids: what CRIU itself was in."""
_NET_NS_ID = 6
"""task_kobj_ids_entry.net_ns_id."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ImageUnknown(ValueError):
    """It is no inventory as we know it."""


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    kind: int
    start: int
    end: int


def as_dumped_from_outside(inventory: bytes) -> bytes:
    """The same inventory, saying that CRIU's network namespace was another than the tasks'.

    Raises:
        ImageUnknown: it is not laid out as expected. Do without, then."""
    if len(inventory) < _HEADER.size:
        raise ImageUnknown("the inventory is too short")
    magic, size = _HEADER.unpack_from(inventory)
    if magic != _MAGIC or _HEADER.size + size != len(inventory):
        raise ImageUnknown("the inventory has another header")
    root_ids = _only(inventory, _HEADER.size, len(inventory), _ROOT_IDS, _BYTES)
    net_ns = _only(inventory, root_ids.start, root_ids.end, _NET_NS_ID, _VARINT)
    changed = bytearray(inventory)
    # Ids only have to be equal or not. The lowest bit: the number keeps its length.
    changed[net_ns.start] ^= 1
    return bytes(changed)


def _only(data: bytes, start: int, end: int, number: int, kind: int) -> _Field:
    found = [field for field in _fields(data, start, end) if field.number == number]
    if len(found) != 1 or found[0].kind != kind:
        raise ImageUnknown(f"the inventory has no single field {number}")
    return found[0]


def _fields(data: bytes, start: int, end: int) -> Iterator[_Field]:
    """The fields of one protobuf message; a length-delimited one without its length."""
    at = start
    while at < end:
        key, at = _varint(data, at, end)
        kind, begin = key & 7, at
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind == _BYTES:
            length, begin = _varint(data, at, end)
            at = begin + length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ImageUnknown(f"a field of kind {kind}")
        if at > end:
            raise ImageUnknown("a field beyond the end")
        yield _Field(key >> 3, kind, begin, at)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ImageUnknown("a number without an end")
