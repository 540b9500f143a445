"""The seam of a kind of memory: host memory (memfd.py) or an accelerator's (cuda.py).

Two sides. The owner holds *regions*: it allocates, exports, freezes and reads them. A worker holds
*addresses*: it maps what a region's handle names, and later other memory at the same address, so that every
tensor, view and CUDA graph that points there stays valid. A handle is a file descriptor on both kinds."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

from belayer_rollout.memory.digest import Read

__all__ = ["Access", "MemoryMapper", "OwnerMemory", "Region"]

Access: TypeAlias = Literal["read", "write", "copy"]
"""How a worker maps a region: to read it, to write it for all, or to write pages that become its own
(copy-on-write, where the kind of memory has that; else as "write")."""


class Region(Protocol):
    """Memory that the owner holds. It lives until it is closed here *and* no worker maps it."""

    @property
    def num_bytes(self) -> int:
        """Of the memory itself; at least what was asked for."""
        ...

    def export(self, *, writable: bool) -> int:
        """A new handle for a worker; the caller closes it. One that is not writable can't be mapped so,
        where the kind of memory can tell."""
        ...

    def freeze(self) -> None:
        """No write from now on, where the kind of memory can enforce it.

        Raises:
            OwnerDamaged: somebody still maps it writable."""
        ...

    def reading(self) -> AbstractContextManager[Read]:
        """A way to read its bytes, for as long as the context lasts."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...


class OwnerMemory(Protocol):
    """Where an owner gets its regions from."""

    def allocate(self, label: str, num_bytes: int) -> Region:
        """A new region, of zeros on host memory.

        Raises:
            OwnerDamaged: there is no such memory left."""
        ...


class MemoryMapper(Protocol):
    """A worker's side. Addresses are integers; sizes are rounded up to ``granularity``."""

    @property
    def granularity(self) -> int: ...

    def map(self, handle: int, num_bytes: int, access: Access, *, at: int | None = None) -> int:
        """Map a handle and return the address. With ``at``, in one step in place of what is mapped there.
        The handle stays the caller's, who may close it at once.

        Raises:
            OSError: the system refuses."""
        ...

    def map_scratch(self, num_bytes: int, *, at: int | None = None) -> int:
        """Memory of this process alone, writable, that costs nothing until it is written to (or next to
        nothing). With ``at``, in place of what is mapped there."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Give up the memory and the address."""
        ...
