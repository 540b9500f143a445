"""TRL's `rollout_func`: whole batches of multi-turn episodes in containers. Seconds, tokens.

All samples go in step: one batched generation, then all their commands at once, each in its own container. A
sample that cannot go on leaves the batch as a failed one and takes none of its siblings with it.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from belayer_integrations.actions import last_command
from belayer_integrations.encoding import Encoder, Prompt, add_to_prompt
from belayer_integrations.timed import TimedEnv
from belayer_integrations.trajectory import Rollout, Trajectory
from belayer_integrations.trl.generation import Generate, Turn, TurnRequest, trainer_model

from belayer_env import ContainerEnv, Task
from belayer_env.errors import Fault, InvalidInput
from belayer_env.policy import CheckpointPolicy
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.store import Store

__all__ = ["RolloutFunc", "container_reward", "make_rollout_func"]

CLOSE_S = 30.0
"""How long a batch's envs may take to close, all together; they do it at once."""

_LAST_WAIT_S = 5.0
_MOST_ROLLBACKS = 8
_SEED_BITS = 62

log = logging.getLogger(__name__)
T = TypeVar("T")


def make_rollout_func(
    task_of: Callable[[Prompt], Task],
    *,
    max_turns: int,
    max_turn_tokens: int | None = None,
    parse_action: Callable[[str], str | None] = last_command,
    encode_observation: Callable[[Any, str], Sequence[int]] | None = None,
    total: Callable[[Sequence[float]], float] = sum,
    reset_timeout_s: float = 900.0,
    step_timeout_s: float = 600.0,
    generate: Generate | None = None,
    env: Callable[..., ContainerEnv] = ContainerEnv,
    runtime: str | SandboxRuntime = "auto",
    policy: str | CheckpointPolicy = "adaptive",
    standby: bool = False,
    store: Store | str | Path | None = None,
) -> RolloutFunc:
    """A `rollout_func` for `trl.GRPOTrainer`; give the trainer `container_reward` among its ``reward_funcs``.

    ``task_of``: from a prompt of the data set to its task; the task's instruction, if any, is added to the
    prompt's last message. ``max_turns`` and ``max_turn_tokens`` bound an episode and a turn; the trainer's
    ``max_completion_length`` bounds all of its tokens, observations too. ``parse_action``: from a turn's text
    to the command in it, None if there is none, which ends the episode. ``encode_observation(tokenizer,
    text)``: the tokens between two turns, by default what the chat template makes of a user's message, or
    just the text's. ``total``: from the rewards of an episode's steps to its reward.

    ``reset_timeout_s`` and ``step_timeout_s`` bound the wait for the slowest container, its recoveries
    included: a sample that takes longer has failed. A failed sample has reward None (TRL leaves it out of its
    group's baseline), no loss, and its exception's text in ``container_error``.

    ``generate`` replaces generation by the trainer's own model. ``runtime``, ``policy``, ``standby`` and
    ``store`` go to ``env``.

    Raises:
        InvalidInput: a bound that is not positive."""
    bounds = {
        "max_turns": max_turns,
        "max_turn_tokens": 1 if max_turn_tokens is None else max_turn_tokens,
        "reset_timeout_s": reset_timeout_s,
        "step_timeout_s": step_timeout_s,
    }
    for name, value in bounds.items():
        if not value > 0:
            raise InvalidInput(f"{name} must be positive, not {value!r}")
    options = {"runtime": runtime, "policy": policy, "standby": standby, "store": store}
    return RolloutFunc(
        _Terms(
            make_env=lambda prompt: env(task_of(prompt), **options),
            max_turns=max_turns,
            max_turn_tokens=max_turn_tokens,
            parse_action=parse_action,
            encode_observation=encode_observation,
            total=total,
            reset_timeout_s=reset_timeout_s,
            step_timeout_s=step_timeout_s,
            generate=generate,
        )
    )


