"""A vLLM server with Belayer's logits processor draws, over HTTP, what the draws module says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from belayer_rollout.draws import Draw, choose
from belayer_rollout.engines.vllm.params import EXACT_PROCESSOR, exact_arguments
from belayer_rollout.models import ensure_model
from belayer_rollout.types import EngineRequest, SamplingParams
from tests.rollout.streams import prompts

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

START_S = 350.0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    port = free_port()
    command = f"""-m vllm.entrypoints.openai.api_server --model {ensure_model("tiny")} --port {port}
        --host 127.0.0.1 --dtype float32 --max-model-len 512 --max-num-seqs 8 --enforce-eager --block-size 32
        --kv-cache-memory-bytes {1 << 27} --logits-processors {EXACT_PROCESSOR}"""
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    process = subprocess.Popen(
        [sys.executable, *command.split()], env=os.environ | quiet | offline, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"{url}/health"):
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is in its session
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def completion(url: str, prompt: tuple[int, ...], tokens: int, xargs: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body |= {"logprobs": 1, "return_token_ids": True, "vllm_xargs": xargs}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100.0) as response:
        choice = json.load(response)["choices"][0]
        assert isinstance(choice, dict)
        return choice


def test_server_draws_exactly_and_goes_on_at_a_position(server: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(ensure_model("tiny"), dtype="float32").eval()
    params = SamplingParams(max_tokens=24, temperature=1.2, top_p=0.95, top_k=60, min_p=0.005, seed=2**62 + 3)

    def asked(prompt: tuple[int, ...], after: list[int]) -> list[int]:
        xargs = exact_arguments(EngineRequest("any", prompt, params, position=len(after)))
        return list(completion(server, (*prompt, *after), 24 - len(after), xargs)["token_ids"])

    with ThreadPoolExecutor(4) as pool:
        whole = list(pool.map(asked, prompts(4), [[]] * 4))
        rest = list(pool.map(asked, prompts(4), [tokens[:9] for tokens in whole]))
    assert rest == [tokens[9:] for tokens in whole]
    for prompt, tokens in zip(prompts(4), whole, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert choose(logits, [Draw.of(params, i) for i in range(24)]).tolist() == tokens


@pytest.mark.parametrize(
    "xargs",
    [
        {"belayer_seed": 1},
        {"belayer_seed": "1", "belayer_position": 0},
        {"belayer_seed": 1, "belayer_position": 0, "belayer_topp": 0.9},
        {"belayer_seed": 1, "belayer_position": 0, "belayer_min_p": 1.5},
    ],
)
def test_server_answers_wrong_arguments_with_400(server: str, xargs: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        completion(server, (1, 2), 4, xargs)
    with caught.value as error:
        assert (error.code, b"belayer_" in error.read()) == (400, True)
