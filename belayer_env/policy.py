"""When to checkpoint. Pure: no clock, no I/O. Steps count from 1; seconds, and faults per second."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from belayer_env.errors import InvalidInput

__all__ = [
    "Adaptive",
    "CheckpointPolicy",
    "Decision",
    "EveryN",
    "EveryStep",
    "Moment",
    "Never",
    "parse_policy",
]

POLICY_FORMS = (
    '"never", "every-step", "every-N" with N >= 1 (as "every-5"), "adaptive" '
    '(or "adaptive:quantile=0.25,faults_per_s=1e-05,safety=1.5"), or an object with decide(moment)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The end of a step, as a policy sees it.

    ``step`` steps are done (0: just reset); ``last_checkpoint_step`` is how many of them the newest
    checkpoint contains (None: there is none); replaying the others would take ``at_risk_s``, and a fresh
    start, which is what remains without a checkpoint, ``setup_s``. ``is_unchanged``: whether the sandbox is
    what it was at the newest checkpoint (None: not known). The predictions are of the bubble that begins now,
    and of a checkpoint taken in it; ``faults_per_s`` is how often a sandbox is lost.

    Raises:
        InvalidInput: a time or rate that is negative or NaN."""

    step: int
    last_checkpoint_step: int | None
    at_risk_s: float = 0.0
    setup_s: float = 0.0
    is_unchanged: bool | None = None
    predicted_bubble_s: float = 0.0
    predicted_cost_s: float = 0.0
    faults_per_s: float = 0.0

    def __post_init__(self) -> None:
        times = (self.at_risk_s, self.setup_s, self.predicted_bubble_s, self.predicted_cost_s)
        if not all(value >= 0 for value in (*times, self.faults_per_s)):
            raise InvalidInput(f"times and rates are 0 or more: {self}")

    @property
    def num_at_risk(self) -> int:
        """Steps that no checkpoint contains."""
        return self.step - (self.last_checkpoint_step or 0)

    @property
    def exposed_s(self) -> float:
        """What a fault now would cost: the steps at risk, and without any checkpoint the fresh start too."""
        return self.at_risk_s + (self.setup_s if self.last_checkpoint_step is None else 0.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to checkpoint in this bubble, and why, in one sentence for telemetry.

    ``forced``: it may well outlast the bubble and hold up the next step, and is worth that."""

    checkpoint: bool
    reason: str
    forced: bool = False


@runtime_checkable
class CheckpointPolicy(Protocol):
    """Decides in each bubble whether a checkpoint earns its cost. Policies that weigh more than these facts
    get them as further fields of `Moment`, never as further parameters."""

    def decide(self, moment: Moment) -> Decision:
        """Whether to checkpoint now. Never raises."""


@dataclass(frozen=True, slots=True)
class Never:
    """No checkpoint but those the user asks for."""

    def decide(self, moment: Moment) -> Decision:
        """No."""
        return Decision(False, "the policy takes none by itself")

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

    def decide(self, moment: Moment) -> Decision:
        """Whether ``n`` steps have been done since the last checkpoint."""
        return Decision(moment.num_at_risk >= self.n, f"{moment.num_at_risk} of {self.n} steps at risk")

    def __str__(self) -> str:
        return f"every-{self.n}"


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Due after each step, and before the first: then no fault ever costs more than the step that it hit."""

    def decide(self, moment: Moment) -> Decision:
        """Whether the newest checkpoint lacks a step, or there is none."""
        if moment.last_checkpoint_step is None:
            return Decision(True, "there is no checkpoint yet")
        return Decision(moment.num_at_risk > 0, f"{moment.num_at_risk} steps at risk")

    def __str__(self) -> str:
        return "every-step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """In a bubble that hides its cost, or once the work at risk outweighs it; never for nothing.

    ``quantile``: of the bubbles expected, the one to count on (`BubblePredictor.predict`), so that about this
    share of the checkpoints outlasts its bubble. ``faults_per_s``: a known rate, used in place of the
    moment's. ``safety``: by what factor a bubble must exceed the predicted cost.

    Source: for the second case Young 1974 and Daly 2006: with faults at rate r and checkpoints of cost c the
    time lost is least when sqrt(2 c / r) of work lies between two.

    Raises:
        InvalidInput: a parameter out of its range."""

    quantile: float = 0.25
    faults_per_s: float | None = None
    safety: float = 1.5

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise InvalidInput(f"Adaptive.quantile lies between 0 and 1, not {self.quantile!r}")
        if self.faults_per_s is not None and not 0 <= self.faults_per_s < math.inf:
            raise InvalidInput(f"Adaptive.faults_per_s is finite and 0 or more, not {self.faults_per_s!r}")
        if not 1 <= self.safety < math.inf:
            raise InvalidInput(f"Adaptive.safety is finite and 1 or more, not {self.safety!r}")

    def decide(self, moment: Moment) -> Decision:
        """See the class."""
        has_checkpoint = moment.last_checkpoint_step is not None
        if moment.is_unchanged and has_checkpoint:
            return Decision(False, "nothing changed: the last one is moved up")
        if moment.num_at_risk == 0 and (has_checkpoint or moment.setup_s == 0):
            return Decision(False, "nothing at risk: the last one has every step")
        bubble, cost = moment.predicted_bubble_s, moment.predicted_cost_s
        if bubble >= self.safety * cost:
            return Decision(
                True, f"a bubble of {bubble:.3g} s hides a cost of {cost:.3g} s {self.safety:g} times over"
            )
        risk, interval = moment.exposed_s, self.interval_s(moment)
        if risk >= interval:
            return Decision(
                True,
                f"{risk:.3g} s at risk outweigh a cost of {cost:.3g} s (from {interval:.3g} s on)",
                forced=True,
            )
        return Decision(
            False,
            f"a bubble of {bubble:.3g} s does not hide a cost of {cost:.3g} s {self.safety:g} times over, "
            f"and {risk:.3g} s at risk are less than {interval:.3g} s",
        )

    def interval_s(self, moment: Moment) -> float:
        """The work at risk that forces a checkpoint; infinite where no faults are expected."""
        rate = moment.faults_per_s if self.faults_per_s is None else self.faults_per_s
        return math.sqrt(2 * moment.predicted_cost_s / rate) if rate > 0 else math.inf

    def __str__(self) -> str:
        fields = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]
        given = ",".join(f"{f.name}={float(value)!r}" for f, value in fields if value != f.default)
        return f"adaptive:{given}" if given else "adaptive"


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
    if policy == "adaptive":
        return Adaptive()
    if policy.startswith("adaptive:"):
        return _configured(policy)
    raise InvalidInput(f"policy must be {POLICY_FORMS}; not {policy!r}")


def _configured(policy: str) -> Adaptive:
    known = {field.name for field in dataclasses.fields(Adaptive)}
    given: dict[str, float] = {}
    for item in policy.removeprefix("adaptive:").split(","):
        match = re.fullmatch(r"([a-z_]+)=([0-9][0-9.]*(?:e[+-]?[0-9]+)?)", item, re.ASCII)
        if match is None or match[1] not in known or match[1] in given:
            raise InvalidInput(f"policy must be {POLICY_FORMS}; not {policy!r}")
        try:
            given[match[1]] = float(match[2])
        except ValueError as error:
            raise InvalidInput(f"policy must be {POLICY_FORMS}; not {policy!r}") from error
    return Adaptive(**given)
