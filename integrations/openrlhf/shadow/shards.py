"""Tensors that come one by one, gathered as a directory of safetensors in memory that ends with its process.

The files are memfds, which other processes open through /proc: they need no room in /dev/shm, and whatever
kills this process leaves none of them behind. Bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Shards"]

SHARD_BYTES = 1 << 28
"""Gathered before they are written: so much is there three times for a moment."""


class Shards:
    """One set of weights. Not for several threads at once. `close` is owed, once nobody reads it any more."""

    def __init__(self, directory: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """``directory``: is made; it holds links only."""
        directory.mkdir()
        self.directory = directory
        self.names: set[str] = set()
        self._shard_bytes = shard_bytes
        self._gathered: dict[str, torch.Tensor] = {}
        self._gathered_bytes = 0
        self._files: list[int] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One more; a tensor on the CPU, contiguous, and nobody's from now on.

        Raises:
            OSError: there is no memory for it."""
        self.names.add(name)
        self._gathered[name] = tensor
        self._gathered_bytes += tensor.numel() * tensor.element_size()
        if self._gathered_bytes >= self._shard_bytes:
            self._write()

    def finish(self) -> Path:
        """The directory, now that all are there."""
        if self._gathered:
            self._write()
        return self.directory

    def close(self) -> None:
        """Give the memory back. Idempotent, never raises."""
        self._gathered.clear()
        for file in self._files:
            os.close(file)
        self._files.clear()
        for link in self.directory.glob("*.safetensors"):
            link.unlink(missing_ok=True)
        if self.directory.is_dir():
            self.directory.rmdir()

    def _write(self) -> None:
        from safetensors.torch import save

        file = os.memfd_create(f"belayer-update-{len(self._files)}")
        self._files.append(file)
        path = Path(f"/proc/{os.getpid()}/fd/{file}")
        with os.fdopen(file, "wb", closefd=False) as stream:
            stream.write(save(self._gathered))
        (self.directory / f"model-{len(self._files):05}.safetensors").symlink_to(path)
        self._gathered, self._gathered_bytes = {}, 0
