"""`belayer bench failover`: what a worker's death costs, held against a cold start in the same run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from belayer_bench.report import Report
    from belayer_rollout.bench.failover import Round

__all__ = ["failover", "summarise"]

IN_FLIGHT = 1000


class Engine(StrEnum):
    """What is measured."""

    VLLM = "vllm"
    SCRIPTED = "scripted"


class Model(StrEnum):
    """What the engine serves."""

    TINY = "tiny"
    SMOLLM2 = "smollm2"


def failover(
    engine: Annotated[
        Engine, typer.Option(help="vllm: take-overs of a real pair; scripted: the client's own speed alone.")
    ] = Engine.VLLM,
    model: Model = Model.TINY,
    rounds: Annotated[int, typer.Option(min=1, help="Kills; with scripted, comparisons. For medians.")] = 5,
    cold_starts: Annotated[int, typer.Option(min=1)] = 3,
    journal_rounds: Annotated[
        int, typer.Option(min=1, help="With the journal and without it, each time twice; half a minute each.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Kill the primary engine in mid-generation, again and again, and compare with starting it anew.

    Needs vLLM for `--engine vllm` (a checkout's scripts/install-vllm puts it into .venv-vllm)."""
    from rich.console import Console

    from belayer_bench.show import show_report
    from belayer_bench.stdout import stdout_to_stderr
    from belayer_rollout.errors import RolloutError

    console = Console(stderr=True)
    try:
        with (
            console.status("starting") as status,
            stdout_to_stderr(),
            tempfile.TemporaryDirectory(prefix="belayer-") as scratch,
        ):
            report = asyncio.run(
                _scripted(rounds, Path(scratch), status.update)
                if engine is Engine.SCRIPTED
                else _vllm(model.value, rounds, cold_starts, journal_rounds, Path(scratch), status.update)
            )
    except RolloutError as error:
        typer.secho(f"belayer: {type(error).__name__}: {error}", err=True, fg="red")
        raise typer.Exit(1) from error
    show_report(report, as_json)
    checks = report.checks.values()
    if not all(check if isinstance(check, bool) else check["met"] for check in checks):
        raise typer.Exit(1)


async def _scripted(rounds: int, scratch: Path, say: Callable[[str], Any]) -> Report:
    from belayer_bench.machine import Machine
    from belayer_bench.report import Report, Target
    from belayer_rollout.bench.throughput import client_throughput

    kept, unkept = [], []
    for number in range(rounds):
        say(f"{IN_FLIGHT} requests at once, round {number + 1} of {rounds}")
        kept.append(await client_throughput(scratch / f"{number}.db", in_flight=IN_FLIGHT))
        unkept.append(await client_throughput(None, in_flight=IN_FLIGHT))
    cost_pct = median(100 * (1 - with_it / without) for with_it, without in zip(kept, unkept, strict=True))
    return Report(
        bench="failover, the client alone",
        machine=Machine.here(),
        medians={"tokens_per_s": median(kept), "tokens_per_s_without_journal": median(unkept)},
        ratios={"journal_cost_pct": cost_pct},
        checks={
            "tokens_per_s": Target(at_least=20_000).check(median(kept)),
            "journal_cost_pct": Target(at_most=2.0).check(cost_pct),
        },
        notes={
            "tokens_per_s": f"one client process, {IN_FLIGHT} requests in flight, one token an event, "
            "journal strict; the server runs on the same cores"
        },
    )


