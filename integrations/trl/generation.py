"""The model's turn: many contexts in, one turn for each out. Token ids; natural logs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from belayer_integrations.errors import TrainerUnavailable

__all__ = ["Generate", "Turn", "TurnRequest", "trainer_model"]


class Turn(NamedTuple):
    """Tokens that a model sampled, and the logprob of each."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class TurnRequest(NamedTuple):
    """``token_ids``: the context. ``max_tokens``: of the turn. ``sample``: which of the batch it is of.
    ``seed``: to draw this turn by; it does not depend on what became of other samples."""

    token_ids: Sequence[int]
    max_tokens: int
    sample: int
    seed: int


Generate = Callable[[Sequence[TurnRequest]], Sequence[Turn]]
"""A turn for each request, in their order. A turn ends with the token that ended it (an end of turn, say)."""


def trainer_model(trainer: Any) -> Generate:
    """Generation by the very model that a `trl.GRPOTrainer` trains, sampling as its config says.

    Each request is drawn by its own seed, so that what a sample says does not depend on which of its
    siblings are still there. The logprobs are those that the trainer computes: of the logits over the
    temperature, before filters such as top-p.

    Raises:
        TrainerUnavailable: torch, transformers or TRL is not installed."""
    try:
        import torch
        from transformers import LogitsProcessorList
        from transformers.generation import logits_process as warpers
        from trl.models import unwrap_model_for_generation
    except ImportError as error:
        raise TrainerUnavailable(
            f"{error.name or 'TRL'} cannot be imported ({error}): pip install 'belayer[trl]'"
        ) from error

    given = trainer.generation_config
    config = copy.deepcopy(given)
    # Chosen by the last processor below, which leaves one token a row.
    config.update(do_sample=False, temperature=1.0, top_p=1.0, top_k=50, min_p=None)
    temperature = given.temperature or 1.0
    shape: list[Any] = []
    if temperature != 1.0:
        shape.append(warpers.TemperatureLogitsWarper(temperature))
    if given.top_k:
        shape.append(warpers.TopKLogitsWarper(given.top_k))
    if given.top_p is not None and given.top_p < 1.0:
        shape.append(warpers.TopPLogitsWarper(given.top_p))
    if given.min_p:
        shape.append(warpers.MinPLogitsWarper(given.min_p))

    class Draw(warpers.LogitsProcessor):
        """One token a row, from the row's own stream; keeps the logprob of each."""

        def __init__(self, streams: Sequence[random.Random]) -> None:
            self.streams = streams
            self.logprobs: list[Any] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            own = torch.log_softmax(scores.float() / temperature, dim=-1)
            for warper in shape:
                scores = warper(input_ids, scores)
            mass = torch.softmax(scores.float(), dim=-1).cumsum(dim=-1)
            luck = torch.tensor([stream.random() for stream in self.streams], device=mass.device)
            threshold = luck.unsqueeze(1) * mass[:, -1:]
            chosen = torch.searchsorted(mass, threshold, right=True)
            self.logprobs.append(own.gather(1, chosen).squeeze(1))
            return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def generate(requests: Sequence[TurnRequest]) -> list[Turn]:
        # A stream a turn: rows that have ended draw on until the longest has.
        draw = Draw([random.Random(request.seed) for request in requests])
        width = max(len(request.token_ids) for request in requests)
        pad_id = given.pad_token_id
        ids = [[pad_id] * (width - len(request.token_ids)) + list(request.token_ids) for request in requests]
        seen = [[0] * (width - len(r.token_ids)) + [1] * len(r.token_ids) for r in requests]
        device = trainer.accelerator.device
        config.max_new_tokens = max(request.max_tokens for request in requests)
        model = trainer.model_wrapped
        was_training = model.training
        with (
            unwrap_model_for_generation(
                model,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as unwrapped,
            torch.no_grad(),
        ):
            unwrapped.eval()
            try:
                out = unwrapped.generate(
                    input_ids=torch.tensor(ids, device=device),
                    attention_mask=torch.tensor(seen, device=device),
                    generation_config=config,
                    logits_processor=LogitsProcessorList([draw]),
                )
            finally:
                unwrapped.train(was_training)
        rows = out[:, width:].tolist()
        logprobs = torch.stack(draw.logprobs, dim=1).tolist()
        ends = set(trainer.eos_token_ids)
        turns = []
        for request, row, row_logprobs in zip(requests, rows, logprobs, strict=True):
            length = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
            length = min(length, request.max_tokens)
            turns.append(Turn(row[:length], row_logprobs[:length]))
        return turns

    return generate
