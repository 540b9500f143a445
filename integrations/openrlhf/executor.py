"""The class that `--train.agent_func_path` asks for. Seconds, tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from belayer_integrations.actions import last_command
from belayer_integrations.encoding import Encoder
from belayer_integrations.errors import openrlhf_unavailable
from belayer_integrations.openrlhf.rollouts import Rollouts
from belayer_integrations.openrlhf.shadow import ShadowOptions
from belayer_integrations.openrlhf.shadow.install import engine_of, install
from belayer_integrations.openrlhf.terms import Terms

from belayer_env import ContainerEnv, Task, paths
from belayer_env.host.store_mount import ensure_mounted
from belayer_env.policy import CheckpointPolicy
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.store import Store

__all__ = ["agent_executor", "as_user_message"]

_BOOKS = "openrlhf"
"""The directory in the store that holds the books of samples."""


def as_user_message(tokenizer: Any, text: str) -> list[int]:
    """An ``encode_observation`` for prompts that are rendered by the tokenizer's chat template
    (``--data.apply_chat_template``): the end of the model's turn, a user's message, the beginning of the
    next turn."""
    return Encoder(tokenizer).user_message(text)


def agent_executor(
    task_of: Callable[[str, Any], Task],
    *,
    max_turns: int,
    max_turn_tokens: int | None = None,
    parse_action: Callable[[str], str | None] = last_command,
    encode_observation: Callable[[Any, str], Sequence[int]] | None = None,
    total: Callable[[Sequence[float]], float] = sum,
    attempts: int = 2,
    reset_timeout_s: float = 900.0,
    step_timeout_s: float = 600.0,
    most_lost_in_a_row: int = 16,
    env: Callable[..., ContainerEnv] = ContainerEnv,
    runtime: str | SandboxRuntime = "auto",
    policy: str | CheckpointPolicy = "adaptive",
    standby: bool = False,
    store: Store | str | Path | None = None,
    shadow: bool | ShadowOptions = False,
) -> type[Any]:
    """An `AgentExecutor` for OpenRLHF's ``--train.agent_func_path``: a container env for each sample.

    ``task_of``: from a prompt and its label to the task; what the task's instruction says is added to the
    prompt. ``max_turns`` and ``max_turn_tokens`` bound an episode and a turn, as ``--rollout.max_new_tokens``
    does the latter; ``--data.max_len`` bounds all of its tokens, observations too. ``parse_action``: from a
    turn's text to the command in it, None if there is none, which ends the episode.
    ``encode_observation(tokenizer, text)``: the tokens between two turns, by default just the text's; see
    `as_user_message`. ``total``: from the rewards of an episode's steps to its reward.

    ``reset_timeout_s`` and ``step_timeout_s`` bound the wait for the container, its recoveries included. An
    episode that a fault has ended (and only such a one) is begun afresh, ``attempts`` in all. A sample that
    cannot be had comes back without any action, with the mean of its siblings' rewards for its own, and
    with its exception's text under ``error``. ``most_lost_in_a_row``: so many of one actor, and the last
    error is raised.

    ``runtime``, ``policy``, ``standby`` and ``store`` go to ``env``. Where dead actors are started again
    (`keep_actors_alive`), episodes that one leaves are gone on with: by ``env.resume``, if it is a class, and
    else as a plain `ContainerEnv`.

    ``shadow``: the actor's engine becomes a shadow pair, which survives the death of its EngineCore; see
    `ShadowOptions`, and docs/openrlhf.md for what that costs. What does not go together with it ends the
    actor's construction with `ShadowUnavailable`.

    Raises:
        InvalidInput: a bound that is not positive.
        TrainerUnavailable: OpenRLHF is not installed."""
    try:
        from openrlhf.utils.agent import AgentExecutorBase
    except ImportError as error:
        raise openrlhf_unavailable(error) from error

    options = {"runtime": runtime, "policy": policy, "standby": standby, "store": store}

    def resume_env(prompt: str, label: Any, episode_id: str, root: Path) -> ContainerEnv:
        kind = env if isinstance(env, type) and issubclass(env, ContainerEnv) else ContainerEnv
        return kind.resume(
            episode_id,
            reward=task_of(prompt, label).reward,
            runtime=None if isinstance(runtime, str) else runtime,
            policy=None if isinstance(policy, str) else policy,
            standby=standby,
            store=root,
        )

    def books_root() -> Path:
        if store is None:
            ensure_mounted()
            return paths.default_store() / _BOOKS
        return (store.root if isinstance(store, Store) else Path(store)) / _BOOKS

    terms = Terms(
        make_env=lambda prompt, label: env(task_of(prompt, label), **options),
        resume_env=resume_env,
        books_root=books_root,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        parse_action=parse_action,
        encode_observation=encode_observation or _as_text,
        total=total,
        attempts=attempts,
        reset_timeout_s=reset_timeout_s,
        step_timeout_s=step_timeout_s,
        most_lost_in_a_row=most_lost_in_a_row,
    )

    shadowed = ShadowOptions() if shadow is True else shadow or None

    class AgentExecutor(AgentExecutorBase):
        """Made by `agent_executor`."""

        def __init__(self) -> None:
            self.rollouts = Rollouts(terms)
            # The actor makes its executor before its engine.
            self.has_shadow = shadowed is not None and install(shadowed)

        async def execute(
            self,
            prompt: str,
            label: Any,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> dict[str, Any]:
            """See `Rollouts.execute`."""
            if self.has_shadow:
                engine_of(llm_engine)
            return await self.rollouts.execute(
                prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images
            )

    return AgentExecutor


def _as_text(tokenizer: Any, text: str) -> list[int]:
    return Encoder(tokenizer).text_ids(text)
