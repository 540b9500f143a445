"""One attempt at an episode: the model and a container take turns, in an event loop. Seconds, tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

import anyio
import anyio.to_thread
from belayer_integrations.openrlhf.book import (
    Past,
    context_digest,
    episode_record,
    played_record,
    turn_record,
    undo_record,
)
from belayer_integrations.openrlhf.books import Book
from belayer_integrations.openrlhf.bubbles import SESSION
from belayer_integrations.openrlhf.leftover import end_leftover, sweep_store
from belayer_integrations.openrlhf.played import Played
from belayer_integrations.openrlhf.request import Request
from belayer_integrations.openrlhf.response import Tally
from belayer_integrations.openrlhf.resumption import BookAstray, retell
from belayer_integrations.openrlhf.sampling import Turn, read_turn, turn_params
from belayer_integrations.openrlhf.terms import Terms
from belayer_integrations.timed import TimedEnv
from belayer_integrations.trajectory import Trajectory

from belayer_env import ContainerEnv, Rollback
from belayer_env.errors import Fault, InvalidInput

__all__ = ["Attempt", "EngineFailed", "EpisodeLost"]

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


class Attempt:
    """Played once. What `tally` got is there however it ends."""

    def __init__(self, terms: Terms, request: Request, number: int, tally: Tally, book: Book) -> None:
        self._terms = terms
        self._request = request
        self._number = number
        self._tally = tally
        self._book = book
        self._env = self._new_env()
        self._is_given_up = False
        self._num_turns = 0
        self._session = uuid.uuid4().hex
        self._is_cut = False

    async def play(self, past: Past) -> Played:
        """To its end, from where the book says that a dead process left it. The env is closed when this
        returns or raises; in the background, where a call of it hangs or the waiter has been cancelled.

        Raises:
            Exception: what its env raised.
            TimeoutError: its env took too long.
            EngineFailed: the engine raised."""
        try:
            trajectory, untold = await self._begun(past)
            if untold is not None:
                await self._act(trajectory, untold)
            while trajectory.end is None:
                await self._act(trajectory, await self._speak(trajectory))
            if trajectory.end == "failed":
                raise EpisodeLost(str(trajectory.error))
            played = Played.of(trajectory, is_cut=self._is_cut)
            await self._book.write(played_record(played, self._tally.to_json()))
        except BaseException as error:
            self._is_given_up = isinstance(error, TimeoutError) or not isinstance(error, Exception)
            raise
        finally:
            closing = self._env.close()
            self._count()
            if not self._is_given_up:
                await _ended(closing)
        return played

    @property
    def closing(self) -> threading.Thread:
        """What ends the env."""
        return self._env.close()

    def _new_env(self) -> TimedEnv:
        return TimedEnv(lambda: self._terms.make_env(self._request.prompt, self._request.label))

    async def _begun(self, past: Past) -> tuple[Trajectory, Turn | None]:
        """The trajectory, and the turn whose step is to run first, if one is."""
        if past.is_under_way:
            try:
                return await self._resumed(past)
            except (BookAstray, InvalidInput) as error:
                log.warning("an episode cannot be gone on with, and is begun afresh: %s", error)
                await _ended(self._env.close())
                self._env = self._new_env()
            except Fault:
                await end_leftover(past)
                raise
        instruction = await self._within(self._env.start(), self._terms.reset_timeout_s, "reset")
        env = self._env.env
        if self._book.is_kept and env is not None:
            await self._book.write(episode_record(env.episode.id, env.store_root))
        return self._trajectory(instruction), None

    async def _resumed(self, past: Past) -> tuple[Trajectory, Turn | None]:
        began = time.monotonic()

        def resume() -> ContainerEnv:
            assert past.episode_id is not None
            assert past.store is not None
            sweep_store(past.store)
            return self._terms.resume_env(
                self._request.prompt, self._request.label, past.episode_id, past.store
            )

        env = await self._within(self._env.take_over(resume), self._terms.reset_timeout_s, "reset")
        encoder = self._request.encoder
        trajectory = self._trajectory(env.task.instruction)
        trajectory.rollbacks += past.rollbacks
        untold = retell(
            past.turns,
            env.episode.ledger.steps,
            into=trajectory,
            action_of=lambda turn: self._terms.parse_action(encoder.text(turn.token_ids)),
            encode=lambda text: self._terms.encode_observation(encoder.tokenizer, text),
            replay=env.task.replay,
        )
        self._num_turns = past.num_draws
        self._tally.steps = max(self._tally.steps, len(env.episode.ledger))
        self._tally.resumptions += 1
        kept = len(trajectory.rewards) + (untold is not None)
        if kept:
            self._is_cut = past.turns[kept - 1].turn.is_cut
        if kept < len(past.turns):
            cut = past.turns[kept:]
            self._tally.rollbacks += 1
            self._tally.tokens_cut += sum(len(booked.turn.token_ids) for booked in cut)
            await self._book.write(
                undo_record(Rollback(to_step=kept, reason="its process died"), self._tally.to_json())
            )
        log.info(
            "an episode of a dead actor goes on after step %d, %.1f s later",
            len(env.episode.ledger),
            time.monotonic() - began,
        )
        return trajectory, untold

    def _trajectory(self, instruction: str) -> Trajectory:
        prompt_ids = self._request.prompt_ids(instruction)
        return Trajectory(
            prompt_ids,
            max_turns=self._terms.max_turns,
            max_tokens=self._request.max_length - len(prompt_ids),
            max_rollbacks=_MOST_ROLLBACKS,
        )

    async def _act(self, trajectory: Trajectory, turn: Turn) -> None:
        """What the model has said, done."""
        action = self._terms.parse_action(self._request.encoder.text(turn.token_ids))
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
            await self._book.write(undo_record(info["rollback"], self._tally.to_json()))
            return
        self._tally.steps += 1
        is_over = terminated or truncated
        ids: Sequence[int] = []
        if not is_over:
            ids = self._terms.encode_observation(self._request.encoder.tokenizer, text)
        trajectory.observe(ids, float(reward), is_over=is_over)

    async def _speak(self, trajectory: Trajectory) -> Turn:
        request = self._request
        params = turn_params(
            request.sampling_params,
            room=trajectory.tokens_left,
            max_turn_tokens=self._terms.max_turn_tokens,
            seed=request.seed,
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
        if self._book.is_kept:
            context = context_digest(trajectory.conversation.token_ids)
            await self._book.write(turn_record(turn, context, self._tally.to_json()))
        trajectory.speak(turn.token_ids, turn.logprobs)
        self._is_cut = turn.is_cut
        return turn

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
