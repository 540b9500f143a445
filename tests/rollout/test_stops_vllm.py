"""Stop strings as vLLM itself finds them, token for token, on a byte-level BPE tokenizer."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from belayer_rollout.stops import StopWatch
from belayer_rollout.text import decode_function

# torch and vLLM warn of their own old parts as they are imported.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TEXT = "Say it 🙂 twice, naïve café: END. <end>\n¿Qué? 漢字 and so on, and so on; ended ENDED\n" * 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Merges that join letters, and bytes of characters apart from each other."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def vllm_says(
    tokenizer: Any, prompt: list[int], tokens: list[int], stop: list[str], min_tokens: int
) -> tuple[int, str] | None:
    """(tokens kept, stop string), fed one by one."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=1000)
    request = SimpleNamespace(
        request_id="r", sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None
    )
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    for index, token in enumerate(tokens):
        found = detokenizer.update([token], False)
        if found is not None:
            return index + 1, found
    return None


def test_stop_strings_are_found_where_vllm_finds_them(tokenizer: Any) -> None:
    rng = random.Random(20_26)
    stops = ["END", "🙂", "é", "<end>", "on, and", "字", "\n", "naïve c", "so on;"]
    decode = decode_function(tokenizer)
    found = 0
    for _ in range(600):
        whole = TEXT[rng.randrange(60) :]
        ids = tokenizer.encode(whole) if rng.random() < 0.5 else []
        if not ids:
            # As a model that chooses other pieces, or none that make a text.
            for piece in (whole[at : at + rng.randint(1, 3)] for at in range(0, 120, 3)):
                ids += tokenizer.encode(piece)
                if rng.random() < 0.1:
                    ids.append(rng.randrange(len(tokenizer)))
        prompt = tokenizer.encode("The prompt: ")
        stop = rng.sample(stops, rng.randint(1, 3))
        min_tokens = rng.choice([0, 0, 10, 40])
        expected = vllm_says(tokenizer, prompt, ids, stop, min_tokens)
        watch = StopWatch(decode, prompt, stop, min_tokens=min_tokens)
        assert watch.feed(ids) == expected, (ids, stop, min_tokens)
        found += expected is not None
    assert found > 300
