"""What is left of a request, given the tokens so far. Pure: no clock, no I/O. Counts are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from belayer_rollout.types import EngineRequest, FinishReason, ModelInfo, SamplingParams

__all__ = ["Done", "continuation", "is_stop_token", "seed_at"]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to generate."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the end of sequence and for a length."""


def continuation(
    attempt_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    info: ModelInfo,
    tokens: Sequence[int],
) -> Done | EngineRequest:
    """What to send for the rest of a request that has given ``tokens``, or why nothing is to be sent.

    The last token may end it although no worker said so: a worker can die between a request's last token and
    the event that says that it was the last. The order is vLLM's: end of sequence, stop token, length.
    A prompt that leaves no room at all is sent as it is: the engine's own refusal says it best."""
    made = len(tokens)
    if made and made > params.min_tokens and (ended := is_stop_token(tokens[-1], params, info)):
        return ended
    left = params.max_tokens - made
    if info.max_model_len is not None:
        room = info.max_model_len - len(prompt) - made
        left = min(left, room) if room > 0 or made else left
    if left <= 0:
        return Done("length")
    rest = replace(
        params,
        max_tokens=left,
        min_tokens=min(max(0, params.min_tokens - made), left),
        seed=params.seed if params.exact_resume else seed_at(params.seed, made),
        stop=(),
    )
    return EngineRequest(attempt_id, [*prompt, *tokens], rest, position=made)


def is_stop_token(token: int, params: SamplingParams, info: ModelInfo) -> Done | None:
    """Whether a token beyond ``min_tokens`` ends a request, and as what.

    An end of sequence goes before a stop token of the same id, as in vLLM."""
    if token in info.eos_token_ids and not params.ignore_eos:
        return Done("stop")
    if token in params.stop_token_ids:
        return Done("stop", token)
    return None


def seed_at(seed: int | None, position: int) -> int | None:
    """The seed of an attempt that begins at ``position``.

    An engine seeded anew draws the same noise again. The rest of a text must not be drawn with the noise that
    its beginning was drawn with, so that each position has a seed of its own; the same one each time."""
    if seed is None or position == 0:
        return seed
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
