"""`belayer rollout serve`: an OpenAI-compatible endpoint whose requests outlive its workers."""

from __future__ import annotations

import asyncio
import signal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from belayer_rollout.engines.base import EngineWorker

__all__ = ["serve"]


class Engine(StrEnum):
    """How the model is run."""

    PAIR = "pair"
    VLLM = "vllm"
    HF = "hf"


def serve(
    model: Annotated[
        str, typer.Option(help="A folder in transformers' format, or tiny or smollm2, which are made here.")
    ] = "",
    engine: Annotated[
        Engine,
        typer.Option(help="pair: vLLM and its shadow; vllm: one alone; hf: transformers, to debug."),
    ] = Engine.PAIR,
    worker: Annotated[
        list[str] | None,
        typer.Option(help="A server's URL to stand in front of, instead of --model; several make a fleet."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Its folder; by default the model's. Without one, prompts are token ids.")
    ] = "",
    name: Annotated[str, typer.Option(help="What clients call the model.")] = "",
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    journal: Annotated[Path, typer.Option(help="Where every token is kept; ':memory:' for nowhere.")] = Path(
        "tokens.db"
    ),
    durability: Annotated[
        str, typer.Option(help="strict, or relaxed: at most 50 ms of tokens behind.")
    ] = "strict",
    kv_cache_mib: Annotated[int, typer.Option(min=16, help="For each engine.")] = 256,
    max_model_len: Annotated[int, typer.Option(min=16)] = 2048,
) -> None:
    """Serve a model so that no fault of a worker loses a token.

    POST /v1/completions and /v1/chat/completions as vLLM's server has them (token ids with
    "return_token_ids"); GET /belayer/status, /metrics, /health; GET or DELETE /belayer/requests/ID;
    POST /belayer/weights."""
    from belayer_rollout.errors import RolloutError

    if bool(model) == bool(worker):
        raise typer.BadParameter("give --model or --worker, one of the two")
    try:
        asyncio.run(
            _serve(
                workers=lambda: _workers(model, engine, worker or [], kv_cache_mib, max_model_len),
                tokenizer=tokenizer,
                model=model,
                name=name,
                at=(host, port),
                journal=journal,
                durability=durability,
            )
        )
    except RolloutError as error:
        typer.secho(f"belayer: {type(error).__name__}: {error}", err=True, fg="red")
        raise typer.Exit(1) from error


async def _serve(
    *,
    workers: Any,
    tokenizer: str,
    model: str,
    name: str,
    at: tuple[str, int],
    journal: Path,
    durability: Any,
) -> None:
    from belayer_rollout.client import RolloutClient
    from belayer_rollout.serve import make_app, run_app

    ended = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    fleet: list[EngineWorker] = workers()
    client = RolloutClient(
        fleet, journal=None if str(journal) == ":memory:" else journal,
        tokenizer=(decoder := _tokenizer(tokenizer or _folder(model))), durability=durability,
    )  # fmt: skip
    try:
        typer.echo(f"Starting {', '.join(one.name for one in fleet)} ...", err=True)
        starting = asyncio.ensure_future(client.start())
        stopping = asyncio.ensure_future(ended.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        await starting
        app = make_app(client, model=name or Path(model or fleet[0].name).name, tokenizer=decoder)
        runner, port = await run_app(app, host=at[0], port=at[1])
        typer.echo(f"Serving on http://{at[0]}:{port}/v1", err=True)
        try:
            await stopping
        finally:
            await runner.cleanup()
    finally:
        await client.aclose()


def _workers(
    model: str, engine: Engine, urls: list[str], kv_cache_mib: int, max_model_len: int
) -> list[EngineWorker]:
    if urls:
        from belayer_rollout.engines.http import HttpWorker

        return [HttpWorker(url) for url in urls]
    folder = _folder(model)
    engine_args = {"kv_cache_memory_bytes": kv_cache_mib * 2**20, "max_model_len": max_model_len}
    if engine is Engine.HF:
        from belayer_rollout.engines.hf import HfWorker

        return [HfWorker(folder, name="hf")]
    if engine is Engine.VLLM:
        from belayer_rollout.engines.vllm import VllmWorker

        return [VllmWorker(folder, name="vllm", engine_args=engine_args)]
    from belayer_rollout.shadow import ShadowPair

    return [ShadowPair(folder, name="pair", engine_args=engine_args)]


def _folder(model: str) -> str:
    from belayer_rollout.models import MODELS, ensure_model

    return str(ensure_model(model)) if model in MODELS else model


def _tokenizer(folder: str) -> Any | None:
    if not folder:
        return None
    from belayer_rollout.errors import EngineMissing

    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EngineMissing(
            "text needs transformers: pip install transformers, or serve token ids only"
        ) from error
    return AutoTokenizer.from_pretrained(folder)
