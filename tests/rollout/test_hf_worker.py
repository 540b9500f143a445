"""The transformers engine, on the tiny model in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belayer_rollout.engines import hf
from belayer_rollout.engines.base import EngineWorker
from belayer_rollout.engines.hf import HfWorker
from belayer_rollout.errors import EngineMissing, RequestRejected, SetupError, UpdateFailed, WorkerGone
from belayer_rollout.models import ensure_model
from belayer_rollout.types import SamplingParams
from tests.rollout.loop_thread import LoopThread
from tests.rollout.streams import prompts, stream, streams

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SAMPLED = SamplingParams(max_tokens=30, temperature=1.0, seed=11, ignore_eos=True, exact_resume=True)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as thread:
        yield thread


@pytest.fixture(scope="module")
def worker(loop: LoopThread) -> Iterator[HfWorker]:
    made = HfWorker(ensure_model("tiny"), name="h", dtype="float32", weight_version=3, threads=2)
    loop.run(made.start())
    yield made
    loop.run(made.close())


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ensure_model("tiny"), dtype="float32").eval()


def test_worker_keeps_the_contract_and_says_what_it_serves(loop: LoopThread, worker: HfWorker) -> None:
    assert isinstance(worker, EngineWorker)
    assert (worker.name, worker.supports_exact_resume, worker.recovers_itself) == ("h", True, False)
    info = loop.run(worker.model_info())
    assert (info.name, info.max_model_len, info.eos_token_ids) == (str(ensure_model("tiny")), 2048, (256,))
    loop.run(worker.health())


def test_greedy_tokens_are_those_of_generate_with_the_models_logprobs(
    loop: LoopThread, worker: HfWorker, reference: Any
) -> None:
    import torch

    got = loop.run(streams(worker, [(prompt, GREEDY) for prompt in prompts(3)]))
    for prompt, ours in zip(prompts(3), got, strict=True):
        whole = reference.generate(
            torch.tensor([prompt]), max_new_tokens=30, min_new_tokens=30, do_sample=False, eos_token_id=None
        )[0]
        assert ours.token_ids == whole[len(prompt) :].tolist()
        raw = reference(whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1).amax(-1)
        assert ours.logprobs == pytest.approx(raw.tolist(), abs=1e-3)
        assert (ours.reason, set(ours.versions)) == ("length", {3})


@pytest.mark.parametrize("cut", [1, 13, 29])
def test_sampled_text_goes_on_as_if_never_cut(loop: LoopThread, worker: HfWorker, cut: int) -> None:
    params = replace(SAMPLED, top_p=0.9, top_k=40, min_p=0.01)
    whole = loop.run(stream(worker, (1, 2, 3), params))
    head = loop.run(stream(worker, (1, 2, 3), params, at_most=cut)).token_ids[:cut]
    assert head == whole.token_ids[:cut]
    rest = loop.run(stream(worker, (1, 2, 3), params, after=head))
    assert rest.token_ids == whole.token_ids[cut:]
    assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-3)


def test_request_without_a_seed_is_another_each_time(loop: LoopThread, worker: HfWorker) -> None:
    params = replace(SAMPLED, seed=None, exact_resume=False)
    assert (
        loop.run(stream(worker, (1,), params)).token_ids != loop.run(stream(worker, (1,), params)).token_ids
    )


def test_stop_tokens_and_end_of_sequence_end_a_stream(loop: LoopThread, worker: HfWorker) -> None:
    # At this temperature every token is about as likely, so that the end comes after some hundred.
    params = replace(SAMPLED, temperature=30.0, max_tokens=2000)
    ended = loop.run(stream(worker, (5,), replace(params, ignore_eos=False)))
    assert ended.last is not None
    assert (ended.token_ids[-1], ended.reason, ended.last.stop_reason) == (256, "stop", None)
    assert 256 not in ended.token_ids[:-1]
    stop = ended.token_ids[10]
    stopped = loop.run(stream(worker, (5,), replace(params, stop_token_ids=(stop,))))
    assert stopped.token_ids == ended.token_ids[: ended.token_ids.index(stop) + 1]
    assert stopped.last is not None
    assert (stopped.reason, stopped.last.stop_reason) == ("stop", stop)


def test_min_tokens_holds_back_every_end(loop: LoopThread, worker: HfWorker) -> None:
    params = replace(SAMPLED, min_tokens=12, stop_token_ids=tuple(range(1, 512)))
    got = loop.run(stream(worker, (1, 2, 3), params))
    assert got.token_ids[:12] == [0] * 12
    assert got.reason == "stop"


def test_stream_ends_where_the_context_is_full(loop: LoopThread, worker: HfWorker) -> None:
    got = loop.run(stream(worker, (1,) * 2040, GREEDY))
    assert (len(got.token_ids), got.reason) == (8, "length")


@pytest.mark.parametrize(
    ("prompt", "params"),
    [((), GREEDY), ((512,), GREEDY), ((1,) * 2048, GREEDY), ((1,), replace(GREEDY, extra={"best_of": 2}))],
)
def test_wrong_requests_are_rejected(
    loop: LoopThread, worker: HfWorker, prompt: tuple[int, ...], params: SamplingParams
) -> None:
    with pytest.raises(RequestRejected):
        loop.run(stream(worker, prompt, params))


def test_abort_ends_a_stream_and_of_an_unknown_request_nothing(loop: LoopThread, worker: HfWorker) -> None:
    async def aborted() -> Any:
        started = asyncio.Event()
        running = asyncio.ensure_future(
            stream(
                worker,
                (1, 2),
                replace(GREEDY, max_tokens=2000),
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
    assert len(got.token_ids) < 2000


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(ensure_model("tiny") / "model.safetensors"))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_weights_that_change_under_a_request_stamp_each_token_with_its_own(
    loop: LoopThread, worker: HfWorker, tensors: dict[str, Any], params: SamplingParams
) -> None:
    params = replace(params, max_tokens=120)
    changed = {name: tensor * 1.05 for name, tensor in tensors.items()}

    async def updated() -> Any:
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
        await worker.update_weights(4, changed)
        return await running

    before = loop.run(stream(worker, (1, 2, 3), params)).token_ids
    got = loop.run(updated())
    cut = got.versions.index(4)
    assert got.versions == [3] * cut + [4] * (120 - cut)
    assert got.token_ids[:cut] == before[:cut]
    rest = loop.run(stream(worker, (1, 2, 3), params, after=got.token_ids[:cut]))
    assert got.token_ids[cut:] == rest.token_ids
    loop.run(worker.update_weights(3, ensure_model("tiny")))
    assert loop.run(stream(worker, (1, 2, 3), params)).token_ids == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda given: given.pop("model.norm.weight"), "missing, among them model.norm"),
        (lambda given: given.update({"model.zzz.weight": given["model.norm.weight"]}), "no model.zzz"),
        (lambda given: given.update({"model.norm.weight": given["model.norm.weight"][1:]}), "shape"),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_update_that_does_not_fit_changes_nothing(
    loop: LoopThread, worker: HfWorker, tensors: dict[str, Any], change: Any, complaint: str
) -> None:
    before = loop.run(stream(worker, (1,), GREEDY))
    given = {name: tensor * 2 for name, tensor in tensors.items()}
    change(given)
    with pytest.raises(UpdateFailed, match=complaint) as caught:
        loop.run(worker.update_weights(9, given))
    assert caught.value.version == loop.run(worker.weight_version()) == 3
    assert loop.run(stream(worker, (1,), GREEDY)).logprobs == pytest.approx(before.logprobs, abs=1e-3)


def test_close_ends_running_streams_and_is_final(loop: LoopThread) -> None:
    made = HfWorker(ensure_model("tiny"), dtype="float32")
    with pytest.raises(WorkerGone, match="not started"):
        loop.run(made.health())

    async def closed() -> Any:
        await made.start()
        started = asyncio.Event()
        running = [
            asyncio.ensure_future(
                stream(made, (1,), replace(GREEDY, max_tokens=2000), on_token=lambda got: started.set())
            )
            for _ in range(2)  # one runs, one waits for the thread
        ]
        await started.wait()
        await made.close()
        await made.close()
        return await asyncio.gather(*running, return_exceptions=True)

    assert [type(result) for result in loop.run(closed())] == [WorkerGone, WorkerGone]
    for call in (made.health, made.start, made.weight_version):
        with pytest.raises(WorkerGone, match="closed"):
            loop.run(call())


def test_missing_model_or_package_is_a_set_up_error(
    loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match="Check the model's directory"):
        loop.run(HfWorker(tmp_path).start())
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match="pip install"):
        loop.run(HfWorker(tmp_path).start())