def container_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    container_reward: Sequence[float | None] | None = None,
    container_recoveries: Sequence[int] = (),
    container_rollbacks: Sequence[int] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """A reward function for TRL: what the containers said. None for a failed sample.

    Raises:
        InvalidInput: the trainer's rollout_func is not one of `make_rollout_func`."""
    if container_reward is None:
        raise InvalidInput("container_reward wants GRPOTrainer(rollout_func=make_rollout_func(...))")
    rewards = list(container_reward)
    if log_metric is not None:
        log_metric("container/failed", float(sum(reward is None for reward in rewards)))
        log_metric("container/recoveries", float(sum(container_recoveries)))
        log_metric("container/rollbacks", float(sum(container_rollbacks)))
    return rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What `make_rollout_func` was told."""

    make_env: Callable[[Prompt], ContainerEnv]
    max_turns: int
    max_turn_tokens: int | None
    parse_action: Callable[[str], str | None]
    encode_observation: Callable[[Any, str], Sequence[int]] | None
    total: Callable[[Sequence[float]], float]
    reset_timeout_s: float
    step_timeout_s: float
    generate: Generate | None


class RolloutFunc:
    """Made by `make_rollout_func`; called by the trainer. Envs that were given up end in the background:
    `close` waits for them."""

    def __init__(self, terms: _Terms) -> None:
        self._terms = terms
        self._seeds: random.Random | None = None
        self._given_up: list[threading.Thread] = []
        atexit.register(self.close, _LAST_WAIT_S)

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> Mapping[str, Any]:
        """One sample a prompt (TRL has repeated each prompt ``num_generations`` times).

        Raises:
            Exception: no sample's env could be made, and no fault was the cause: a mistake, not bad luck."""
        if self._seeds is None:
            # From Python's own stream, which the trainer has seeded, but once: others draw from that too, and
            # more often where there are faults.
            self._seeds = random.Random(random.getrandbits(_SEED_BITS))
        batch = _Batch(self._terms, prompts, trainer, self._seeds.getrandbits(_SEED_BITS))
        try:
            batch.reset()
            while batch.running():
                batch.turn()
        finally:
            batch.close()
            self._given_up = [old for old in self._given_up if old.is_alive()] + batch.given_up
        return batch.result()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait for what was given up; False if some is still there: a reward that hangs, say."""
        until = time.monotonic() + timeout_s
        for closing in self._given_up:
            closing.join(max(0.0, until - time.monotonic()))
        return not any(closing.is_alive() for closing in self._given_up)


class _Sample:
    """One prompt's env and trajectory."""

    def __init__(self, number: int, seed: int, prompt: Prompt, trajectory: Trajectory, env: TimedEnv) -> None:
        self.number = number
        self.seeds = random.Random(seed)
        self.prompt = prompt
        self.trajectory = trajectory
        self.env = env
        self.num_recoveries = 0


