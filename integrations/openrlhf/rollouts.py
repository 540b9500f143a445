"""All episodes of one rollout actor: retries, lost samples and what their siblings stand in with. Seconds."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Any

from belayer_integrations.encoding import Encoder
from belayer_integrations.openrlhf.attempt import CLOSE_S, Attempt, EngineFailed
from belayer_integrations.openrlhf.book import Past, attempt_record, lost_record
from belayer_integrations.openrlhf.books import Book, Books, no_book
from belayer_integrations.openrlhf.bubbles import Bubbles
from belayer_integrations.openrlhf.calls import current_call
from belayer_integrations.openrlhf.group import Groups
from belayer_integrations.openrlhf.leftover import end_leftover
from belayer_integrations.openrlhf.played import Played
from belayer_integrations.openrlhf.request import Request
from belayer_integrations.openrlhf.response import Sample, Tally, response
from belayer_integrations.openrlhf.terms import Terms

from belayer_env.errors import Fault, InvalidInput, RecoveryFailed

__all__ = ["NothingComesBack", "Rollouts"]

_LAST_WAIT_S = 5.0

log = logging.getLogger(__name__)


class NothingComesBack(RuntimeError):
    """So many samples were lost one after the other that it is no bad luck; the cause is the last one's."""


class Rollouts:
    """Made once an actor; its `execute` is what the actor calls, many at a time in one event loop."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._groups = Groups()
        self._books = Books(terms.books_root)
        self._bubbles = Bubbles()
        self._given_up: list[threading.Thread] = []
        self._num_lost_in_a_row = 0
        atexit.register(self.close, _LAST_WAIT_S)

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
        """One sample; see `agent_executor`.

        Raises:
            InvalidInput: there are images.
            EngineFailed: the engine raised.
            NothingComesBack: see there."""
        call = current_call()
        if images:
            raise InvalidInput("container episodes are of text: leave --data.max_images_per_prompt at 0")
        # Each call of the actor brings its own object, which all samples of the prompt are given.
        key = (id(sampling_params), prompt)
        group, member = self._groups.join(key)
        tally = Tally()
        reward: float | None = None
        try:
            book = no_book(sampling_params.seed)
            if call is not None:
                book = await self._books.open(call, member, sampling_params.seed)
            request = Request(
                prompt=prompt,
                label=label,
                sampling_params=sampling_params,
                max_length=max_length,
                engine=llm_engine,
                bubbles=self._bubbles,
                encoder=Encoder(hf_tokenizer),
                member=member,
                seed=book.past.seed,
            )
            sample, error = await self._sample(request, tally, book)
            reward = sample.reward if sample is not None else None
        finally:
            group.settle(reward)
            self._groups.leave(key)
        if sample is None:
            sample = Sample.lost(
                request.prompt_ids(),
                filler_id=request.encoder.filler_id,
                reward=await group.fill_in(),
                error=error,
            )
        if call is not None and group.is_settled:
            await self._books.close(call)
        return response(sample, tally, prompt=prompt, label=label, with_logprobs=request.with_logprobs)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait for envs that were given up; False if some is still there: a reward that hangs, say."""
        until = time.monotonic() + timeout_s
        for closing in self._given_up:
            closing.join(max(0.0, until - time.monotonic()))
        return not any(closing.is_alive() for closing in self._given_up)

    async def _sample(self, request: Request, tally: Tally, book: Book) -> tuple[Sample | None, str]:
        """The sample, or None and why."""
        past = book.past
        tally.take(past.tally)
        if past.lost is not None:
            await end_leftover(past)
            return None, past.lost
        if past.played is not None:
            await end_leftover(past)
            return self._sample_of(past.played), ""
        for number in range(past.attempt, self._terms.attempts):
            if number > past.attempt:
                past = Past(attempt=number)
                await book.write(attempt_record(number, tally.to_json()))
            attempt = Attempt(self._terms, request, number, tally, book)
            try:
                sample = self._sample_of(await attempt.play(past))
            except EngineFailed:
                raise
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                is_last = number + 1 == self._terms.attempts or not _is_bad_luck(error)
                log.warning(
                    "a sample's attempt %d has failed%s: %s",
                    number + 1,
                    "" if is_last else ", and another begins",
                    text,
                    exc_info=error,
                )
                if is_last:
                    self._note_lost(error)
                    await book.write(lost_record(text, tally.to_json()))
                    return None, text
                tally.retries += 1
            else:
                self._num_lost_in_a_row = 0
                return sample, ""
            finally:
                self._given_up = [old for old in self._given_up if old.is_alive()]
                if attempt.closing.is_alive():
                    self._given_up.append(attempt.closing)
        raise AssertionError("unreachable")

    def _sample_of(self, played: Played) -> Sample:
        return Sample(
            token_ids=played.token_ids,
            loss_mask=played.loss_mask,
            logprobs=played.logprobs,
            reward=float(self._terms.total(played.rewards)),
            is_truncated=played.is_truncated,
        )

    def _note_lost(self, error: Exception) -> None:
        self._num_lost_in_a_row += 1
        if self._num_lost_in_a_row >= self._terms.most_lost_in_a_row:
            # A batch without one action token makes upstream divide by zero, and the weights NaN.
            raise NothingComesBack(
                f"{self._num_lost_in_a_row} samples were lost in a row, the last one to "
                f"{type(error).__name__}: {error}"
            ) from error


def _is_bad_luck(error: Exception) -> bool:
    """The world broke, and may not the next time. An action that takes its sandbox down each time is the
    model's doing (nothing was left untried): another try for it would be a favour."""
    return isinstance(error, Fault) and not (isinstance(error, RecoveryFailed) and not error.tried)
