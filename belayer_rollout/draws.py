"""Random draws that depend on (seed, position, token id) alone: the same on any worker, in any batch.

Gumbel-max: the argmax of ``logits / temperature + noise`` with standard Gumbel noise is a draw from the
softmax. The noise is a hash of its coordinates and no generator with a state, so that a request which goes on
at another worker draws as it would have at the first one.

What can still differ: the *logits*. Another batch shape, kernel or device may change their last bits, and the
first token where two candidates are that close falls otherwise; from there on the texts are different ones.
The draws add no such ties of their own: integers wrap alike on CPU and CUDA, and of the two logarithms below
at most the last bit depends on the device.

Source: Gumbel-max: Maddison, Tarlow, Minka 2014 (A* sampling); noise by counter: Salmon et al. 2011 (Parallel
random numbers: as easy as 1, 2, 3); the hash: the finaliser of SplitMix64, Steele, Lea, Flood 2014."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from belayer_rollout.types import SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["Draw", "choose", "gumbel", "perturb"]

MASK_64 = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: what SplitMix64 adds from one number to the next."""
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw: how, and where in its request.

    ``position`` counts the generated tokens before this one, over all workers that took part."""

    seed: int
    position: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams, position: int) -> Draw:
        """The draw at ``position`` of a request with these parameters (whose seed is set)."""
        if params.seed is None:
            raise ValueError("a draw that can be repeated needs a seed")
        return cls(params.seed, position, params.temperature, params.top_p, params.top_k, params.min_p)


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Token ids, one per row of ``logits`` ([rows, vocabulary]); a temperature of 0 takes the greatest."""
    return perturb(logits, draws).argmax(dim=-1)


def perturb(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """New scores (float32) whose argmax per row is its draw; what a filter excludes is -inf.

    Filters apply in vLLM's order, after the temperature: min_p, top_k, top_p. As there, a token that ties
    with the last one of top_k stays in."""
    import torch

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    drawing = [row for row, draw in enumerate(draws) if draw.temperature > 0.0]
    scores = logits.to(torch.float32, copy=True)
    if drawing:
        chosen = [draws[row] for row in drawing]
        rows = torch.tensor(drawing, device=logits.device)
        scaled = scores[rows] / column([draw.temperature for draw in chosen])
        _filter(scaled, chosen, column)
        scores[rows] = scaled + gumbel(chosen, scores.shape[-1], scores.device)
    return scores


def gumbel(draws: Sequence[Draw], vocabulary: int, device: torch.device | str) -> torch.Tensor:
    """Standard Gumbel noise, [draws, vocabulary], float32: a function of seed, position and token id."""
    import torch

    keys = torch.tensor([[_key(draw)] for draw in draws], dtype=torch.int64, device=device)
    tokens = torch.arange(vocabulary, dtype=torch.int64, device=device)
    bits = _mix(keys + tokens * _signed(STEP))
    # 53 bits, never 0: below 1 float32 is finest near 0, so this gives the rare, great noise its resolution.
    uniform = ((bits >> 11) & (2**53 - 1)).to(torch.float32).add_(0.5).mul_(2.0**-53)
    # Rounding may reach 1, where the noise would be -inf and a row of one candidate without a greatest.
    exponential = torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24)).neg_()
    return exponential.log_().neg_()


def _filter(scaled: torch.Tensor, draws: Sequence[Draw], column: Any) -> None:
    """Set to -inf, in place, what the rows' min_p, top_k and top_p exclude."""
    import torch

    if any(draw.min_p > 0.0 for draw in draws):
        least = scaled.amax(dim=-1, keepdim=True) + column([draw.min_p for draw in draws]).log()
        scaled.masked_fill_(scaled < least, float("-inf"))
    sorting = [row for row, draw in enumerate(draws) if draw.top_k > 0 or draw.top_p < 1.0]
    if not sorting:
        return
    rows = torch.tensor(sorting, device=scaled.device)
    kept = scaled[rows]
    vocabulary = kept.shape[-1]
    # Stable: equal scores fall by token id, whatever else is in the batch.
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    last = column([min(draws[row].top_k or vocabulary, vocabulary) - 1 for row in sorting]).long()
    ordered.masked_fill_(ordered < ordered.gather(-1, last), float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = column([draws[row].top_p for row in sorting])
    # The first token stays at any top_p; at 1.0 rounding of the sum must exclude nobody.
    beyond = (before >= top_p) & (top_p < 1.0)
    beyond[:, 0] = False
    ordered.masked_fill_(beyond, float("-inf"))
    scaled[rows] = torch.empty_like(ordered).scatter_(-1, order, ordered)


def _key(draw: Draw) -> int:
    """Where in the hash's sequence this draw's tokens begin, as a signed 64-bit number."""
    return _signed(_mix_int((_mix_int(draw.seed + STEP) + draw.position * STEP) & MASK_64))


def _mix_int(value: int) -> int:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * MIX_1) & MASK_64
    value = ((value ^ (value >> 27)) * MIX_2) & MASK_64
    return value ^ (value >> 31)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """`_mix_int` on int64, whose multiplication wraps and whose shift drags the sign along."""
    values = (values ^ _shifted(values, 30)) * _signed(MIX_1)
    values = (values ^ _shifted(values, 27)) * _signed(MIX_2)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    return (values >> by) & (2 ** (64 - by) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
