"""TRL's `environment_factory`: a shell in a container as a tool, for TRL's loop of tool calls. Seconds.

TRL makes an environment for each sample of a batch and keeps them for later batches; it turns whatever a tool
raises into an observation, ends the training where a reset raises, and closes nothing. So nothing here
raises, a failed episode has reward None, and environments end with their factory, or with the process.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from belayer_integrations.timed import TimedEnv

from belayer_env import ContainerEnv, Task
from belayer_env.policy import CheckpointPolicy
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.store import Store

__all__ = ["ContainerEnvironment", "EnvironmentFactory", "environment_factory"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_CLOSE_S = 30.0
_OVER = "[the episode is over]\n"


def environment_factory(
    task_of: Callable[[Mapping[str, Any]], Task],
    *,
    reset_timeout_s: float = 900.0,
    step_timeout_s: float = 600.0,
    env: Callable[..., ContainerEnv] = ContainerEnv,
    runtime: str | SandboxRuntime = "auto",
    policy: str | CheckpointPolicy = "adaptive",
    standby: bool = False,
    store: Store | str | Path | None = None,
) -> EnvironmentFactory:
    """An ``environment_factory`` for `trl.GRPOTrainer`. ``task_of``: from a row of the data set to its task,
    whose instruction TRL adds to the prompt, and whose reward is the environment's. Options as in
    `make_rollout_func`. Close the factory after training, or use it as a context manager."""
    options = {"runtime": runtime, "policy": policy, "standby": standby, "store": store}
    return EnvironmentFactory(lambda row: env(task_of(row), **options), reset_timeout_s, step_timeout_s)


class EnvironmentFactory:
    """Made by `environment_factory`; called by TRL."""

    def __init__(
        self, make: Callable[[Mapping[str, Any]], ContainerEnv], reset_timeout_s: float, step_timeout_s: float
    ) -> None:
        self._make = make
        self._limits = (reset_timeout_s, step_timeout_s)
        self._ends: list[weakref.finalize[Any, Any]] = []

    def __call__(self) -> ContainerEnvironment:
        """An environment, with no container yet."""
        episode = _Episode(self._make, *self._limits)
        environment = ContainerEnvironment(episode)
        # Also at the interpreter's end, which does not wait for threads of ours.
        self._ends.append(weakref.finalize(environment, episode.close))
        return environment

    def close(self) -> None:
        """End all that it made. Idempotent, never raises."""
        for end in self._ends:
            end()

    def __enter__(self) -> EnvironmentFactory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ContainerEnvironment:
    """What TRL sees. Every public method is a tool for the model, but `reset` and `get_reward`."""

    def __init__(self, episode: _Episode) -> None:
        self._episode = episode

    @property
    def error(self) -> str | None:
        """What ended this episode against everybody's will; None if nothing did."""
        return self._episode.error

    def reset(self, **row: Any) -> str | None:
        """A new episode, of this row of the data set."""
        return self._episode.reset(row)

    def bash(self, command: str) -> str:
        """Run a command in the bash shell of a Linux container. The shell keeps its directory, variables and
        background jobs from one command to the next.

        Args:
            command: The command to run.

        Returns:
            What the command printed.
        """
        return self._episode.run(command)

    def get_reward(self) -> float | None:
        """The sum of the rewards of the episode's steps; None if the episode failed."""
        return self._episode.reward()


class _Episode:
    """Behind an environment: an env, made anew for each row, as each has its own task."""

    def __init__(
        self,
        make: Callable[[Mapping[str, Any]], ContainerEnv],
        reset_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self.error: str | None = None
        self._make = make
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_timeout_s
        self._env: TimedEnv | None = None
        self._rewards: list[float] = []
        self._is_over = False

    def reset(self, row: Mapping[str, Any]) -> str | None:
        self.close(wait_s=0.0)
        self.error, self._rewards, self._is_over = None, [], False
        self._env = env = TimedEnv(lambda: self._make(row))
        observation = self._result(env.start(), self._reset_timeout_s, "reset")
        return self._failure() if self.error is not None else observation or None

    def run(self, command: str) -> str:
        if self.error is not None:
            return self._failure()
        if self._is_over or self._env is None:
            return _OVER
        result = self._result(self._env.step(command), self._step_timeout_s, "step")
        if result is None:
            return self._failure()
        observation, reward, terminated, truncated, info = result
        if "rollback" in info:
            # TRL's context cannot be cut here; the observation tells the model instead.
            del self._rewards[info["rollback"].to_step :]
            return observation
        self._rewards.append(reward)
        if terminated or truncated:
            self._is_over = True
            self._env.close()
        return observation

    def reward(self) -> float | None:
        return None if self.error is not None else sum(self._rewards)

    def close(self, wait_s: float = _CLOSE_S) -> None:
        env, self._env = self._env, None
        self._is_over = True
        if env is not None:
            env.close().join(wait_s)

    def _result(self, future: Future[T], timeout_s: float, what: str) -> T | None:
        assert self._env is not None
        try:
            wait([future], timeout=timeout_s)
            if future.done():
                return future.result()
            raise TimeoutError(f"the {what} took longer than {what}_timeout_s={timeout_s:g}")
        except Exception as error:  # whatever it is, it is this episode's end alone
            self.error = f"{type(error).__name__}: {error}"
            log.warning("an episode has failed in its %s: %s", what, self.error, exc_info=error)
            self._env.close()
            return None

    def _failure(self) -> str:
        return f"[the environment has failed, and this episode will not count] {self.error}\n"
