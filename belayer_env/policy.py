"""When to checkpoint. Pure: no clock, no I/O. Steps count from 1; seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from belayer_env.errors import InvalidInput

__all__ = ["CheckpointPolicy", "EveryN", "EveryStep", "Moment", "Never", "parse_policy"]

POLICY_FORMS = '"never", "every-step", "every-N" with N >= 1 (as "every-5"), or an object with is_due(moment)'


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The end of a step, as a policy sees it.

    ``step`` steps are done (0: just reset); ``last_checkpoint_step`` is how many of them the newest
    checkpoint contains (None: there is none); replaying the others would take ``at_risk_s``."""

    step: int
    last_checkpoint_step: int | None
    at_risk_s: float = 0.0

    @property
    def num_at_risk(self) -> int:
        """Steps that no checkpoint contains."""
        return self.step - (self.last_checkpoint_step or 0)


@runtime_checkable
class CheckpointPolicy(Protocol):
    """Decides in each bubble whether a checkpoint earns its cost. Policies that weigh more than these facts
    get them as further fields of `Moment`, never as further parameters."""

    def is_due(self, moment: Moment) -> bool:
        """Whether to checkpoint now. Never raises."""


@dataclass(frozen=True, slots=True)
class Never:
    """No checkpoint but those the user asks for."""

    def is_due(self, moment: Moment) -> bool:
        """False."""
        return False

    def __str__(self) -> str:
        return "never"


@dataclass(frozen=True, slots=True)
class EveryN:
    """Due once ``n`` steps are at risk.

    Raises:
        InvalidInput: n is below 1."""

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise InvalidInput(f"EveryN counts steps, 1 or more, not {self.n!r}")

    def is_due(self, moment: Moment) -> bool:
        """Whether ``n`` steps have been done since the last checkpoint."""
        return moment.num_at_risk >= self.n

    def __str__(self) -> str:
        return f"every-{self.n}"


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Due after each step, and before the first: then no fault ever costs more than the step that it hit."""

    def is_due(self, moment: Moment) -> bool:
        """Whether the newest checkpoint lacks a step, or there is none."""
        return moment.last_checkpoint_step is None or moment.num_at_risk > 0

    def __str__(self) -> str:
        return "every-step"


def parse_policy(policy: str | CheckpointPolicy) -> CheckpointPolicy:
    """The policy that a name or an object stands for; ``str()`` of ours is the inverse.

    Raises:
        InvalidInput: it is none of the right forms, which the message lists."""
    if not isinstance(policy, str):
        # A class would pass the check for the method, and fail only at the first call.
        if isinstance(policy, type) or not isinstance(policy, CheckpointPolicy):
            raise InvalidInput(f"policy must be {POLICY_FORMS}; not {policy!r}")
        return policy
    if policy == "never":
        return Never()
    if policy == "every-step":
        return EveryStep()
    if match := re.fullmatch(r"every-([1-9][0-9]{0,8})", policy, re.ASCII):
        return EveryN(int(match[1]))
    hint = " (this version has no adaptive policy yet)" if policy == "adaptive" else ""
    raise InvalidInput(f"policy must be {POLICY_FORMS}; not {policy!r}{hint}")
