"""vLLM's sampling parameters in the rollout client's words, and its generations in vLLM's. Tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from belayer_rollout.errors import InvalidRequest
from belayer_rollout.text import PRIMED_TOKENS, decode_function
from belayer_rollout.types import MOST_SEED, Generation, SamplingParams

if TYPE_CHECKING:
    from vllm import RequestOutput

__all__ = ["Seeds", "asked", "output_of"]

TRANSLATED = frozenset(
    {
        "ignore_eos",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "seed",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
IMMATERIAL = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "include_stop_str_in_output",
        "output_kind",
        "output_text_buffer_length",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
        "watermarking",
    }
)
"""How an answer looks, or comes: one whole answer is made here."""

PENALTIES = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty"})
ONE_STREAM = frozenset({"n", "prompt_logprobs", "prompt_logprob_token_ids", "logprob_token_ids"})


class Seeds:
    """A seed for each request that has none: of the engine's seed, the weights, the prompt, and how many such
    requests there were before. So it depends on no clock and on no order among other requests."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._version: int | None = None
        self._asked: Counter[bytes] = Counter()

    def draw(self, prompt: Sequence[int], version: int) -> int:
        """The next one of that prompt."""
        if version != self._version:
            self._version = version
            self._asked.clear()
        digest = blake2b(repr((self._seed, version, tuple(prompt))).encode(), digest_size=16).digest()
        self._asked[digest] += 1
        drawn = blake2b(digest, digest_size=8, salt=self._asked[digest].to_bytes(8)).digest()
        return int.from_bytes(drawn) & MOST_SEED


def asked(
    params: Any,
    *,
    prompt: Sequence[int],
    seed: Callable[[], int],
    max_model_len: int | None,
    end_tokens: Sequence[int],
    tokenizer_end: int | None,
    has_processed_logprobs: bool,
) -> SamplingParams:
    """Of vLLM's `SamplingParams`. ``seed``: makes one, where none is given. ``end_tokens``: what the engine
    itself takes for an end of sequence; it has no tokenizer, whose own ``tokenizer_end`` is added.

    Raises:
        InvalidRequest: it asks for what a rollout client does not give."""
    changed = _changed(params)
    if wrong := sorted(changed.keys() & ONE_STREAM):
        raise InvalidRequest(
            f"a shadow pair gives one stream, its tokens' logprobs, and no {', '.join(wrong)}"
        )
    if params.logprobs not in (None, 0, 1):
        raise InvalidRequest(f"only the sampled token's logprob is given, and logprobs={params.logprobs}")
    is_plain = (
        params.temperature in (0.0, 1.0) and params.top_p == 1.0 and params.top_k <= 0 and not params.min_p
    )
    if has_processed_logprobs and params.logprobs is not None and not is_plain:
        raise InvalidRequest(
            "logprobs of the distribution after temperature and filters (OpenRLHF wants those with "
            "--algo.advantage.is_correction_level) are had only with --rollout.temperature 1 and top_p 1; "
            "for evaluations, --eval.temperature 1"
        )
    extra = {name: value for name, value in changed.items() if name not in TRANSLATED | IMMATERIAL}
    if params.stop and not params.skip_special_tokens:
        extra["skip_special_tokens"] = False
    stop_token_ids = list(params.stop_token_ids or ())
    if tokenizer_end is not None and tokenizer_end not in end_tokens and not params.ignore_eos:
        stop_token_ids.append(tokenizer_end)
    room = max(1, max_model_len - len(prompt)) if max_model_len is not None else 1 << 30
    max_tokens = room if params.max_tokens is None else params.max_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        seed=seed() if params.seed is None else params.seed & MOST_SEED,
        stop=tuple([params.stop] if isinstance(params.stop, str) else params.stop or ()),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=params.ignore_eos,
        # Penalties distort the noise of an exact draw: vLLM's own draws then.
        exact_resume=not changed.keys() & PENALTIES,
        extra=extra,
    )


def output_of(
    generation: Generation, params: Any, tokenizer: Any, *, request_id: str, tokenizer_end: int | None
) -> RequestOutput:
    """As vLLM gives it at a request's end. Of the logprobs only the sampled tokens' are in it."""
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    ids, logprobs = list(generation.token_ids), generation.logprobs
    reason = None if generation.stop_reason == tokenizer_end else generation.stop_reason
    spans: list[WeightVersionSpan] = []
    for start, stop, _, version in generation.segments:
        if spans and spans[-1].version == str(version):
            spans[-1].end = stop
        else:
            spans.append(WeightVersionSpan(str(version), start, stop))
    wants_logprobs = params.logprobs is not None
    completion = CompletionOutput(
        index=0,
        text=_text(generation, params, tokenizer) if params.detokenize else "",
        token_ids=ids,
        cumulative_logprob=sum(logprobs) if wants_logprobs else None,
        logprobs=[{i: Logprob(value)} for i, value in zip(ids, logprobs, strict=True)]
        if wants_logprobs
        else None,
        finish_reason=generation.finish_reason,
        stop_reason=reason,
        weight_versions=spans,
    )
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=list(generation.prompt_token_ids),
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )


def _text(generation: Generation, params: Any, tokenizer: Any) -> str:
    decode = decode_function(tokenizer, skip_special_tokens=params.skip_special_tokens)
    ids, stopped_by = list(generation.token_ids), generation.stop_reason
    if (
        generation.finish_reason == "stop"
        and not isinstance(stopped_by, str)
        and not params.include_stop_str_in_output
    ):
        del ids[-1:]  # as in vLLM, a token that ends a request by itself gives no text
    # Some tokenizers drop the space that a text begins with.
    before = list(generation.prompt_token_ids[-PRIMED_TOKENS:])
    text = decode([*before, *ids])[len(decode(before)) :]
    if isinstance(stopped_by, str) and (at := text.rfind(stopped_by)) >= 0:
        text = text[: at + len(stopped_by) if params.include_stop_str_in_output else at]
    return text


def _changed(params: Any) -> Mapping[str, Any]:
    default = type(params)()
    return {
        name: value
        for name in params.__struct_fields__
        if not name.startswith("_") and (value := getattr(params, name)) != getattr(default, name)
    }
