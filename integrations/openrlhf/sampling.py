"""One turn of the model: what vLLM is asked for, and what it answered. Pure. Tokens; natural logs."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from belayer_env.errors import Fault

__all__ = ["Turn", "TurnAborted", "read_turn", "turn_params"]

_SEED_BITS = 31


class TurnAborted(Fault):
    """The engine gave a request up in mid-turn: its tokens are not what the model would have said."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that the model sampled, and the logprob of each (0.0 where none was asked for).

    ``is_cut``: it ran into its limit."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool


def turn_params(
    given: Any, *, room: int, max_turn_tokens: int | None, seed: int | None, draw: Sequence[int]
) -> Any:
    """A copy of vLLM's `SamplingParams` for one turn: siblings share the original.

    ``room``: what the context may still grow by. ``draw``: which turn this is. The turn's seed comes from
    both, where there is a ``seed``: all siblings would say the same in all their turns with just that."""
    params = copy.deepcopy(given)
    limits = (room, max_turn_tokens, given.max_tokens)
    params.max_tokens = min(limit for limit in limits if limit is not None)
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    if seed is not None:
        params.seed = random.Random(f"{seed}/{tuple(draw)}").getrandbits(_SEED_BITS)
    return params


def read_turn(output: Any, *, with_logprobs: bool) -> Turn:
    """What vLLM's `RequestOutput` says.

    Raises:
        TurnAborted: it is none, or not a whole one."""
    if output is None or not output.outputs or output.outputs[0].finish_reason not in ("stop", "length"):
        raise TurnAborted("the engine gave up a turn before its end")
    said = output.outputs[0]
    token_ids = list(said.token_ids)
    logprobs = [0.0] * len(token_ids)
    if with_logprobs:
        logprobs = [of[token].logprob for token, of in zip(token_ids, said.logprobs, strict=True)]
    return Turn(token_ids, logprobs, is_cut=said.finish_reason == "length")
