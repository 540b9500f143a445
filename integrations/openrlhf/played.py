"""An episode that came to its end: what a sample is made of. Pure. Natural logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from belayer_integrations.trajectory import Trajectory

__all__ = ["Played"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Three lists, one entry a token, and one reward a step. ``loss_mask`` is 1 on what the model sampled."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    rewards: Sequence[float]
    is_truncated: bool

    @classmethod
    def of(cls, trajectory: Trajectory, *, is_cut: bool) -> Played:
        """``is_cut``: the model's last turn ran into its limit."""
        talk = trajectory.conversation
        return cls(
            token_ids=talk.token_ids,
            loss_mask=talk.loss_mask,
            logprobs=talk.logprobs,
            rewards=trajectory.rewards,
            is_truncated=is_cut or trajectory.end == "tokens",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Played:
        """The inverse of ``to_json``."""
        return cls(**data)
