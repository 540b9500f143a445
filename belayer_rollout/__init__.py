"""A rollout client whose tokens outlive its workers: durable journal, failover, shadow workers.

Names are imported when they are asked for: the owner process of a pair needs none of them, and an engine that
is not installed is missed only by those who use it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from belayer_rollout.client import RolloutClient
    from belayer_rollout.engines.base import EngineWorker
    from belayer_rollout.engines.hf import HfWorker
    from belayer_rollout.engines.http import HttpWorker
    from belayer_rollout.engines.vllm import VllmWorker
    from belayer_rollout.journal import Journal
    from belayer_rollout.shadow import ShadowPair
    from belayer_rollout.types import Generation, ModelInfo, SamplingParams, Segment, TokenChunk

__all__ = [
    "EngineWorker",
    "Generation",
    "HfWorker",
    "HttpWorker",
    "Journal",
    "ModelInfo",
    "RolloutClient",
    "SamplingParams",
    "Segment",
    "ShadowPair",
    "TokenChunk",
    "VllmWorker",
]

_HOMES = {
    "EngineWorker": "engines.base",
    "Generation": "types",
    "HfWorker": "engines.hf",
    "HttpWorker": "engines.http",
    "Journal": "journal",
    "ModelInfo": "types",
    "RolloutClient": "client",
    "SamplingParams": "types",
    "Segment": "types",
    "ShadowPair": "shadow",
    "TokenChunk": "types",
    "VllmWorker": "engines.vllm",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
