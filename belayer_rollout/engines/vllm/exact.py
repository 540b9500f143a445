"""Exact draws inside vLLM: a logits processor after which the greedy choice *is* the draw.

Loaded by vLLM, in its worker processes, from the qualified name in ``logits_processors`` (an in-process
engine or a server's option). It serves the V1 model runner. Requests that do not ask for it are left alone.

Returned logprobs stay the raw model's: vLLM takes those (``logprobs_mode="raw_logprobs"``) before
processors. ``min_tokens``, ``logit_bias`` and allowed or bad tokens are applied before it, as vLLM puts its
own processors first; penalties come after it and would distort the noise, so they are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from belayer_rollout.draws import Draw, perturb
from belayer_rollout.engines.vllm.params import draw_of

__all__ = ["ExactDraws"]


class ExactDraws(LogitsProcessor):
    """Adds to the logits the noise of each request's draw (see `belayer_rollout.draws`)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, tuple[Draw, list[int]]] = {}
        """By row of the batch: the request's first draw, and vLLM's own growing list of its tokens."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse, as the request's own fault, what cannot be drawn exactly.

        Raises:
            ValueError: a wrong argument, or one that does not go together with exact draws."""
        if draw_of(sampling_params.extra_args) is None:
            return
        if sampling_params.temperature != 0.0:
            raise ValueError("an exact draw needs temperature=0: its own is in belayer_temperature")
        if (
            sampling_params.repetition_penalty != 1.0
            or sampling_params.presence_penalty != 0.0
            or sampling_params.frequency_penalty != 0.0
        ):
            raise ValueError("penalties do not go together with exact draws")

    def is_argmax_invariant(self) -> bool:
        """No: the draw is the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they come into, move within and leave the batch."""
        process_dict_updates(self._requests, batch_update, _entry)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Score the tokens of the rows that asked for it; in place."""
        if self._requests:
            # A list's length counts placeholders too, which async scheduling puts where a token is under way.
            # A request that was preempted comes back with all its tokens, so that its count goes on.
            draws = [
                replace(first, position=first.position + len(tokens))
                for first, tokens in self._requests.values()
            ]
            rows = torch.tensor(list(self._requests), device=logits.device)
            logits[rows] = perturb(logits[rows], draws).to(logits.dtype)
        return logits


def _entry(params: SamplingParams, _: list[int] | None, tokens: list[int]) -> tuple[Draw, list[int]] | None:
    draw = draw_of(params.extra_args)
    return None if draw is None else (draw, tokens)
