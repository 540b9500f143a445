"""Whether the accelerator (or CPU) of this process may take over: what it reports, and a small kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from belayer_rollout.errors import DeviceUnfit

if TYPE_CHECKING:
    import torch

__all__ = ["check_device", "check_kernel", "check_reports"]

SIDE = 64
"""Of the kernel's matrices: large enough to use a whole multiprocessor, small enough for 0.1 ms."""


def check_device(device: torch.device) -> None:
    """Both checks.

    Raises:
        DeviceUnfit: with what is wrong."""
    check_reports(device)
    check_kernel(device)


def check_reports(device: torch.device) -> None:
    """What NVML says of uncorrected memory errors and pending row remaps. Nothing to ask on CPU, or where
    pynvml is not installed: the kernel has to do then.

    Raises:
        DeviceUnfit: uncorrected errors since the last reset, or a reset is due."""
    if device.type != "cuda":
        return
    try:
        import pynvml
    except ModuleNotFoundError:
        return
    import torch

    try:
        pynvml.nvmlInit()
        try:
            # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            _check_ecc(pynvml, handle)
            _check_remaps(pynvml, handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN: what an Xid leaves behind.
        raise DeviceUnfit(f"NVML can't ask {device}: {error}") from error


def _check_ecc(pynvml: object, handle: object) -> None:
    nvml = pynvml
    try:
        count = nvml.nvmlDeviceGetTotalEccErrors(  # type: ignore[attr-defined]
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,  # type: ignore[attr-defined]
            nvml.NVML_VOLATILE_ECC,  # type: ignore[attr-defined]
        )
    except nvml.NVMLError_NotSupported:  # type: ignore[attr-defined]
        return
    if count:
        raise DeviceUnfit(f"{count} uncorrected memory errors since the last reset")


def _check_remaps(pynvml: object, handle: object) -> None:
    nvml = pynvml
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)  # type: ignore[attr-defined]
    except nvml.NVMLError_NotSupported:  # type: ignore[attr-defined]
        return
    if pending or failed:
        raise DeviceUnfit(f"memory rows: {'a remap is pending' if pending else 'a remap failed'}")


def check_kernel(device: torch.device) -> None:
    """Multiply two small matrices whose product is known exactly.

    Raises:
        DeviceUnfit: it raised, or the product is another."""
    import torch

    try:
        rows = torch.arange(SIDE, dtype=torch.float32, device=device)
        left = rows.unsqueeze(1).expand(SIDE, SIDE).contiguous()
        right = torch.ones(SIDE, SIDE, dtype=torch.float32, device=device)
        # Integers below 2**24: exact in any order of addition, also in TF32 (10 bits of mantissa: < 64).
        right_answer = bool(((left @ right) == SIDE * left).all())
    except RuntimeError as error:
        raise DeviceUnfit(f"a small kernel failed on {device}: {error}") from error
    if not right_answer:
        raise DeviceUnfit(f"a small kernel computed nonsense on {device}")
