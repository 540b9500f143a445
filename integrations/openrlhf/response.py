"""What OpenRLHF's trainer takes for a sample. Pure. Tokens, seconds; natural logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Sample", "Tally", "action_ranges", "response"]

_FEWEST_TOKENS = 2
"""The trainer drops the first position of the masks, and wants one that is left."""


@dataclass(slots=True)
class Tally:
    """What an episode met, its retries included; the same numbers for every sample, as batches want it.

    ``steps``: commands that ran, those that were undone later included. ``resumptions``: how often it was
    gone on with after its actor had died."""

    steps: int = 0
    recoveries: int = 0
    recovery_s: float = 0.0
    rollbacks: int = 0
    tokens_cut: int = 0
    retries: int = 0
    resumptions: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data, for `take`."""
        return dataclasses.asdict(self)

    def take(self, told: Mapping[str, Any]) -> None:
        """Go on from what a dead process had counted."""
        for name, value in told.items():
            setattr(self, name, value)

    def logs(self, *, is_lost: bool) -> dict[str, float]:
        """For ``extra_logs``."""
        return {
            "container_failed": float(is_lost),
            "container_steps": float(self.steps),
            "container_recoveries": float(self.recoveries),
            "container_recovery_s": self.recovery_s,
            "container_rollbacks": float(self.rollbacks),
            "container_tokens_cut": float(self.tokens_cut),
            "container_retries": float(self.retries),
            "container_resumptions": float(self.resumptions),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished one: three lists, one entry a token. ``loss_mask`` is 1 on what the model sampled."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    is_truncated: bool
    error: str | None = None

    @classmethod
    def lost(cls, prompt_ids: Sequence[int], *, filler_id: int, reward: float, error: str) -> Sample:
        """One that is not to count: its prompt, and no action."""
        ids = [*prompt_ids, *[filler_id] * (_FEWEST_TOKENS - len(prompt_ids))]
        return cls(
            token_ids=ids,
            loss_mask=[0] * len(ids),
            logprobs=[0.0] * len(ids),
            reward=reward,
            is_truncated=False,  # or a length penalty would change its reward
            error=error,
        )


def action_ranges(loss_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of ones, as start and stop."""
    edges = [
        at for at, (was, now) in enumerate(zip([0, *loss_mask], [*loss_mask, 0], strict=True)) if was != now
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def response(sample: Sample, tally: Tally, *, prompt: str, label: Any, with_logprobs: bool) -> dict[str, Any]:
    """The dictionary that `execute` returns; besides upstream's keys ``error``, of a lost sample."""
    logs = tally.logs(is_lost=sample.error is not None)
    told = {} if sample.error is None else {"error": sample.error}
    return {
        "prompt": prompt,
        "label": label,
        "images": None,
        "mm_train_inputs": None,
        "reward": sample.reward,
        "scores": sample.reward,
        "observation_tokens": list(sample.token_ids),
        "action_ranges": action_ranges(sample.loss_mask),
        "rollout_log_probs": list(sample.logprobs) if with_logprobs else None,
        "truncated": sample.is_truncated,
        "extra_logs": logs,
    } | told
