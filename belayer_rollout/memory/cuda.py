"""Device memory that outlives its users: CUDA's virtual memory management through cuda-python. Bytes.

The owner creates physical memory and exports it as file descriptors, as memfd.py does on the host. A worker
imports it and maps it at an address that it has reserved; later other memory at the same address, so that
tensors and captured CUDA graphs stay valid. Not CUDA IPC: there the memory would die with the context that
exported it, and the address would be the driver's choice.

CUDA knows no seals, and no read-only mapping of device memory: weights are guarded by their digests alone.
Needs a GPU; nothing but the GPU tests imports this where there is none.

Source: CUDA driver API, "Virtual Memory Management"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from belayer_rollout.errors import OwnerDamaged, SetupError
from belayer_rollout.memory.base import Access
from belayer_rollout.memory.digest import Read

__all__ = ["CudaMapper", "CudaMemory", "CudaRegion"]


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        raise SetupError("CUDA memory needs cuda-python. Try: pip install cuda-python") from error
    return driver


class _Device:
    """One device, its primary context, and what its driver calls return."""

    def __init__(self, ordinal: int) -> None:
        self.driver = _driver()
        self.ordinal = ordinal
        self.call("cuInit", 0)
        self._device = self.call("cuDeviceGet", ordinal)
        self.context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self.granularity = int(
            self.call(
                "cuMemGetAllocationGranularity",
                self.properties(),
                self.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )

    def call(self, name: str, *args: Any) -> Any:
        """One driver call; its only result, or a tuple of them.

        Raises:
            OSError: with CUDA's name of the error."""
        error, *results = getattr(self.driver, name)(*args)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise OSError(f"{name}: {error.name}")
        return results[0] if len(results) == 1 else tuple(results)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within: this device's context is that of the thread."""
        self.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def properties(self) -> Any:
        """Of memory on this device that can be exported as a file descriptor."""
        driver = self.driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = (
            driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        return properties

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granularity) * self.granularity

    def allow_access(self, address: int, num_bytes: int) -> None:
        driver = self.driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call("cuMemSetAccess", address, num_bytes, [access], 1)


class CudaRegion:
    """Physical memory of a device, which the owner holds."""

    def __init__(self, device: _Device, label: str, num_bytes: int) -> None:
        self._device = device
        self.num_bytes = device.rounded(num_bytes)
        try:
            self._handle: Any = device.call("cuMemCreate", self.num_bytes, device.properties(), 0)
        except OSError as error:
            raise OwnerDamaged(f"no memory for {label} ({num_bytes} bytes): {error}") from error

    def export(self, *, writable: bool) -> int:
        # A handle of device memory carries no access rights: ``writable`` can't be enforced.
        kind = self._device.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._device.call("cuMemExportToShareableHandle", self._handle, kind, 0))

    def freeze(self) -> None:
        """Nothing to enforce it by."""

    @contextmanager
    def reading(self) -> Iterator[Read]:
        device = self._device

        def read(start: int, stop: int) -> bytearray:
            copy = bytearray(stop - start)
            device.call("cuMemcpyDtoH", copy, address + start, stop - start)
            return copy

        with device.current():
            address = int(device.call("cuMemAddressReserve", self.num_bytes, 0, 0, 0))
            try:
                device.call("cuMemMap", address, self.num_bytes, 0, self._handle, 0)
                try:
                    device.allow_access(address, self.num_bytes)
                    yield read
                finally:
                    device.call("cuMemUnmap", address, self.num_bytes)
            finally:
                device.call("cuMemAddressFree", address, self.num_bytes)

    def close(self) -> None:
        if self._handle is not None:
            self._device.call("cuMemRelease", self._handle)
            self._handle = None


class CudaMemory:
    """Regions of device ``ordinal``."""

    def __init__(self, ordinal: int) -> None:
        self._device = _Device(ordinal)

    def allocate(self, label: str, num_bytes: int) -> CudaRegion:
        return CudaRegion(self._device, label, num_bytes)


class CudaMapper:
    """A worker's side. Work on the device that reads the old mapping must be done before it is replaced."""

    def __init__(self, ordinal: int) -> None:
        self._device = _Device(ordinal)

    @property
    def granularity(self) -> int:
        return self._device.granularity

    def map(self, handle: int, num_bytes: int, access: Access, *, at: int | None = None) -> int:
        device = self._device
        size = device.rounded(num_bytes)
        kind = device.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        memory = device.call("cuMemImportFromShareableHandle", handle, kind)
        try:
            with device.current():
                address = self._vacant(size, at)
                device.call("cuMemMap", address, size, 0, memory, 0)
                device.allow_access(address, size)
        finally:
            # The mapping holds the memory from here on.
            device.call("cuMemRelease", memory)
        return address

    def map_scratch(self, num_bytes: int, *, at: int | None = None) -> int:
        device = self._device
        size = device.rounded(num_bytes)
        with device.current():
            address = self._vacant(size, at)
            # One granule of memory behind every granule of addresses: what is written there means nothing.
            memory = device.call("cuMemCreate", device.granularity, device.properties(), 0)
            try:
                for start in range(address, address + size, device.granularity):
                    device.call("cuMemMap", start, device.granularity, 0, memory, 0)
            finally:
                device.call("cuMemRelease", memory)
            device.allow_access(address, size)
        return address

    def unmap(self, address: int, num_bytes: int) -> None:
        device = self._device
        size = device.rounded(num_bytes)
        with device.current():
            device.call("cuCtxSynchronize")
            device.call("cuMemUnmap", address, size)
            device.call("cuMemAddressFree", address, size)

    def _vacant(self, size: int, at: int | None) -> int:
        if at is None:
            return int(self._device.call("cuMemAddressReserve", size, 0, 0, 0))
        self._device.call("cuCtxSynchronize")
        self._device.call("cuMemUnmap", at, size)
        return at
