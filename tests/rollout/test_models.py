"""The small models: cached once, whole or not at all, and what they are said to be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from belayer_rollout import models
from belayer_rollout.errors import EngineMissing, SetupError
from belayer_rollout.models import cache_home, ensure_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "belayer" / "models"


def test_cache_is_below_the_xdg_directory_and_a_relative_one_is_ignored(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_home() == cache
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_home() == Path.home() / ".cache" / "belayer" / "models"


def test_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="smollm2, tiny"):
        ensure_model("gpt-5")


def test_missing_packages_are_named_with_what_helps(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match=r"transformers.*scripts/install-vllm"):
        ensure_model("tiny")
    assert not cache.exists()


def test_failed_build_leaves_nothing_and_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: object())
    # The child knows its recipes from the module, not from this process: it fails on the unknown name.
    monkeypatch.setitem(models.MODELS, "broken", lambda out: None)
    with pytest.raises(SetupError, match="KeyError: 'broken'"):
        ensure_model("broken")
    assert [path.name for path in cache.iterdir()] == [".broken-1.lock"]


@pytest.mark.vllm
def test_processes_that_ask_at_once_get_the_same_whole_model(cache: Path) -> None:
    ask = "from belayer_rollout.models import ensure_model; print(ensure_model('tiny'))"
    asking = [subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE) for _ in range(2)]
    answers = [process.communicate(timeout=110)[0] for process in asking]
    assert answers == [f"{cache}/tiny-1\n".encode()] * 2
    assert (cache / "tiny-1" / "model.safetensors").stat().st_size > 4_000_000
    assert sorted(path.name for path in cache.iterdir()) == [".tiny-1.lock", "tiny-1"]


@pytest.mark.vllm
def test_smollm2_knows_the_capital_of_france() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ensure_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
