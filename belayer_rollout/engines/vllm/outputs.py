"""vLLM's outputs as token chunks, each with its logprobs and the version of the weights that drew it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from belayer_rollout.engines.vllm.stamps import pieces
from belayer_rollout.errors import WorkerFault, WorkerGarbled
from belayer_rollout.types import FinishReason, TokenChunk

__all__ = ["chunks", "end_tokens", "version_starts"]


def chunks(
    completion: Any, made: int, starts: Sequence[tuple[int, int]], worker: str, ends: tuple[int, ...]
) -> Iterator[TokenChunk]:
    """The new tokens of vLLM's CompletionOutput, of which ``made`` came before; one chunk per version.

    ``starts``: see `pieces`. ``ends``: the tokens that end a sequence.

    Raises:
        WorkerGarbled: fewer logprobs than tokens, or tokens of no version.
        WorkerFault: vLLM gave the request up."""
    tokens: Sequence[int] = completion.token_ids
    entries = completion.logprobs or ()
    if len(entries) != len(tokens):
        raise WorkerGarbled(f"{len(tokens)} tokens with {len(entries)} logprobs", worker=worker)
    logprobs = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
    finish: FinishReason | None = completion.finish_reason
    if finish is not None and finish not in get_args(FinishReason):
        raise WorkerFault(f"vLLM ended the request: {finish}", worker=worker)
    # Without a tokenizer vLLM knows the end of sequence only as one more stop token.
    reason = None if completion.stop_reason in ends else completion.stop_reason
    cuts = pieces(made, made + len(tokens), starts)
    if sum(stop - start for _, start, stop in cuts) != len(tokens):
        raise WorkerGarbled(f"tokens {made}:{made + len(tokens)} of no version: {starts}", worker=worker)
    if not cuts and finish is not None:
        cuts = [(starts[-1][0], made, made)]
    for i, (version, start, stop) in enumerate(cuts):
        span = slice(start - made, stop - made)
        last = i == len(cuts) - 1
        yield TokenChunk(
            tuple(tokens[span]),
            tuple(logprobs[span]),
            worker,
            version,
            finish if last else None,
            reason if last else None,
        )


def version_starts(engine: Any, internal_id: str, completion: Any, now: int) -> list[tuple[int, int]]:
    """(version, first token) of a stream so far; the version ``now`` in force where it has no token.

    vLLM publishes this with the last chunk only; before that its own book is read, which is of this very
    instant as long as no await lies between it and the chunk."""
    if completion.weight_versions is not None:
        starts = [(int(span.version), span.start) for span in completion.weight_versions]
    else:
        state = engine.output_processor.request_states.get(internal_id)
        starts = [(int(version), start) for version, start in state.weight_version_starts] if state else []
    return starts or [(now, 0)]


def end_tokens(model_config: Any) -> tuple[int, ...]:
    """What vLLM stops on without a tokenizer: the end-of-sequence ids of the generation configuration."""
    ids = (model_config.try_get_generation_config() or {}).get("eos_token_id")
    return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)
