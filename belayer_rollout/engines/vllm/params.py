"""Belayer's sampling parameters in vLLM's words, and the arguments of an exact draw. Pure: no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from belayer_rollout.draws import Draw
from belayer_rollout.types import MOST_SEED, EngineRequest

__all__ = ["EXACT_PROCESSOR", "draw_of", "exact_arguments", "sampling_arguments"]

EXACT_PROCESSOR = "belayer_rollout.engines.vllm.exact:ExactDraws"
"""What `--logits-processors` of a vLLM server must name, for it to honour exact_resume over HTTP."""

RANGES: dict[str, tuple[type, float, float]] = {
    "belayer_seed": (int, 0, MOST_SEED),
    "belayer_position": (int, 0, MOST_SEED),
    "belayer_temperature": (float, 0.0, float("inf")),
    "belayer_top_p": (float, 0.0, 1.0),
    "belayer_top_k": (int, 0, MOST_SEED),
    "belayer_min_p": (float, 0.0, 1.0),
}
"""Type, least and greatest value of each argument of a draw; numbers, as HTTP's vllm_xargs takes no more."""


def exact_arguments(request: EngineRequest) -> dict[str, int | float]:
    """The extra arguments that make `ExactDraws` draw this request's tokens (its seed is set)."""
    draw = Draw.of(request.params, request.position)
    return {name: getattr(draw, name.removeprefix("belayer_")) for name in RANGES}


def draw_of(extra_args: Mapping[str, Any] | None) -> Draw | None:
    """The draw of a request's first token; None if it does not ask for an exact one.

    Raises:
        ValueError: an argument is unknown, missing, of another type or out of range."""
    given = {name: value for name, value in (extra_args or {}).items() if name.startswith("belayer_")}
    if not given:
        return None
    if unknown := given.keys() - RANGES.keys():
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    if missing := {"belayer_seed", "belayer_position"} - given.keys():
        raise ValueError(f"an exact draw also needs {', '.join(sorted(missing))}")
    for name, value in given.items():
        kind, least, greatest = RANGES[name]
        # JSON writes 1.0 as 1; a bool is an int to Python and a mistake here.
        fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not (fits and least <= value <= greatest):
            raise ValueError(f"{name} must be {kind.__name__} within {least}..{greatest}, not {value!r}")
    return Draw(**{name.removeprefix("belayer_"): RANGES[name][0](value) for name, value in given.items()})


def sampling_arguments(request: EngineRequest) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams (its output_kind left out, which is vLLM's own type).

    ``logprobs=0`` asks for the chosen token's alone. With exact_resume the request runs greedily for vLLM:
    the draw is in the noise that `ExactDraws` adds, after filters of its own.

    Raises:
        ValueError: ``extra`` names what Belayer has a word for, or what would break the stream."""
    params = request.params
    arguments: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": 0,
        "detokenize": False,
    }
    extra = dict(params.extra)
    if params.exact_resume and params.temperature > 0.0:
        arguments["temperature"] = 0.0
        arguments["extra_args"] = dict(extra.pop("extra_args", None) or {}) | exact_arguments(request)
    else:
        arguments |= {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": params.seed,
        }
    if taken := sorted((arguments.keys() | FIXED) & extra.keys()):
        raise ValueError(f"extra must not set {', '.join(taken)}")
    return arguments | extra


FIXED = {"n", "stop", "output_kind", "seed", "temperature", "top_p", "top_k", "min_p", "prompt_logprobs"}
"""Not through ``extra``: more than one stream, text, and what SamplingParams has a field for."""