async def _vllm(
    model: str, rounds: int, cold_starts: int, journal_rounds: int, scratch: Path, say: Callable[[str], Any]
) -> Report:
    from belayer_bench.machine import Machine
    from belayer_rollout.bench import failover as bench
    from belayer_rollout.bench.cold import cold_start_s
    from belayer_rollout.bench.tripwire import Tripwire
    from belayer_rollout.client import RolloutClient
    from belayer_rollout.errors import EngineMissing
    from belayer_rollout.models import ensure_model
    from belayer_rollout.pair_state import PairState
    from belayer_rollout.shadow import ShadowPair

    if find_spec("vllm") is None:
        raise EngineMissing("vLLM is not installed in this environment. Try: scripts/install-vllm")
    say(f"making the model {model}")
    folder = ensure_model(model)
    num_tokens = bench.NUM_TOKENS[model]
    cold = []
    for number in range(cold_starts):
        say(f"cold start {number + 1} of {cold_starts}")
        cold.append(await asyncio.to_thread(cold_start_s, folder, bench.ENGINE_ARGS))
    pair = ShadowPair(folder, engine_args=bench.ENGINE_ARGS)
    wire = Tripwire(pair)
    try:
        say("starting the pair")
        async with RolloutClient([wire], journal=scratch / "tokens.db", owns_workers=False) as client:
            say("waiting for the shadow")
            await pair.wait_for(PairState.GUARDED)
            say("the undisturbed run")
            undisturbed = [one.token_ids for one in await bench.play(client, num_tokens)]
            found = []
            for number in range(rounds):
                say(f"kill {number + 1} of {rounds}")
                found.append(await bench.take_over(pair, wire, client, num_tokens))
        await pair.wait_for(PairState.GUARDED)
        tokens = bench.SPEED_TOKENS[model]
        speeds = await bench.journal_cost(pair, scratch / "speed.db", tokens, journal_rounds, say)
    finally:
        await pair.close()
    return summarise(model, Machine.here(), cold, undisturbed, found, speeds)


def summarise(
    model: str,
    machine: Any,
    cold_s: list[float],
    undisturbed: list[tuple[int, ...]],
    rounds: list[Round],
    speeds: list[tuple[float, float]],
) -> Report:
    """The report of a run: medians in milliseconds, ratios of the cold start over each clock. Pure."""
    from belayer_bench.report import Report, Target

    medians = {"cold_ms": median(cold_s) * 1000}
    for name in ("detect", "fence", "check", "activate", "swap", "first_token", "all_requests"):
        medians[f"{name}_ms"] = median(getattr(one, f"{name}_s") for one in rounds) * 1000
    ratios = {
        f"cold_over_{name}": medians["cold_ms"] / medians[f"{name}_ms"]
        for name in ("swap", "first_token", "all_requests")
    }
    medians["tokens_per_s"] = median(kept for kept, _ in speeds)
    costs_pct = [100 * (1 - kept / unkept) for kept, unkept in speeds]
    cost_pct = median(costs_pct)
    targets = {
        "tiny": {"cold_over_all_requests": 60.0, "cold_over_swap": 400.0},
        "smollm2": {"cold_over_first_token": 42.0, "cold_over_all_requests": 18.0},
    }
    return Report(
        bench=f"failover, vllm, {model}",
        machine=machine,
        medians=medians,
        ratios={**ratios, "journal_cost_pct": cost_pct},
        checks={
            "tokens_identical": all(list(one.token_ids) == undisturbed for one in rounds),
            "by_the_shadow": all(one.path == "shadow" for one in rounds),
            **{
                name: Target(at_least=least).check(ratios[name])
                for name, least in targets.get(model, {}).items()
            },
            "journal_cost_pct": Target(at_most=2.0).check(cost_pct),
        },
        notes={
            "cold": "a fresh interpreter until the first token of a fresh engine",
            "swap": "fault seen until the shadow takes requests",
            "detect": "kill -9 of EngineCore until the fault is seen",
            "first_token": "the same kill until the shadow's first token, of any request",
            "all_requests": f"the same kill until its first token of each of {len(undisturbed)} requests",
            "journal_cost_pct": "tokens per second lost by the journal (strict), the two in turn; of "
            f"{len(speeds)} rounds, which were {', '.join(f'{cost:.1f}' for cost in costs_pct)}",
        },
    )
