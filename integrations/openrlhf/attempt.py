"""One attempt at an episode: the model and a container take turns, in an event loop. Seconds, tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from belayer_integrations.encoding import Encoder
from belayer_integrations.openrlhf.bubbles import SESSION, Bubbles
from belayer_integrations.openrlhf.response import Tally
from belayer_integrations.openrlhf.sampling import read_turn, turn_params
from belayer_integrations.openrlhf.terms import Terms
from belayer_integrations.timed import TimedEnv
from belayer_integrations.trajectory import Trajectory

from belayer_env.errors import Fault

__all__ = ["Attempt", "EngineFailed", "EpisodeLost", "Request"]

T = TypeVar("T")
log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""How long an episode waits for its env to close."""

_MOST_ROLLBACKS = 8

_HINT_AFTER_S = 0.05
"""By then an engine knows of a request. A turn that is over sooner is no time for a checkpoint."""


class EpisodeLost(Fault):
    """The env goes on, but the episode is not worth it: it was rolled back again and again."""


class EngineFailed(Exception):
    """The engine raised: no matter of this episode, and no sample can be had. The cause is what it raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `execute`, and which of its prompt's samples it is."""

    prompt: str
    label: Any
    sampling_params: Any
    max_length: int
    engine: Any
    bubbles: Bubbles
    encoder: Encoder
    member: int

    @property
    def with_logprobs(self) -> bool:
        """Whether the trainer wants them."""
        return self.sampling_params.logprobs is not None

    def prompt_ids(self, instruction: str = "") -> list[int]:
        """The prompt, and what a reset had to say; of one that is too long the end, as upstream has it."""
        room = max(1, self.max_length - (self.sampling_params.max_tokens or 1))
        ids = self.encoder.text_ids(self.prompt + instruction)
        if len(ids) > room:
            log.warning("a prompt of %d tokens is cut to its last %d", len(ids), room)
        return ids[-room:]


class Attempt:
    """Played once. ``trajectory`` and what `tally` got are there however it ends."""

    def __init__(self, terms: Terms, request: Request, number: int, tally: Tally) -> None:
        self._terms = terms
        self._request = request
        self._number = number
        self._tally = tally
        self._env = TimedEnv(lambda: terms.make_env(request.prompt, request.label))
        self._is_given_up = False
        self._num_turns = 0
        self._session = uuid.uuid4().hex
        self.is_cut = False
        """The model's last turn ran into its limit."""

    async def play(self) -> Trajectory:
        """To its end. The env is closed when this returns or raises; in the background, where a call of it
        hangs or the waiter has been cancelled.

        Raises:
            Exception: what its env raised.
            TimeoutError: its env took too long.
            EngineFailed: the engine raised."""
        try:
            instruction = await self._within(self._env.start(), self._terms.reset_timeout_s, "reset")
            prompt_ids = self._request.prompt_ids(instruction)
            trajectory = Trajectory(
                prompt_ids,
                max_turns=self._terms.max_turns,
                max_tokens=self._request.max_length - len(prompt_ids),
                max_rollbacks=_MOST_ROLLBACKS,
            )
            while trajectory.end is None:
                await self._turn(trajectory)
        except BaseException as error:
            self._is_given_up = isinstance(error, TimeoutError) or not isinstance(error, Exception)
            raise
        finally:
            closing = self._env.close()
            self._count()
            if not self._is_given_up:
                await _ended(closing)
        if trajectory.end == "failed":
            raise EpisodeLost(str(trajectory.error))
        return trajectory

    @property
    def closing(self) -> threading.Thread:
        """What ends the env."""
        return self._env.close()

    async def _turn(self, trajectory: Trajectory) -> None:
        token_ids = await self._speak(trajectory)
        action = self._terms.parse_action(self._request.encoder.text(token_ids))
        if action is None:
            trajectory.fall_silent()
            return
        result = await self._within(self._env.step(action), self._terms.step_timeout_s, "step")
        text, reward, terminated, truncated, info = result
        if "rollback" in info:
            before = len(trajectory.conversation.token_ids)
            trajectory.undo(info["rollback"])
            self._tally.rollbacks += 1
            self._tally.tokens_cut += before - len(trajectory.conversation.token_ids)
            return
        self._tally.steps += 1
        is_over = terminated or truncated
        ids: Sequence[int] = []
        if not is_over:
            ids = self._terms.encode_observation(self._request.encoder.tokenizer, text)
        trajectory.observe(ids, float(reward), is_over=is_over)

    async def _speak(self, trajectory: Trajectory) -> Sequence[int]:
        request = self._request
        params = turn_params(
            request.sampling_params,
            room=trajectory.tokens_left,
            max_turn_tokens=self._terms.max_turn_tokens,
            draw=(request.member, self._number, self._num_turns),
        )
        self._num_turns += 1
        SESSION.set(self._session)
        began = asyncio.get_running_loop().time()
        hinting = asyncio.ensure_future(self._hint(params.max_tokens))
        try:
            output = await request.engine.generate(
                list(trajectory.conversation.token_ids), params, multi_modal_data=None
            )
        except Exception as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        finally:
            hinting.cancel()
        turn = read_turn(output, with_logprobs=request.with_logprobs)
        request.bubbles.observe(len(turn.token_ids), asyncio.get_running_loop().time() - began)
        trajectory.speak(turn.token_ids, turn.logprobs)
        self.is_cut = turn.is_cut
        return turn.token_ids

    async def _hint(self, max_tokens: int) -> None:
        """Tell the env of the bubble that has begun. Never raises: a turn is worth more than its hint."""
        await asyncio.sleep(_HINT_AFTER_S)
        with contextlib.suppress(Exception):
            request = self._request
            if seconds := request.bubbles.predict(request.engine, self._session, max_tokens):
                self._env.hint(seconds)

    async def _within(self, future: Future[T], limit_s: float, what: str) -> T:
        answer = asyncio.wrap_future(future)
        # Not wait_for, which would cancel the future under the thread that is to set it.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([answer], timeout=limit_s)
        if not answer.done():
            raise TimeoutError(f"the {what} took longer than {what}_timeout_s={limit_s:g}")
        return answer.result()

    def _count(self) -> None:
        if self._env.env is not None:
            recoveries = self._env.env.telemetry.recoveries
            self._tally.recoveries += len(recoveries)
            self._tally.recovery_s += sum(recovery.total_s for recovery in recoveries)


async def _ended(closing: threading.Thread) -> None:
    # No limit of its own: hundreds of episodes may wait at once, and none for another.
    await anyio.to_thread.run_sync(
        closing.join, CLOSE_S, limiter=anyio.CapacityLimiter(math.inf), abandon_on_cancel=True
    )
