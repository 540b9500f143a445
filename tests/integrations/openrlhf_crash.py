"""One sample, in a process that dies at a given instant: `python -m` this INSTANT STORE SEED REPLAY."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from belayer_integrations.encoding import Encoder
from belayer_integrations.openrlhf.calls import Call, call_under_way
from belayer_integrations.openrlhf.rollouts import Rollouts
from belayer_integrations.openrlhf.terms import Terms

from belayer_env import ContainerEnv, Task
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.store import Store
from tests.integrations.openrlhf_text import Characters, Params
from tests.memory_sandbox import MemoryRuntime

CALL = Call("actor", "task")
DEATH = 9
TURNS = 5
FATAL_TURN = 3
"""The one (from 1) around which the process dies."""


class Fatal:
    """An instant at which this process ends, as by a SIGKILL."""

    def __init__(self, instant: str) -> None:
        self._instant = instant

    def at(self, instant: str, turn: int = FATAL_TURN) -> None:
        if instant == self._instant and turn == FATAL_TURN:
            os._exit(DEATH)


class Counts:
    """A model whose turns are drawn from their seeds, and which the observations depend on; silent in the
    end."""

    def __init__(self, fatal: Fatal) -> None:
        self.num_asked = 0
        self._fatal = fatal

    async def generate(self, token_ids: list[int], params: Params, multi_modal_data: None) -> Any:
        self.num_asked += 1
        turn = Characters().decode(token_ids, True).count("|") + 1
        self._fatal.at("talk", turn)
        assert params.seed is not None
        said = f"V=$((V+{params.seed % 1000})); echo $V|" if turn <= TURNS else "|"
        ids = [ord(character) for character in said]
        logprobs = [{token: SimpleNamespace(logprob=-token / 7)} for token in ids]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")]
        )


def terms(fatal: Fatal, root: Path, runtime: SandboxRuntime, replay: Any) -> Terms:
    class Env(ContainerEnv):
        def reset(self, **options: Any) -> Any:
            found = super().reset(**options)
            fatal.at("begun")
            return found

        def step(self, action: str) -> Any:
            turn = len(self.episode.ledger) + 1
            fatal.at("booked", turn)
            found = super().step(action)
            fatal.at("ledger", turn)
            return found

        def close(self) -> None:
            fatal.at("played")
            super().close()
            fatal.at("closed")

    def reward(sandbox: Any, ledger: Any) -> float:
        fatal.at("run", len(ledger))
        return float(sandbox.run("echo $V").output)

    task = Task(image="rootfs:/none", instruction="go: ", reward=reward, replay=replay)
    options: dict[str, Any] = {"runtime": runtime, "policy": "never"}
    return Terms(
        make_env=lambda prompt, label: Env(task, store=root, **options),
        resume_env=lambda prompt, label, episode_id, store: Env.resume(
            episode_id, reward=reward, store=store, **options
        ),
        books_root=lambda: root / "openrlhf",
        max_turns=9,
        max_turn_tokens=None,
        parse_action=lambda text: text.rstrip("|") or None,
        encode_observation=lambda tokenizer, text: Encoder(tokenizer).text_ids(text),
        total=sum,
        attempts=2,
        reset_timeout_s=30.0,
        step_timeout_s=30.0,
        most_lost_in_a_row=16,
    )


def play(
    instant: str, root: Path, seed: int | None, *, replay: str = "always", **given: Any
) -> tuple[dict[str, Any], int]:
    """The sample, and how often the model was asked. ``given``: other terms."""
    fatal = Fatal(instant)
    engine = Counts(fatal)
    made = Rollouts(dataclasses.replace(terms(fatal, root, MemoryRuntime(), replay), **given))

    async def execute() -> dict[str, Any]:
        with call_under_way(CALL):
            return await made.execute("p: ", "label", Params(seed=seed), 500, Characters(), engine)

    return asyncio.run(execute()), engine.num_asked


def open_episodes(root: Path) -> list[str]:
    with Store(root) as store:
        return [episode.id for episode in store.episodes() if episode.state == "open"]


def main() -> None:
    instant, root, seed, replay = sys.argv[1:]
    play(instant, Path(root), int(seed) if seed else None, replay=replay)
    raise SystemExit(f"nothing happened at {instant!r}")


if __name__ == "__main__":
    main()