class _Batch:
    """The samples of one call."""

    def __init__(self, terms: _Terms, prompts: Sequence[Prompt], trainer: Any, seed: int) -> None:
        self._terms = terms
        self._trainer = trainer
        self._encoder = Encoder.of_trainer(trainer)
        self._generate = terms.generate or trainer_model(trainer)
        self.given_up: list[threading.Thread] = []
        self.samples = [
            _Sample(number, seed ^ number, prompt, self._trajectory(prompt), self._env(prompt))
            for number, prompt in enumerate(prompts)
        ]

    def running(self) -> list[_Sample]:
        """Those that are not over."""
        return [sample for sample in self.samples if sample.trajectory.end is None]

    def reset(self) -> None:
        """Make and reset all envs."""
        errors: list[BaseException] = []

        def begin(sample: _Sample, observation: str) -> None:
            if observation:
                sample.trajectory = self._trajectory(add_to_prompt(sample.prompt, observation))

        starts = [(sample, sample.env.start()) for sample in self.samples]
        self._settle(starts, self._terms.reset_timeout_s, "reset", begin, errors)
        if errors and len(errors) == len(self.samples) and not any(isinstance(e, Fault) for e in errors):
            raise errors[0]

    def turn(self) -> None:
        """The model's turn, and the envs' answers."""
        running = self.running()
        requests = [
            TurnRequest(
                sample.trajectory.conversation.token_ids,
                self._room(sample),
                sample.number,
                sample.seeds.getrandbits(_SEED_BITS),
            )
            for sample in running
        ]
        turns: Sequence[Turn] = self._generate(requests)
        steps = []
        for sample, turn in zip(running, turns, strict=True):
            sample.trajectory.speak(turn.token_ids, turn.logprobs)
            action = self._terms.parse_action(self._encoder.text(turn.token_ids))
            if action is None:
                sample.trajectory.fall_silent()
                sample.env.close()
            else:
                steps.append((sample, sample.env.step(action)))

        self._settle(steps, self._terms.step_timeout_s, "step", self._observe)

    def close(self) -> None:
        """All envs end; those that somebody waits for are waited for."""
        closings = [sample.env.close() for sample in self.samples]
        until = time.monotonic() + CLOSE_S
        for closing in closings:
            if closing not in self.given_up:
                closing.join(max(0.0, until - time.monotonic()))
        self.given_up = [closing for closing in closings if closing.is_alive()]

    def result(self) -> dict[str, Any]:
        """What TRL takes, and extra fields for reward functions."""
        rollouts: list[Rollout] = [
            sample.trajectory.rollout(self._terms.total, filler_id=self._encoder.filler_id)
            for sample in self.samples
        ]
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "logprobs": [rollout.logprobs for rollout in rollouts],
            "env_mask": [rollout.env_mask for rollout in rollouts],
            "container_reward": [rollout.reward for rollout in rollouts],
            "container_error": [rollout.error for rollout in rollouts],
            "container_recoveries": [sample.num_recoveries for sample in self.samples],
            "container_rollbacks": [len(sample.trajectory.rollbacks) for sample in self.samples],
        }

    def _observe(self, sample: _Sample, result: tuple[str, float, bool, bool, dict[str, Any]]) -> None:
        text, reward, terminated, truncated, info = result
        if "rollback" in info:
            sample.trajectory.undo(info["rollback"])
        else:
            is_over = terminated or truncated
            ids = [] if is_over else self._observation(sample, text)
            sample.trajectory.observe(ids, reward, is_over=is_over)
        if sample.env.env is not None:
            sample.num_recoveries = len(sample.env.env.telemetry.recoveries)
        if sample.trajectory.end is not None:
            sample.env.close()

    def _settle(
        self,
        calls: Sequence[tuple[_Sample, Future[T]]],
        timeout_s: float,
        what: str,
        then: Callable[[_Sample, T], None],
        errors: list[BaseException] | None = None,
    ) -> None:
        """Wait for calls of many envs. One that raises, or takes too long, is the end of its sample alone;
        but an interrupt is an interrupt."""
        _await([future for _, future in calls], timeout_s)
        for sample, future in calls:
            error: BaseException | None
            if future.done():
                error = future.exception()
                if error is None:
                    then(sample, future.result())
                    continue
            else:
                error = TimeoutError(f"the {what} took longer than {what}_timeout_s={timeout_s:g}")
                self.given_up.append(sample.env.close())
            if not isinstance(error, Exception):
                raise error  # it came at the last moment
            text = f"{type(error).__name__}: {error}"
            log.warning("sample %d has failed in its %s: %s", sample.number, what, text, exc_info=error)
            sample.trajectory.fail(text)
            sample.env.close()
            if errors is not None:
                errors.append(error)

    def _trajectory(self, prompt: Prompt) -> Trajectory:
        return Trajectory(
            self._encoder.prompt(prompt),
            max_turns=self._terms.max_turns,
            max_tokens=self._trainer.max_completion_length,
            max_rollbacks=_MOST_ROLLBACKS,
        )

    def _env(self, prompt: Prompt) -> TimedEnv:
        return TimedEnv(lambda: self._terms.make_env(prompt))

    def _room(self, sample: _Sample) -> int:
        left = sample.trajectory.tokens_left
        most = self._terms.max_turn_tokens
        return left if most is None else min(left, most)

    def _observation(self, sample: _Sample, text: str) -> Sequence[int]:
        if self._terms.encode_observation is not None:
            return self._terms.encode_observation(self._encoder.tokenizer, text)
        return self._encoder.observation(sample.prompt, text)


def _await(futures: Sequence[Future[Any]], timeout_s: float) -> None:
    """Until all are done, or the time is; at once, by raising it, if one brings an interrupt."""
    until = time.monotonic() + timeout_s
    pending = set(futures)
    while pending and (left_s := until - time.monotonic()) > 0:
        done, pending = wait(pending, timeout=left_s, return_when=FIRST_EXCEPTION)
        for future in done:
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
