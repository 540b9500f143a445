"""Draws by (seed, position): the right distribution, the right filters, and nothing else in them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from belayer_rollout.draws import Draw, choose, gumbel, perturb
from belayer_rollout.types import SamplingParams

# The DeprecationWarning is torch's own, when vLLM imports its quantised layers.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

torch = pytest.importorskip("torch")

VOCABULARY = 97


def rows(count: int, spread: float = 3.0) -> Any:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(1)) * spread


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_those_of_the_softmax(vary: str, temperature: float) -> None:
    logits = rows(1, spread=2.0)[:, :16]
    expected = (logits[0] / temperature).softmax(-1) * 40_000
    draws = [Draw(seed=5, position=9, temperature=temperature)] * 40_000
    draws = [replace(draw, **{vary: i}) for i, draw in enumerate(draws)]
    counts = torch.bincount(choose(logits.expand(len(draws), -1), draws), minlength=16)
    enough = expected >= 5  # the rule of thumb of the chi-square test
    chi_square = ((counts - expected) ** 2 / expected)[enough].sum().item()
    # 1 in 10,000 by chance at 15 degrees of freedom; the draws are fixed, so it passes always or never.
    assert chi_square < 44.3


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    # One in about 5,200: the far tail of the noise.
    logits = torch.zeros(1, 2)
    logits[0, 1] = -math.log(5_200)
    draws = [Draw(seed=i, position=0) for i in range(2_000_000)]
    rare = choose(logits.expand(len(draws), -1), draws).sum().item()
    assert abs(rare - 2_000_000 / 5_201) < 4 * math.sqrt(2_000_000 / 5_201)


def test_noise_is_standard_gumbel_and_finite() -> None:
    noise = gumbel([Draw(seed=i, position=i % 7) for i in range(2_000)], 1_000, "cpu").double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    assert noise.max() > 13.0


def test_noise_of_neighbouring_seeds_and_positions_is_unrelated() -> None:
    draws = [Draw(seed, position) for seed in (0, 1, 2**62) for position in (0, 1, 2)]
    related = torch.corrcoef(gumbel(draws, 20_000, "cpu").double()) - torch.eye(9)
    assert related.abs().max() < 0.03


def test_noise_is_pinned_for_ever() -> None:
    # A journal may be resumed by a later release: other noise would silently be another text.
    noise = gumbel([Draw(seed=7, position=3), Draw(seed=2**63 - 1, position=10**6)], 3, "cpu")
    assert noise.tolist() == [pytest.approx(row, rel=1e-6) for row in PINNED]


PINNED = [
    [-0.29178106784820557, 0.6017289161682129, 0.4549628496170044],
    [0.7241663932800293, 1.1487833261489868, 0.14241757988929749],
]


def test_draw_does_not_depend_on_its_batch() -> None:
    logits = rows(12)
    draws = [Draw(i, 3 * i, 0.5 + i / 8, *FILTERS[i % len(FILTERS)]) for i in range(12)]
    together = choose(logits, draws)
    alone = torch.cat([choose(logits[i : i + 1], [draws[i]]) for i in range(12)])
    backwards = choose(logits.flip(0), draws[::-1]).flip(0)
    assert torch.equal(together, alone)
    assert torch.equal(together, backwards)


FILTERS = [(1.0, 0, 0.0), (0.9, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.1), (0.8, 10, 0.05)]


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [*FILTERS, (1e-6, 0, 0), (1.0, 1, 0), (1.0, 0, 1)])
def test_filters_leave_what_a_plain_reference_leaves(top_p: float, top_k: int, min_p: float) -> None:
    logits = rows(20)
    draws = [Draw(1, i, 1.3, top_p, top_k, min_p) for i in range(20)]
    left = perturb(logits, draws).isfinite()
    for row in range(20):
        assert set(left[row].nonzero().flatten().tolist()) == plain(logits[row], 1.3, top_p, top_k, min_p)


def plain(logits: Any, temperature: float, top_p: float, top_k: int, min_p: float) -> set[int]:
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(logits.tolist())}
    greatest = max(weights.values())
    weights = {token: weight for token, weight in weights.items() if weight >= min_p * greatest}
    ranked = sorted(weights, key=lambda token: -weights[token])
    ranked = ranked[: top_k or None]
    total, before = sum(weights[token] for token in ranked), 0.0
    kept: set[int] = set()
    for token in ranked:
        if not kept or before < top_p * total:
            kept.add(token)
        before += weights[token]
    return kept


def test_filters_are_vllms() -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = rows(50)
    draws = [Draw(1, i, 1.0, 0.6 + i / 200, 3 + i) for i in range(50)]
    theirs = apply_top_k_top_p_pytorch(
        logits.clone(), torch.tensor([d.top_k for d in draws]), torch.tensor([d.top_p for d in draws])
    )
    assert torch.equal(perturb(logits, draws).isfinite(), theirs.isfinite())


def test_temperature_zero_is_greedy_beside_rows_that_draw() -> None:
    logits = rows(4)
    before = logits.clone()
    draws = [Draw(1, 1, 0.0, 0.1, 2, 0.9), Draw(1, 1), Draw(1, 1, 0.0), Draw(1, 2)]
    chosen = choose(logits, draws)
    assert chosen[0] == logits[0].argmax()
    assert chosen[2] == logits[2].argmax()
    assert torch.equal(logits, before)


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((500, VOCABULARY), float("-inf"))
    logits[:, 42] = -3.0
    for filters in FILTERS:
        assert set(choose(logits, [Draw(i, i, 1.0, *filters) for i in range(500)]).tolist()) == {42}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_any_dtype_of_logits_is_taken(dtype: str) -> None:
    logits = rows(3).to(getattr(torch, dtype))
    draws = [Draw(i, i) for i in range(3)]
    assert torch.equal(choose(logits, draws), choose(logits.float(), draws))


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
def test_cuda_draws_as_the_cpu_does() -> None:
    logits = rows(500)
    draws = [Draw(i, i, 1.0, *FILTERS[i % len(FILTERS)]) for i in range(500)]
    assert torch.equal(choose(logits.cuda(), draws).cpu(), choose(logits, draws))


def test_draw_is_made_of_parameters_with_a_seed() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=3)
    assert Draw.of(params, 8) == Draw(3, 8, 0.5, 0.9, 4, 0.1)
    with pytest.raises(ValueError, match="seed"):
        Draw.of(replace(params, seed=None), 8)
