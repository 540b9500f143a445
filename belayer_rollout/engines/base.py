"""The protocol of a worker: whatever turns token ids into more token ids, here or far away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from belayer_rollout.types import EngineRequest, ModelInfo, TokenChunk

__all__ = ["EngineWorker", "WeightSource"]

WeightSource = Mapping[str, Any] | Path
"""Tensors by their name in the checkpoint (torch.Tensor), or a directory of safetensors files."""


@runtime_checkable
class EngineWorker(Protocol):
    """One rollout worker. Its methods may be called by hundreds of tasks of one event loop at once.

    Deadlines are the caller's: a worker waits for its engine for as long as it is let, and notices what it
    can notice by itself (a dead process, a closed connection)."""

    @property
    def name(self) -> str:
        """Unique among the workers of a client; stands in segments, the journal and metrics."""
        ...

    @property
    def supports_exact_resume(self) -> bool:
        """Whether it honours ``SamplingParams.exact_resume``."""
        ...

    @property
    def recovers_itself(self) -> bool:
        """Whether a request may be sent to it again at once after a fault: it puts a successor into its own
        place (a shadow pair). The client then opens no circuit breaker for it."""
        ...

    async def start(self) -> None:
        """Make it ready to serve. Idempotent.

        Raises:
            WorkerFault, SetupError: it cannot."""
        ...

    async def model_info(self) -> ModelInfo:
        """What it serves.

        Raises:
            WorkerFault: it does not answer."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Stream the new tokens; the last chunk has a ``finish_reason``. Closing the iterator early aborts
        the request in the engine.

        Raises:
            WorkerGone, WorkerGarbled, WorkerBusy: typed by what happened.
            RequestRejected: the engine refuses the request as such."""
        ...

    async def abort(self, request_id: str) -> None:
        """End that attempt in the engine. No such one: nothing happens; never raises for a broken worker."""
        ...

    async def health(self) -> None:
        """Prove that it generates: a real completion of one token, not a ping.

        Raises:
            WorkerFault: it does not."""
        ...

    async def weight_version(self) -> int:
        """The policy version that its next token is drawn from.

        Raises:
            WorkerFault: it does not answer."""
        ...

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """Put other weights in force; running requests go on under them (their chunks say so).

        Raises:
            UpdateFailed: it did not come through; the version before it is in force.
            WorkerFault: the worker broke."""
        ...

    async def close(self) -> None:
        """End it and what it started. Idempotent, never raises."""
        ...
