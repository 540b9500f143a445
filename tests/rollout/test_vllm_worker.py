"""The in-process vLLM engine, on the tiny model in float32: streams, exact draws, weights in force."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belayer_rollout.draws import Draw, choose
from belayer_rollout.engines.base import EngineWorker
from belayer_rollout.engines.vllm import VllmWorker
from belayer_rollout.errors import RequestRejected, UpdateFailed, WorkerFault
from belayer_rollout.models import ensure_model
from belayer_rollout.types import SamplingParams
from tests.rollout.loop_thread import LoopThread
from tests.rollout.streams import prompts, stream, streams

# A start takes 15 s on an idle host, and ten times that on a crowded one.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

TINY: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 27,
}

SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=11, ignore_eos=True, exact_resume=True)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as thread:
        yield thread


@pytest.fixture(scope="module")
def worker(loop: LoopThread) -> Iterator[VllmWorker]:
    # One thread: on a busy host the tiny model's threads wait for each other far longer than they work.
    made = VllmWorker(
        ensure_model("tiny"),
        name="w",
        engine_args=TINY,
        env={"OMP_NUM_THREADS": "1"},
        weight_version=3,
    )
    try:
        loop.run(made.start(), deadline_s=380.0)
        yield made
    finally:
        loop.run(made.close())


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ensure_model("tiny"), dtype="float32").eval()


def logits_of(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> Any:
    """Logits before each of the tokens, [tokens, vocabulary]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


def test_worker_keeps_the_contract_and_says_what_it_serves(loop: LoopThread, worker: VllmWorker) -> None:
    assert isinstance(worker, EngineWorker)
    assert (worker.name, worker.supports_exact_resume, worker.recovers_itself) == ("w", True, False)
    info = loop.run(worker.model_info())
    assert (info.name, info.max_model_len, info.eos_token_ids) == (str(ensure_model("tiny")), 512, (256,))
    assert loop.run(worker.weight_version()) == 3
    loop.run(worker.start())  # idempotent
    loop.run(worker.health())
    assert all(Path(f"/proc/{pid}").exists() for pid in worker.processes().all)


def test_greedy_tokens_and_logprobs_are_the_models(
    loop: LoopThread, worker: VllmWorker, reference: Any
) -> None:
    for prompt, got in zip(
        prompts(8), loop.run(streams(worker, [(p, GREEDY) for p in prompts(8)])), strict=True
    ):
        logits = logits_of(reference, prompt, got.token_ids)
        assert got.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1).tolist()
        assert got.logprobs == pytest.approx(expected, abs=1e-3)
        assert (got.reason, len(got.token_ids), set(got.versions)) == ("length", 40, {3})


def test_exact_draws_are_those_of_the_draws_module_with_raw_logprobs(
    loop: LoopThread, worker: VllmWorker, reference: Any
) -> None:
    params = replace(SAMPLED, temperature=1.4, top_p=0.9, top_k=50, min_p=0.01)
    requests = [(prompt, replace(params, seed=i)) for i, prompt in enumerate(prompts(8))]
    for (prompt, asked), got in zip(requests, loop.run(streams(worker, requests)), strict=True):
        logits = logits_of(reference, prompt, got.token_ids)
        draws = [Draw.of(asked, position) for position in range(len(got.token_ids))]
        assert got.token_ids == choose(logits, draws).tolist()
        raw = logits.log_softmax(-1)
        assert got.logprobs == pytest.approx(
            [raw[i, token].item() for i, token in enumerate(got.token_ids)], abs=1e-3
        )


