"""ContainerEnv: a container task as a Gymnasium env. A thin face of `Episode`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import anyio
import anyio.to_thread
import gymnasium

from belayer_env.checkpoint import CheckpointRef
from belayer_env.episode import Episode, Means
from belayer_env.errors import EnvClosed, EpisodeOver, InvalidInput, NotReset, NotText
from belayer_env.host.store_mount import ensure_mounted
from belayer_env.policy import CheckpointPolicy, parse_policy
from belayer_env.rollback import Rollback
from belayer_env.runtimes import open_runtime
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.sandbox.shell import MAX_COMMAND_BYTES
from belayer_env.spaces import ActionSpace, UnicodeText
from belayer_env.spec import Reward, Task, Tier
from belayer_env.store import Store
from belayer_env.telemetry import Telemetry

__all__ = ["ContainerEnv"]


P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_ESCAPE = 4  # a byte that is not UTF-8 is shown as \xNN
_MARK_CHARS = 64
_INSTRUCTION_ROOM = 1024**2


class ContainerEnv(gymnasium.Env[str, str]):
    """A container task. Actions are shell commands, observations are what they print.

    ``info`` of a step: ``exit_code``, ``timed_out``, ``output_truncated``, ``shell_restarted``. Ids and
    timings are in `telemetry` and `episode`. Every blocking method has an async twin with an ``a`` in front;
    hundreds of envs can wait in one event loop. A cancelled twin returns when its step has ended.

    Methods that Gymnasium does not know (`checkpoint`, `restore`, ...) are reached through ``env.unwrapped``
    on an env made by `gymnasium.make`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        task: Task,
        *,
        runtime: str | SandboxRuntime = "auto",
        policy: str | CheckpointPolicy = "adaptive",
        standby: bool = False,
        standby_bytes: int | None = None,
        store: Store | str | Path | None = None,
        require: Literal["full"] | None = None,
    ) -> None:
        """``runtime``: "auto", "runc", "docker" or a SandboxRuntime. ``policy``: when to checkpoint ("never",
        "every-step", "every-5", "adaptive"). ``standby``: keep a paused clone of the newest checkpoint, so
        that recovery is a swap; ``standby_bytes`` bounds its memory (None: half of what the host has left).
        ``store``: a directory, by default below $XDG_STATE_HOME. ``require``: "full" refuses a host that
        cannot checkpoint processes.

        Raises:
            InvalidInput: an argument that is out of range or no such thing.
            SetupError: the host cannot do it; the message ends with the remedy."""
        self._closed = True
        if not isinstance(task, Task):
            raise NotText(f"task must be a belayer_env.Task, not {type(task).__name__}")
        self.task = task
        parsed = parse_policy(policy)
        self._owns_store = not isinstance(store, Store)
        self._store = store if isinstance(store, Store) else _open_store(store)
        try:
            self.runtime = open_runtime(runtime, self._store, require=require)
        except BaseException:
            self._close_store()
            raise
        self._means = Means(
            store=self._store,
            runtime=self.runtime,
            policy=parsed,
            standby=standby,
            standby_bytes=standby_bytes,
        )
        self._episode: Episode | None = None
        self._telemetry = Telemetry()
        self._lock = threading.RLock()
        self._closed = False
        longest = max(
            _LONGEST_ESCAPE * task.limits.output_bytes + _MARK_CHARS, len(task.instruction), _INSTRUCTION_ROOM
        )
        self.observation_space = UnicodeText(longest)
        self.action_space = ActionSpace(MAX_COMMAND_BYTES)

    @classmethod
    def resume(
        cls,
        episode_id: str,
        *,
        reward: Reward | None = None,
        runtime: str | SandboxRuntime | None = None,
        policy: str | CheckpointPolicy | None = None,
        standby: bool = False,
        standby_bytes: int | None = None,
        store: Store | str | Path | None = None,
    ) -> ContainerEnv:
        """An env that goes on with an episode whose process died, at the end of its ledger. The reward, being
        code, is given again; runtime and policy are by default those it was begun with. Should only a shorter
        prefix be to be had, the first step says so (see `step`).

        Raises:
            InvalidInput: the episode is unknown or closed, or its process lives.
            RecoveryFailed: its state cannot be had again."""
        opened = store if isinstance(store, Store) else _open_store(store)
        try:
            record = opened.episode(episode_id)
            task = Task.from_json(record.task, reward=reward)
            env = cls(
                task,
                runtime=runtime or record.runtime,
                policy=policy or record.policy,
                standby=standby,
                standby_bytes=standby_bytes,
                store=opened,
            )
            env._owns_store = not isinstance(store, Store)
            env._episode = Episode.resume(episode_id, task, env._means)
            env._telemetry = env._episode.telemetry
        except BaseException:
            if not isinstance(store, Store):
                opened.close()
            raise
        return env

    # -- Gymnasium

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new episode in a fresh sandbox; an episode under way is ended. The observation is the task's
        instruction.

        Raises:
            SetupError: the image or the setup commands will not do."""
        with self._lock:
            self._require_open()
            super().reset(seed=seed)
            self._end_episode()
            self._episode = Episode.begin(self.task, self._means)
            self._telemetry = self._episode.telemetry
            return self.task.instruction, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run one command; see `Episode.step`. Never truncated by itself: use gymnasium's TimeLimit.

        After a fault that no replay could undo, ``info["rollback"]`` is a `Rollback`: the action was not run,
        the ledger is cut to ``rollback.to_step``, and so must be the model's context (see `Conversation`).
        The observation says the same in words, for loops that do not look; reward 0.0, not terminated.

        Raises:
            NotReset, EpisodeOver, EnvClosed: no episode is under way; nothing ran.
            NotText, InvalidInput: the action is no command; nothing ran.
            RecoveryFailed: see `Episode.step`."""
        with self._lock:
            episode = self._require_episode()
            if episode.terminated:
                raise EpisodeOver("this episode has terminated: call reset()")
            if isinstance(action, str):
                action = str(action)  # numpy.str_ and the like
            step = episode.step(action)
            if isinstance(step, Rollback):
                told = dict.fromkeys(("timed_out", "output_truncated", "shell_restarted"), False)
                return step.message(), 0.0, False, False, {"exit_code": -1, **told, "rollback": step}
            info = {
                "exit_code": step.exit_code,
                "timed_out": step.timed_out,
                "output_truncated": step.output_truncated,
                "shell_restarted": step.shell_restarted,
            }
            return step.observation, step.reward, step.terminated, False, info

    def close(self) -> None:
        """End the episode and everything it has on the host. Idempotent, never raises."""
        if self._closed:
            return
        with self._lock:
            self._end_episode()
            self._close_store()
            self._closed = True

    # -- Belayer

    @property
    def episode(self) -> Episode:
        """The episode under way.

        Raises:
            NotReset: there is none yet."""
        return self._require_episode()

    @property
    def telemetry(self) -> Telemetry:
        """Timings, checkpoints, faults and recoveries of the last episode."""
        return self._telemetry

    @property
    def store_root(self) -> Path:
        """The directory of its store: with the episode's id all that `resume` needs, in another process."""
        return self._store.root

    @property
    def tier(self) -> Tier:
        """What checkpoints carry here."""
        return self.runtime.tier

    def checkpoint(self) -> CheckpointRef:
        """A full checkpoint of now, kept until the episode ends; see `Episode.checkpoint`."""
        with self._lock:
            return self._require_episode().checkpoint()

    def restore(self, ref: CheckpointRef) -> None:
        """Back to a checkpoint of this episode, the ledger too; see `Episode.restore`."""
        if not isinstance(ref, CheckpointRef):
            raise NotText(f"restore() takes a CheckpointRef, not {type(ref).__name__}")
        with self._lock:
            self._require_episode().restore(ref)

    # -- async twins

    def fork(self, n: int) -> list[ContainerEnv]:
        """``n`` independent envs from one instant, now: bare ones, not wrapped, each with its own sandbox,
        network, ledger (the same steps so far) and lifetime; `close` is owed for each. For groups of rollouts
        and tree search. This env goes on as before; see `Episode.fork`."""
        with self._lock:
            stores: list[Store] = []

            def open_store() -> Store:
                stores.append(Store(self._store.root) if self._owns_store else self._store)
                return stores[-1]

            try:
                episodes = self._require_episode().fork(n, open_store)
            except BaseException:
                for store in stores:
                    if store is not self._store:
                        store.close()
                raise
            return [self._forked(episode, store) for episode, store in zip(episodes, stores, strict=True)]

    def hint_bubble(self, seconds: float) -> None:
        """Tell the adaptive policy, between two steps, how many seconds it will take from now until the next
        action: a rollout client knows that better than the past does.

        Raises:
            InvalidInput: not a finite number of seconds, 0 or more."""
        self._require_episode().hint_bubble(seconds)

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """`reset`, awaited."""
        return await _in_thread(self.reset, seed=seed, options=options)

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """`step`, awaited."""
        return await _in_thread(self.step, action)

    async def acheckpoint(self) -> CheckpointRef:
        """`checkpoint`, awaited."""
        return await _in_thread(self.checkpoint)

    async def arestore(self, ref: CheckpointRef) -> None:
        """`restore`, awaited."""
        await _in_thread(self.restore, ref)

    async def afork(self, n: int) -> list[ContainerEnv]:
        """`fork`, awaited."""
        return await _in_thread(self.fork, n)

    async def aclose(self) -> None:
        """`close`, awaited; done even when cancelled."""
        with anyio.CancelScope(shield=True):
            await _in_thread(self.close)

    # -- private

    def _require_open(self) -> None:
        if self._closed:
            raise EnvClosed("this env is closed: make a new one")

    def _require_episode(self) -> Episode:
        self._require_open()
        if self._episode is None:
            raise NotReset("no episode is under way: call reset() first")
        return self._episode

    def _forked(self, episode: Episode, store: Store) -> ContainerEnv:
        env = ContainerEnv(
            self.task,
            runtime=self.runtime,
            policy=self._means.policy,
            standby=self._means.standby,
            standby_bytes=self._means.standby_bytes,
            store=store,
        )
        env._owns_store = self._owns_store
        env._episode = episode
        env._telemetry = episode.telemetry
        return env

    def _end_episode(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None

    def _close_store(self) -> None:
        if self._owns_store:
            with contextlib.suppress(Exception):
                self._store.close()


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    # No limit of its own: these threads sleep in poll(2), and a limit would let one slow step block others.
    return await anyio.to_thread.run_sync(
        partial(call, *args, **kwargs), limiter=anyio.CapacityLimiter(math.inf)
    )


def _open_store(store: str | Path | None) -> Store:
    if store is None:
        ensure_mounted()
        return Store()
    if not isinstance(store, (str, Path)):
        raise InvalidInput(f"store must be a directory, not {store!r}")
    return Store(Path(store))
