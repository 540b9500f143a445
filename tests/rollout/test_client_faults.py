"""Any script of faults over several workers comes to what no fault at all would have come to."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from belayer_rollout.client import RolloutClient
from belayer_rollout.drive import Budget
from belayer_rollout.journal_base import MemoryJournal
from belayer_rollout.types import ModelInfo, SamplingParams
from tests.rollout.scripted import EOS, UNTOLD, Fault, ScriptedWorker, bits, undisturbed
from tests.rollout.test_client import assert_undisturbed
from tests.rollout.virtual import run_virtual, until

KINDS = [
    "die",
    UNTOLD,
    "end early",
    "hang",
    "stuck stream",
    "no logprobs",
    "no ids",
    "duplicate",
    "skip",
    "too many",
    "abort",
    "busy",
]

faults = st.builds(
    Fault,
    kind=st.sampled_from(KINDS),
    after=st.integers(0, 40),
    retry_after_s=st.sampled_from([None, 0.5, 20.0]),
)
workers: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    faults=st.lists(st.none() | faults, max_size=6),
    chunk=st.integers(1, 9),
    gap_s=st.sampled_from([0.0, 0.01, 0.7]),
    final_event_apart=st.booleans(),
    recovers_itself=st.booleans(),
    health_s=st.sampled_from([0.0, 3.0]),
    hang_s=st.sampled_from([1.0, 100.0]),
)
params = st.builds(
    lambda most, least, eos, stops: SamplingParams(
        max_tokens=most, min_tokens=min(most, least), seed=1, ignore_eos=eos, stop_token_ids=stops
    ),
    st.integers(1, 80),
    st.integers(0, 60),
    st.booleans(),
    st.lists(st.integers(0, 59), max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fleet=st.lists(workers, min_size=1, max_size=3),
    asked=st.lists(
        st.tuples(st.lists(st.integers(0, 59), min_size=1, max_size=4), params), min_size=1, max_size=4
    ),
    room=st.none() | st.integers(85, 120),
    interrupt_s=st.none() | st.sampled_from([0.0, 0.05, 0.3, 5.0]),
)
def test_any_faults_come_to_the_undisturbed_result_each_token_once(
    fleet: list[dict[str, Any]],
    asked: list[tuple[list[int], SamplingParams]],
    room: int | None,
    interrupt_s: float | None,
) -> None:
    info = ModelInfo(eos_token_ids=(EOS,), max_model_len=room)

    async def story() -> None:
        made = [
            ScriptedWorker(f"w{index}", **(one | {"faults": deque(one["faults"]), "info": info}))
            for index, one in enumerate(fleet)
        ]
        journal = MemoryJournal(keep_finished=True)
        budget = Budget(attempts=50, seconds=20_000)
        async with RolloutClient(made, journal=journal, budget=budget, owns_workers=False) as client:
            streams = [asyncio.create_task(stream(client, *one)) for one in asked]
            running = [
                asyncio.create_task(client.generate(*one, request_id=f"r{index}"))
                for index, one in enumerate(asked)
            ]
            if interrupt_s is not None:
                # The client dies; another one goes on from its journal.
                await asyncio.sleep(interrupt_s)
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
            else:
                for generation, (_, wanted) in zip(await asyncio.gather(*running), asked, strict=True):
                    assert_undisturbed(generation, wanted, limit=room)
            await asyncio.gather(*streams)
        async with RolloutClient(made, journal=journal, budget=budget) as client:
            for index, (prompt, wanted) in enumerate(asked):
                generation = await client.generate(prompt, wanted, request_id=f"r{index}")
                assert_undisturbed(generation, wanted, limit=room)

    async def stream(client: RolloutClient, prompt: list[int], wanted: SamplingParams) -> None:
        expected = undisturbed(prompt, wanted, limit=room)
        ids: list[int] = []
        logprobs: list[float] = []
        ends = []
        async for chunk in client.stream(prompt, wanted):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
            if chunk.finish_reason is not None:
                ends.append((chunk.finish_reason, chunk.stop_reason))
        assert tuple(ids) == expected.token_ids
        assert bits(logprobs) == bits(expected.logprobs)
        assert ends == [(expected.finish_reason, expected.stop_reason)]

    run_virtual(story())


def test_a_thousand_sessions_survive_the_death_of_half_the_fleet() -> None:
    async def story() -> None:
        fleet = [ScriptedWorker(f"w{index}") for index in range(4)]
        wanted = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
        async with RolloutClient(fleet) as client:
            running = [
                asyncio.create_task(client.generate([index % 50], wanted, session=f"s{index}"))
                for index in range(1000)
            ]
            await until(lambda: fleet[0].given >= 2500)
            fleet[0].kill()
            fleet[1].hang(10_000)
            generations = await asyncio.gather(*running)
        for generation in generations:
            assert_undisturbed(generation, wanted)
        # Some of the dead one's requests went to the one that hung.
        assert 500 <= sum(generation.failovers for generation in generations) <= 750

    run_virtual(story())
