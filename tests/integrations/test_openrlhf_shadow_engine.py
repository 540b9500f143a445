"""The shadow engine's face to OpenRLHF's rollout actor, with vLLM's own types: what it is asked, what it
answers, how it fails. The engines behind it are processes without a model (tests/rollout/fake_engine.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from belayer_integrations.openrlhf import ShadowOptions, ShadowUnavailable
from belayer_integrations.openrlhf.bubbles import SESSION
from belayer_integrations.openrlhf.shadow.options import PairArguments

from belayer_rollout.errors import InvalidRequest, SetupError, UpdateFailed, WorkerGone
from belayer_rollout.pair_state import PairState
from tests.rollout.fake_engine import Fleet, next_token

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(120),
    # vLLM's own, as it is imported.
    pytest.mark.filterwarnings("ignore"),
]

PROMPT = [5, 6, 7]
NUM_TOKENS = 40


class Letters:
    """A tokenizer: a token is a letter, or one of the special ones from 900 on; it ends with 26."""

    eos_token_id = 26

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            "" if skip_special_tokens and token >= 900 else chr(97 + token % 26) for token in token_ids
        )


def arguments(**given: Any) -> PairArguments:
    default: dict[str, Any] = {
        "model": "no-model",
        "engine_args": {},
        "seed": 0,
        "has_processed_logprobs": False,
    }
    return PairArguments(**default | given)


@contextlib.asynccontextmanager
async def started(**given: Any) -> AsyncIterator[tuple[Any, Fleet]]:
    from belayer_integrations.openrlhf.shadow.engine import ShadowEngine

    fleet = Fleet()
    engine = ShadowEngine(arguments(**given), Letters(), ShadowOptions(), make_engine=fleet)
    try:
        assert await engine.is_sleeping() is False
        await engine.pair.wait_for(PairState.GUARDED, timeout_s=30)
        yield engine, fleet
    finally:
        await engine.close()
        assert not any(is_there(pid) for made in fleet.engines for pid in made.processes().all)


def params(**given: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": 1, "logprobs": 1} | given)


async def said(engine: Any, *given: Any, prompt: list[int] = PROMPT, **options: Any) -> Any:
    """As the actor asks, and what it would have."""
    asked = params(**options) if not given else given[0]
    async with contextlib.aclosing(engine.generate({"prompt_token_ids": prompt}, asked, "r-1")) as outputs:
        (output,) = [output async for output in outputs]
    assert output.finished
    assert output.request_id == "r-1"
    assert output.prompt_token_ids == prompt
    return output.outputs[0]


def expected(versions: list[int], prompt: list[int] = PROMPT) -> list[int]:
    tokens = list(prompt)
    for version in versions:
        tokens.append(next_token(tokens, version))
    return tokens[len(prompt) :]


def is_there(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


def kill(*pids: int | None) -> None:
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def test_an_answer_is_vllms_own_kind_of() -> None:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

    async def scenario() -> None:
        async with started() as (engine, _):
            whole = await said(engine, max_tokens=5)
            ids = expected([0] * 5)
            assert isinstance(whole, CompletionOutput)
            assert (whole.token_ids, whole.finish_reason, whole.stop_reason) == (ids, "length", None)
            assert whole.logprobs == [{token: Logprob(-0.5)} for token in ids]
            assert whole.cumulative_logprob == -2.5
            assert whole.text == Letters().decode(ids)
            (span,) = whole.weight_versions
            assert (span.version, span.start, span.end) == ("0", 0, 5)
            bare = await said(engine, max_tokens=5, logprobs=None, detokenize=False)
            assert (bare.logprobs, bare.cumulative_logprob, bare.text) == (None, None, "")

    asyncio.run(scenario())


def test_stops_are_vllms() -> None:
    async def scenario() -> None:
        async with started() as (engine, _):
            text = Letters().decode(expected([0] * NUM_TOKENS))
            stop = text[9:12]
            at = text.index(stop)
            cut = await said(engine, stop=[stop])
            assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[:at], "stop", stop)
            assert len(cut.token_ids) == at + 3
            kept = await said(engine, stop=stop, include_stop_str_in_output=True)
            assert kept.text == text[: at + 3]
            late = await said(engine, stop=[stop], min_tokens=at + 4)
            assert len(late.token_ids) > at + 3

    asyncio.run(scenario())


def test_what_is_asked_is_what_the_engine_gets() -> None:
    from belayer_integrations.openrlhf.shadow.requests import asked

    def of(given: Any, **options: Any) -> Any:
        default: dict[str, Any] = {
            "prompt": PROMPT,
            "seed": lambda: 99,
            "max_model_len": 100,
            "end_tokens": (7,),
            "tokenizer_end": 26,
            "has_processed_logprobs": False,
        }
        return asked(given, **default | options)

    found = of(
        params(temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, min_tokens=2, stop_token_ids=[3], stop=["x"])
    )
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 0.9, 0, 0.1)
    assert (found.max_tokens, found.min_tokens, found.seed, found.stop) == (NUM_TOKENS, 2, 1, ("x",))
    assert found.stop_token_ids == (3, 26)  # the engine has no tokenizer to know 26 from
    assert found.exact_resume
    assert not found.extra
    assert of(params(max_tokens=None)).max_tokens == 97
    assert of(params(seed=None)).seed == 99
    assert of(params(ignore_eos=True)).stop_token_ids == ()
    assert of(params(), tokenizer_end=7).stop_token_ids == ()
    assert of(params(logit_bias={3: 5.0})).extra == {"logit_bias": {3: 5.0}}
    penal = of(params(repetition_penalty=1.1))
    assert (penal.exact_resume, penal.extra) == (False, {"repetition_penalty": 1.1})
    for wrong in ({"n": 2}, {"prompt_logprobs": 1}, {"logprobs": 5}):
        with pytest.raises(InvalidRequest):
            of(params(**wrong))
    # What OpenRLHF's importance sampling wants is what the model itself says only where nothing is filtered.
    of(params(), has_processed_logprobs=True)
    of(params(temperature=0.0), has_processed_logprobs=True)
    of(params(temperature=0.7, logprobs=None), has_processed_logprobs=True)
    for given in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        with pytest.raises(InvalidRequest, match=r"--rollout\.temperature 1"):
            of(params(**given), has_processed_logprobs=True)


def test_requests_outlive_engines_and_are_counted_while_they_run() -> None:
    async def scenario() -> None:
        async with started() as (engine, _):
            count = engine.output_processor.get_num_unfinished_requests
            assert count() == 0
            asking = [asyncio.ensure_future(said(engine)) for _ in range(3)]
            await asyncio.sleep(0.02)
            assert count() == 3
            assert len(engine._client._fleet.seats["pair"].runs) == 3
            kill(*engine.pair.primary_processes())
            for output in await asyncio.gather(*asking):
                assert output.token_ids == expected([0] * NUM_TOKENS)
            assert count() == 0
            (record,) = engine.pair.history
            assert record.path == "shadow"
            await engine.pair.wait_for(PairState.GUARDED)
            cancelled = asyncio.ensure_future(said(engine, max_tokens=10_000))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert count() == 0
            assert not engine._client._fleet.seats["pair"].runs

    asyncio.run(scenario())


def test_a_session_has_a_hint_while_its_request_runs() -> None:
    async def scenario() -> None:
        async with started() as (engine, _):
            for _ in range(3):
                await said(engine)
            SESSION.set("s")
            asking = asyncio.ensure_future(said(engine))
            await asyncio.sleep(0.01)
            hint = engine.hint_bubble("s")
            assert 0 < hint < 5
            await asking
            assert engine.hint_bubble("s") is None

    asyncio.run(scenario())


def test_a_pair_that_is_broken_fails_its_requests_at_once_and_says_why() -> None:
    async def scenario() -> None:
        async with started() as (engine, fleet):
            asking = asyncio.ensure_future(said(engine, max_tokens=10_000))
            await asyncio.sleep(0.02)
            fleet.start_error = SetupError("the model's files are gone")
            kill(*engine.pair.primary_processes(), *engine.pair.shadow_processes())
            async with asyncio.timeout(10):
                with pytest.raises(WorkerGone, match=r"pair is broken.*the model's files are gone"):
                    await asking
                with pytest.raises(WorkerGone, match="the model's files are gone"):
                    await said(engine)

    asyncio.run(scenario())


def test_an_engine_that_cannot_start_fails_the_actors_first_call() -> None:
    from belayer_integrations.openrlhf.shadow.engine import ShadowEngine

    async def scenario() -> None:
        fleet = Fleet()
        fleet.start_error = SetupError("no such model")
        engine = ShadowEngine(arguments(), Letters(), ShadowOptions(), make_engine=fleet)
        with pytest.raises(WorkerGone, match="no such model"):
            await engine.is_sleeping()
        assert engine.pair.state is PairState.CLOSED
        assert not is_there(engine.pair.owner_process())

    asyncio.run(scenario())


def test_an_update_that_its_filler_did_not_survive_is_loaded_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started() as (engine, fleet):

            async def die(filler: Any) -> None:
                fleet.on_fill = None
                kill(*filler.processes().all)
                await filler.wait_gone()

            fleet.on_fill = die
            await engine._put_in_force(tmp_path)
            assert (await said(engine)).token_ids == expected([1] * NUM_TOKENS)
            await engine.pair.wait_for(PairState.GUARDED)

            async def refuse(_: Any) -> None:
                raise UpdateFailed("it does not fit", version=1)

            fleet.on_fill = refuse
            with pytest.raises(UpdateFailed, match="it does not fit"):
                await engine._put_in_force(tmp_path)
            assert (await said(engine)).token_ids == expected([1] * NUM_TOKENS)

    asyncio.run(scenario())


def test_what_the_pair_has_no_way_to_do_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with started() as (engine, _):
            with pytest.raises(ShadowUnavailable, match=r"--train\.colocate_all"):
                await engine.collective_rpc("update_weight_cuda_ipc", args=("w", None, None, None))
            with pytest.raises(ShadowUnavailable, match="'mine'"):
                await engine.collective_rpc("mine")
            with pytest.raises(ShadowUnavailable, match=r"--vllm\.enable_sleep"):
                await engine.sleep(level=1)
            with pytest.raises(ShadowUnavailable, match="'abort'"):
                await engine.pause_generation(mode="abort")
            with pytest.raises(ShadowUnavailable, match="images"):
                async for _ in engine.generate(
                    {"prompt_token_ids": [1], "multi_modal_data": {"image": [0]}}, params(), "r"
                ):
                    pass
            with pytest.raises(RuntimeError, match="init_process_group"):
                await engine.collective_rpc("update_weight", args=("w", None, (1,), False))
            with pytest.raises(ShadowUnavailable, match=r"by NCCL.*no CUDA device"):
                await engine.collective_rpc(
                    "init_process_group", args=("127.0.0.1", 1, 1, 2, "g", "nccl", False)
                )
            await engine.wake_up(tags=["weights"])
            assert await engine.reset_prefix_cache()
            assert (await said(engine)).token_ids == expected([0] * NUM_TOKENS)

    asyncio.run(scenario())


def upstream_arguments(**given: Any) -> Any:
    """What `create_vllm_engines` gives its actors, at their flags' defaults."""
    import vllm

    from belayer_rollout.models import ensure_model

    return vllm.AsyncEngineArgs(
        **{
            "model": str(ensure_model("tiny")),
            "enforce_eager": False,
            "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
            "tensor_parallel_size": 1,
            "seed": 42,
            "distributed_executor_backend": "uni",
            "max_model_len": 2048,
            "enable_prefix_caching": False,
            "dtype": "bfloat16",
            "trust_remote_code": True,
            "gpu_memory_utilization": 0.95,
            "enable_sleep_mode": False,
        }
        | given
    )


def test_upstreams_arguments_are_those_of_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    from belayer_integrations.openrlhf.shadow.engine import ShadowEngine

    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    engine = ShadowEngine.from_engine_args(upstream_arguments(), ShadowOptions(kv_cache_bytes=1 << 26))
    assert dict(engine._arguments.engine_args) == {
        "seed": 42,
        "distributed_executor_backend": "uni",
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "gpu_memory_utilization": 0.95,
        "kv_cache_memory_bytes": 1 << 26,
    }
    with pytest.raises(ShadowUnavailable, match="tensor_parallel_size"):
        ShadowEngine.from_engine_args(upstream_arguments(tensor_parallel_size=2), ShadowOptions())


def test_nothing_is_replaced_in_a_process_that_is_no_actor() -> None:
    import vllm
    from belayer_integrations.openrlhf.shadow.install import engine_of, install
    from vllm.v1.engine.async_llm import AsyncLLM

    assert not install(ShadowOptions())
    assert vllm.AsyncLLMEngine is AsyncLLM
    with pytest.raises(ShadowUnavailable, match="object"):
        engine_of(type("Actor", (), {"llm": object()})())