@pytest.mark.parametrize("every", [1, 7, 16])
def test_sampled_text_goes_on_as_if_never_cut(loop: LoopThread, worker: VllmWorker, every: int) -> None:
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.05}]
    requests = [
        (prompt, replace(SAMPLED, seed=1000 + i, **filters[i % 4])) for i, prompt in enumerate(prompts(8))
    ]

    async def in_pieces(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < params.max_tokens:
            piece = await stream(worker, prompt, params, after=tokens, at_most=every)
            tokens += piece.token_ids[:every]
        return tokens

    async def one_after_another_beside_strangers() -> list[list[int]]:
        # Two of ours and one stranger at a time: another batch than all eight together.
        room = asyncio.Semaphore(2)

        async def ours(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
            async with room:
                return await in_pieces(prompt, params)

        stranger = asyncio.ensure_future(stream(worker, (5, 6), replace(GREEDY, max_tokens=400)))
        got = await asyncio.gather(*[ours(prompt, params) for prompt, params in reversed(requests)])
        await stranger
        return got[::-1]

    whole = [got.token_ids for got in loop.run(streams(worker, requests))]
    assert loop.run(one_after_another_beside_strangers()) == whole
    assert len({tuple(tokens) for tokens in whole}) == 8


def test_min_tokens_holds_back_the_end_in_exact_draws_too(loop: LoopThread, worker: VllmWorker) -> None:
    # Every token but one ends the request, so that only min_tokens keeps it going.
    params = replace(SAMPLED, min_tokens=12, stop_token_ids=tuple(range(1, 512)))
    whole = loop.run(stream(worker, (1, 2, 3), params))
    assert (whole.token_ids, whole.reason) == ([0] * 12 + whole.token_ids[12:], "stop")
    rest = loop.run(stream(worker, (1, 2, 3), params, after=whole.token_ids[:5]))
    assert rest.token_ids == whole.token_ids[5:]


def test_seed_alone_repeats_a_request_without_exact_resume(loop: LoopThread, worker: VllmWorker) -> None:
    params = replace(SAMPLED, exact_resume=False)
    first, again, other = [
        loop.run(stream(worker, (1, 2), replace(params, seed=seed))).token_ids for seed in (5, 5, 6)
    ]
    assert first == again
    assert first != other


def test_end_of_sequence_and_stop_tokens_end_a_stream_with_their_reason(
    loop: LoopThread, worker: VllmWorker, reference: Any
) -> None:
    params = replace(SAMPLED, max_tokens=400, seed=2, extra={"logit_bias": {256: 5.0}})
    free = loop.run(stream(worker, (9, 9), params)).token_ids
    end = free.index(256)
    ended = loop.run(stream(worker, (9, 9), replace(params, ignore_eos=False)))
    assert ended.token_ids == free[: end + 1]
    assert ended.last is not None
    assert (ended.last.finish_reason, ended.last.stop_reason) == ("stop", None)
    stopped = loop.run(stream(worker, (9, 9), replace(params, stop_token_ids=(free[6],))))
    assert stopped.token_ids == free[: free.index(free[6]) + 1]
    assert stopped.last is not None
    assert (stopped.last.finish_reason, stopped.last.stop_reason) == ("stop", free[6])


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ((1,) * 600, GREEDY),
        ((1, 2), replace(GREEDY, extra={"no_such_parameter": 1})),
        ((1, 2), replace(GREEDY, extra={"n": 2})),
        ((1, 2), replace(SAMPLED, extra={"repetition_penalty": 1.2})),
        ((1, 2), replace(GREEDY, extra={"extra_args": {"belayer_seed": -1, "belayer_position": 0}})),
        ((1, 2), replace(GREEDY, extra={"extra_args": {"belayer_seed": 1}})),
        ((1, 99_999), GREEDY),
        ((), GREEDY),
    ],
)
def test_wrong_requests_are_rejected_and_harm_nobody(
    loop: LoopThread, worker: VllmWorker, prompt: tuple[int, ...], params: SamplingParams
) -> None:
    with pytest.raises(RequestRejected, match="vLLM refuses"):
        loop.run(stream(worker, prompt, params))
    loop.run(worker.health())


def test_abort_ends_a_stream_and_of_an_unknown_request_nothing(loop: LoopThread, worker: VllmWorker) -> None:
    async def aborted() -> Any:
        started = asyncio.Event()
        running = asyncio.ensure_future(
            stream(
                worker,
                (1, 2),
                replace(GREEDY, max_tokens=500),
                request_id="to-abort",
                on_token=lambda got: started.set(),
            )
        )
        await started.wait()
        await worker.abort("to-abort")
        await worker.abort("never-heard-of")
        return await running

    got = loop.run(aborted())
    assert got.reason == "abort"
    assert len(got.token_ids) < 500


