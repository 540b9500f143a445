"""Host memory that outlives its users: memfds. Sizes in bytes.

A frozen region is sealed: the kernel then refuses every write, for good, to the owner as well. Weights that
are in force can't be changed by a stray pointer of any process; an update gets a region of its own."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from belayer_rollout.errors import OwnerDamaged
from belayer_rollout.memory.base import Access
from belayer_rollout.memory.digest import Read

__all__ = ["HostMapper", "HostMemory", "HostRegion", "bytes_at"]

# sys/mman.h; not in Python's mmap module before 3.13.
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class HostRegion:
    """A memfd of a fixed size."""

    def __init__(self, label: str, num_bytes: int, *, can_seal: bool = True) -> None:
        self._can_seal = can_seal
        flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_seal else 0)
        self._fd = os.memfd_create(f"belayer-{label}", flags)
        self.num_bytes = num_bytes
        try:
            os.ftruncate(self._fd, num_bytes)
            if can_seal:
                # A region that shrank would kill whoever maps it with SIGBUS.
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(self._fd)
            raise OwnerDamaged(f"no memory for {label} ({num_bytes} bytes): {error.strerror}") from error

    def export(self, *, writable: bool) -> int:
        # Opened anew: a duplicate would share this descriptor's write access.
        return os.open(f"/proc/self/fd/{self._fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def freeze(self) -> None:
        if not self._can_seal:
            return
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise OwnerDamaged("a process still maps the new weights for writing") from error

    @contextmanager
    def reading(self) -> Iterator[Read]:
        # Read-only access to the file too: older kernels refuse a shared mapping of a sealed, writable one.
        fd = self.export(writable=False)
        try:
            mapped = mmap.mmap(fd, self.num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with mapped, memoryview(mapped) as view:
            yield lambda start, stop: view[start:stop]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class HostMemory:
    """Regions in memfds. ``can_seal=False`` is for kernels that have no seals."""

    def __init__(self, *, can_seal: bool = True) -> None:
        self._can_seal = can_seal

    def allocate(self, label: str, num_bytes: int) -> HostRegion:
        return HostRegion(label, num_bytes, can_seal=self._can_seal)


class HostMapper:
    """Maps memfds by mmap; with ``at`` by MAP_FIXED, which replaces the old pages in one step."""

    granularity = mmap.PAGESIZE

    def map(self, handle: int, num_bytes: int, access: Access, *, at: int | None = None) -> int:
        protection = mmap.PROT_READ | (0 if access == "read" else mmap.PROT_WRITE)
        flags = mmap.MAP_PRIVATE if access == "copy" else mmap.MAP_SHARED
        return _mmap(at, num_bytes, protection, flags, handle)

    def map_scratch(self, num_bytes: int, *, at: int | None = None) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        return _mmap(at, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)

    def unmap(self, address: int, num_bytes: int) -> None:
        if _libc.munmap(address, num_bytes) != 0:
            raise _os_error("munmap", num_bytes)


def bytes_at(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """The bytes there as an object with the buffer protocol. It keeps nothing mapped."""
    return (ctypes.c_uint8 * num_bytes).from_address(address)


def _mmap(at: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    address = _libc.mmap(at, num_bytes, protection, flags | (MAP_FIXED if at is not None else 0), fd, 0)
    if address is None or address == _MAP_FAILED:
        raise _os_error("mmap", num_bytes)
    return int(address)


def _os_error(call: str, num_bytes: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call} of {num_bytes} bytes: {os.strerror(number)}")
