"""What vLLM is asked for, and how its version labels cut a stream: pure parts, without vLLM."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belayer_rollout.draws import Draw
from belayer_rollout.engines.vllm.params import draw_of, exact_arguments, sampling_arguments
from belayer_rollout.engines.vllm.stamps import pieces
from belayer_rollout.engines.vllm.weights import check_complete, tensor_shapes
from belayer_rollout.types import EngineRequest, SamplingParams

PARAMS = SamplingParams(
    max_tokens=9, min_tokens=2, temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, seed=8, stop_token_ids=(5,)
)


def asked(params: SamplingParams, position: int = 0) -> dict[str, Any]:
    return sampling_arguments(EngineRequest("r", (1, 2), params, position))


def test_plain_request_keeps_every_parameter() -> None:
    assert asked(PARAMS) == {
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": False,
        "logprobs": 0,
        "detokenize": False,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 8,
    }


def test_exact_request_is_greedy_for_vllm_and_carries_its_draw() -> None:
    arguments = asked(replace(PARAMS, exact_resume=True, extra={"extra_args": {"mine": 1}}), position=6)
    assert arguments["temperature"] == 0.0
    assert arguments.keys().isdisjoint({"top_p", "top_k", "min_p", "seed"})
    assert arguments["extra_args"]["mine"] == 1
    assert draw_of(arguments["extra_args"]) == Draw(8, 6, 0.7, 0.9, 4, 0.1)


def test_exact_request_at_temperature_zero_needs_no_noise() -> None:
    arguments = asked(replace(PARAMS, exact_resume=True, temperature=0.0))
    assert "extra_args" not in arguments
    assert arguments["temperature"] == 0.0


@pytest.mark.parametrize(
    "name", ["n", "max_tokens", "temperature", "logprobs", "stop", "output_kind", "seed"]
)
def test_extra_may_not_set_what_belayer_has_a_word_for(name: str) -> None:
    for exact in (False, True):
        with pytest.raises(ValueError, match=f"must not set {name}"):
            asked(replace(PARAMS, exact_resume=exact, extra={name: 1}))


def test_extra_is_handed_on() -> None:
    assert asked(replace(PARAMS, extra={"presence_penalty": 0.5}))["presence_penalty"] == 0.5


def test_arguments_of_a_draw_survive_json() -> None:
    request = EngineRequest("r", (1,), replace(PARAMS, seed=2**63 - 1), position=7)
    assert draw_of(json.loads(json.dumps(exact_arguments(request)))) == Draw(2**63 - 1, 7, 0.7, 0.9, 4, 0.1)


def test_request_without_a_draw_is_none_and_short_ones_have_defaults() -> None:
    assert draw_of(None) is None
    assert draw_of({"other": 1}) is None
    assert draw_of({"belayer_seed": 1, "belayer_position": 2, "belayer_top_p": 1}) == Draw(1, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"belayer_seed": None},
        {"belayer_seed": True},
        {"belayer_seed": 1.5},
        {"belayer_seed": -1},
        {"belayer_seed": 2**63},
        {"belayer_position": -1},
        {"belayer_temperature": -0.1},
        {"belayer_temperature": float("nan")},
        {"belayer_top_p": "0.9"},
        {"belayer_min_p": 2},
        {"belayer_tpo_p": 0.9},
    ],
    ids=str,
)
def test_wrong_arguments_of_a_draw_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        draw_of({"belayer_seed": 1, "belayer_position": 2} | wrong)


def test_missing_position_is_named() -> None:
    with pytest.raises(ValueError, match="belayer_position"):
        draw_of({"belayer_seed": 1})


@pytest.mark.parametrize(
    ("start", "stop", "starts", "expected"),
    [
        (0, 20, [(3, 0)], [(3, 0, 20)]),
        (18, 22, [(3, 0), (4, 20)], [(3, 18, 20), (4, 20, 22)]),
        (20, 50, [(3, 0), (4, 20)], [(4, 20, 50)]),
        (0, 20, [(3, 0), (4, 20)], [(3, 0, 20)]),
        (0, 9, [(3, 0), (4, 2), (5, 3)], [(3, 0, 2), (4, 2, 3), (5, 3, 9)]),
        (5, 5, [(3, 0)], []),
        (0, 0, [], []),
    ],
)
def test_stream_is_cut_where_its_weights_change(
    start: int, stop: int, starts: list[tuple[int, int]], expected: list[tuple[int, int, int]]
) -> None:
    assert pieces(start, stop, starts) == expected


def write(directory: Path, shapes: dict[str, list[int]], *, less: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (directory / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at - less))
    return directory


def test_update_is_compared_with_the_models_files(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {"a": [2, 3], "b": [4]})
    assert tensor_shapes(model) == {"a": (2, 3), "b": (4,)}
    check_complete(model, write(tmp_path / "same", {"b": [4], "a": [2, 3], "head": [1]}))
    with pytest.raises(ValueError, match="1 tensors are missing, among them b"):
        check_complete(model, write(tmp_path / "less", {"a": [2, 3]}))
    with pytest.raises(ValueError, match="a has shape"):
        check_complete(model, write(tmp_path / "turned", {"a": [3, 2], "b": [4]}))


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 64, struct.pack("<Q", 2) + b"[]", b"\0" * 8])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.safetensors is no safetensors file"):
        tensor_shapes(tmp_path)


def test_short_file_and_empty_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cut short"):
        tensor_shapes(write(tmp_path / "short", {"a": [2]}, less=1))
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        tensor_shapes(tmp_path)


def test_worker_is_importable_without_vllm_and_torch() -> None:
    import subprocess

    code = (
        "import sys\nfor name in ('vllm', 'torch', 'transformers'): sys.modules[name] = None\n"
        "import belayer_rollout.engines.hf, belayer_rollout.engines.vllm, belayer_rollout.models"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60.0)