def test_stream_left_early_is_aborted_in_the_engine(loop: LoopThread, worker: VllmWorker) -> None:
    async def left() -> int:
        await stream(worker, (1, 2), replace(GREEDY, max_tokens=500), at_most=3)
        cancelled = asyncio.ensure_future(stream(worker, (1, 2), replace(GREEDY, max_tokens=500)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        return int(worker._engine.get_num_unfinished_requests())

    assert loop.run(left()) == 0


def test_rpc_reaches_every_worker_and_names_what_failed(loop: LoopThread, worker: VllmWorker) -> None:
    assert [own for own, _ in loop.run(worker.rpc("belayer_pids", deadline_s=60.0))] == list(
        worker.processes().workers
    )
    with pytest.raises(WorkerFault, match="no_such_method"):
        loop.run(worker.rpc("no_such_method", deadline_s=60.0))
    loop.run(worker.health())


# Weights. These change the engine's, so each puts the first ones back.


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(ensure_model("tiny") / "model.safetensors"))


@pytest.fixture
def first_weights(loop: LoopThread, worker: VllmWorker) -> Iterator[None]:
    yield
    loop.run(worker.update_weights(3, ensure_model("tiny")))
    assert loop.run(worker.weight_version()) == 3


def changed(tensors: dict[str, Any]) -> dict[str, Any]:
    import torch

    noise = torch.Generator().manual_seed(5)
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_weights_that_change_under_a_request_stamp_each_token_with_its_own(
    loop: LoopThread, worker: VllmWorker, tensors: dict[str, Any], params: SamplingParams
) -> None:
    params = replace(params, max_tokens=90)
    requests = [(prompt, replace(params, seed=i)) for i, prompt in enumerate(prompts(4))]
    before = [got.token_ids for got in loop.run(streams(worker, requests))]

    async def updated() -> list[Any]:
        twenty = asyncio.Event()

        def count(got: Any) -> None:
            if len(got.token_ids) >= 20:
                twenty.set()

        running = [
            asyncio.ensure_future(stream(worker, prompt, asked, on_token=count)) for prompt, asked in requests
        ]
        await twenty.wait()
        await worker.update_weights(4, changed(tensors))
        return list(await asyncio.gather(*running))

    got = loop.run(updated())
    assert loop.run(worker.weight_version()) == 4

    async def rests() -> list[Any]:
        # What the new weights say to each prefix, its KV computed anew.
        return await asyncio.gather(
            *[
                stream(worker, prompt, asked, after=mixed.token_ids[: mixed.versions.index(4)])
                for (prompt, asked), mixed in zip(requests, got, strict=True)
            ]
        )

    for old, mixed, rest in zip(before, got, loop.run(rests()), strict=True):
        cut = mixed.versions.index(4)
        assert mixed.versions == [3] * cut + [4] * (90 - cut)
        assert 0 < cut < 90
        assert mixed.token_ids[:cut] == old[:cut]
        assert mixed.token_ids[cut:] == rest.token_ids
        assert rest.token_ids != old[cut:]


@pytest.mark.usefixtures("first_weights")
def test_update_that_fails_half_way_leaves_the_old_weights_and_says_so(
    loop: LoopThread, worker: VllmWorker, tensors: dict[str, Any]
) -> None:
    params = replace(GREEDY, max_tokens=90)
    before = loop.run(stream(worker, (1, 2, 3), params))
    # vLLM loads in this order, and stumbles over the last one.
    broken = changed(tensors) | {"model.zzz.weight": tensors["model.norm.weight"]}

    async def failed() -> Any:
        twenty = asyncio.Event()
        running = asyncio.ensure_future(
            stream(
                worker,
                (1, 2, 3),
                params,
                on_token=lambda got: twenty.set() if len(got.token_ids) >= 20 else None,
            )
        )
        await twenty.wait()
        with pytest.raises(UpdateFailed, match="zzz") as caught:
            await worker.update_weights(4, broken)
        assert caught.value.version == 3
        return await running

    got = loop.run(failed())
    assert got.token_ids == before.token_ids
    assert got.versions == [3] * 90
    assert got.logprobs == pytest.approx(before.logprobs, abs=1e-3)
    assert loop.run(worker.weight_version()) == 3
    assert loop.run(stream(worker, (1, 2, 3), params)).token_ids == before.token_ids
    # And the engine is fit for the next one.
    loop.run(worker.update_weights(5, changed(tensors)))
    assert loop.run(stream(worker, (1, 2, 3), params)).token_ids != before.token_ids


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"), "q_proj.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:-1].clone()}),
            "shape",
        ),
    ],
    ids=["missing", "misshapen"],
)
def test_incomplete_update_is_refused_before_anything_is_touched(
    loop: LoopThread, worker: VllmWorker, tensors: dict[str, Any], break_it: Any, complaint: str
) -> None:
    incomplete = dict(tensors)
    break_it(incomplete)
    with pytest.raises(UpdateFailed, match=complaint):
        loop.run(worker.update_weights(4, incomplete))
    assert loop.run(worker.weight_version()) == 3


def test_truncated_file_is_refused(loop: LoopThread, worker: VllmWorker, tmp_path: Path) -> None:
    whole = (ensure_model("tiny") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(UpdateFailed, match="cut short"):
        loop.run(worker.update_weights(4, tmp_path))


def test_updates_leave_no_file_in_shared_memory(worker: VllmWorker) -> None:
    assert not list(Path("/dev/shm").glob("belayer-weights-*"))


def test_logprobs_are_finite_numbers(loop: LoopThread, worker: VllmWorker) -> None:
    got = loop.run(stream(worker, (1,), replace(SAMPLED, temperature=5.0)))
    assert all(math.isfinite(logprob) and logprob <= 0.0 for logprob in got.logprobs)
