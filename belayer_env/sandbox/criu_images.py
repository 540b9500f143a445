"""The two things that we change in what CRIU wrote. Pure: bytes in, bytes out.

A CRIU that dumps from inside the sandbox's own network namespace takes it for its own and leaves it out,
which saves two walks through the whole host's connection tracking table (10 ms each at 262,144 buckets, even
with `--empty-ns net`). But then a restore would put the processes into the namespace that CRIU itself is in.
So the inventory is made to say that CRIU was in another one; what a restore reads is then what it reads after
a dump from outside with an empty namespace.
Source: CRIU's images/inventory.proto, images/core.proto, and images.rst for the framing.

A periodic timer that runs out while the sandbox is frozen has no time left when CRIU reads it, and a restore
takes that for a timer that is off: it would never tick again. It gets the least time there is instead, and so
ticks at once.
Source: CRIU's images/timer.proto, images/timerfd.proto and images/fdinfo.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ImageUnknown", "as_dumped_from_outside", "with_timers_armed"]

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


def with_timers_armed(image: bytes) -> bytes:
    """The same image (of a task's core, or of the open files) with no periodic timer at rest.

    Raises:
        ImageUnknown: it is not laid out as expected."""
    changed = bytearray(image)
    common, magic = _MAGICS.unpack_from(image) if len(image) >= _MAGICS.size else (0, 0)
    if common != _COMMON_MAGIC or magic not in (_CORE_MAGIC, _FILES_MAGIC):
        raise ImageUnknown("neither a core image nor one of files")
    at = _MAGICS.size
    while at < len(image):
        if at + _SIZE.size > len(image):
            raise ImageUnknown("an image cut short")
        (size,) = _SIZE.unpack_from(image, at)
        start, at = at + _SIZE.size, at + _SIZE.size + size
        if at > len(image):
            raise ImageUnknown("an image cut short")
        timers = _timerfds(image, start, at) if magic == _FILES_MAGIC else _task_timers(image, start, at)
        for timer, interval, left in timers:
            values = {field.number: field for field in _fields(image, timer.start, timer.end)}
            if not {*interval, *left} <= values.keys():
                raise ImageUnknown("a timer without its times")
            is_on = any(_value(image, values[number]) for number in interval)
            if is_on and not any(_value(image, values[number]) for number in left):
                changed[values[left[-1]].start] = 1  # a zero is one byte, and so is a one
    return bytes(changed)


_COMMON_MAGIC, _CORE_MAGIC, _FILES_MAGIC = 0x54564319, 0x55053847, 0x56303138
_MAGICS, _SIZE = struct.Struct("<II"), struct.Struct("<I")
_Timer = tuple[_Field, tuple[int, int], tuple[int, int]]
"""A timer's message, and the numbers of its interval and of the time left: seconds, then fractions."""


def _timerfds(image: bytes, start: int, end: int) -> Iterator[_Timer]:
    for field in _fields(image, start, end):
        if field.number == 12:  # file_entry.tfd
            yield field, (9, 10), (7, 8)


def _task_timers(image: bytes, start: int, end: int) -> Iterator[_Timer]:
    for task in _fields(image, start, end):
        if task.number != 3:  # core_entry.tc
            continue
        for timers in _fields(image, task.start, task.end):
            if timers.number != 7:  # task_core_entry.timers
                continue
            for timer in _fields(image, timers.start, timers.end):
                # real, virt and prof are of setitimer(2); 4 of timer_create(2)
                yield (timer, (7, 8), (9, 10)) if timer.number == 4 else (timer, (1, 2), (3, 4))


def _value(data: bytes, field: _Field) -> int:
    return _varint(data, field.start, field.end)[0]


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
