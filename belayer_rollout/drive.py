"""Driving one request to its end: attempt after attempt, each going on where the last one broke."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, RetryError, retry_if_exception_type

from belayer_rollout.continuation import Done, continuation
from belayer_rollout.errors import (
    InvalidRequest,
    RequestFailed,
    RequestRejected,
    WeightVersionChanged,
    WorkerBusy,
    WorkerFault,
    WorkerGarbled,
    WorkerGone,
)
from belayer_rollout.fleet import Fleet, Seat, within
from belayer_rollout.journal_base import TokenJournal
from belayer_rollout.metrics import ClientMetrics
from belayer_rollout.run import Run, Streak
from belayer_rollout.types import EngineRequest, Generation, TokenChunk

__all__ = ["Budget", "Driver"]

PUT_DOWN_S = 5.0
"""For an engine to drop an attempt. Whether it does is no matter of correctness, only of wasted work."""

MOST_AHEAD = 1024
"""Tokens of one request that may wait for one commit before its stream is read on."""

MOST_PAUSE_S = 10.0
_PAUSE_S, _PAUSE_BASE = 0.1, 3.0
"""After the second fault, growing to 22 s over the default budget: a pair may need a cold start of 20 s."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a request is tried without getting a single token further. A new token resets both.

    Raises:
        InvalidRequest: a value that is not positive."""

    attempts: int = 8
    """Attempts that broke. A refusal of a busy worker is none."""
    seconds: float = 600.0
    """Since it first stood still by a fault, a refusal or for want of a worker. Queueing at a worker that is
    well does not count."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or not self.seconds > 0:
            raise InvalidRequest(f"a budget is positive: {self}")


class _StartOver(Exception):
    """The weights changed."""


class Driver:
    """Drives the requests of one client."""

    def __init__(
        self,
        fleet: Fleet,
        journal: TokenJournal,
        metrics: ClientMetrics,
        budget: Budget,
        *,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        nonce: str,
    ) -> None:
        self._fleet = fleet
        self._journal = journal
        self._metrics = metrics
        self._budget = budget
        self._clock = clock
        self._spawn = spawn
        self._nonce = nonce
        self._timed_commit: asyncio.Future[None] | None = None

    async def drive(self, run: Run, done: Done | None = None) -> Generation:
        """The request's generation; ``done`` if it is known to be at its end.

        Raises:
            RequestFailed: the budget is used up.
            RequestRejected, WeightVersionChanged, JournalFault: as they say."""
        while done is None:
            done = await self._get_on(run)
        await self._journal.finish(run.request_id, done.finish_reason, done.stop_reason, len(run.tokens))
        if run.outlet is not None:
            last = run.last or TokenChunk((), (), *run.last_source)
            run.outlet.put(
                replace(last, finish_reason=done.finish_reason, stop_reason=done.stop_reason), None
            )
        return run.generation(done)

    async def _get_on(self, run: Run) -> Done | None:
        """Attempts until one gives a token; None if more are needed after it."""
        plan = continuation("", run.prompt, run.params, self._fleet.info, run.tokens)
        if isinstance(plan, Done):
            # Before a worker is looked for: there may be none left.
            return plan
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(WorkerFault),
            stop=lambda _: self._is_spent(run),
            wait=lambda state: self._pause_s(run, state),
            sleep=asyncio.sleep,
        )
        try:
            outcome: Done | None = await retrying(self._attempt, run)
        except RetryError as error:
            raise self._failure(run, str(error.last_attempt.exception())) from error.last_attempt.exception()
        return outcome

    async def _attempt(self, run: Run) -> Done | None:
        """One attempt. None: it broke, or is to start over, after it had got on.

        Raises:
            WorkerFault: it broke before it gave a token."""
        seat = await self._seat_for(run)
        run.attempts += 1
        attempt_id = f"{run.request_id}#{run.attempts}-{self._nonce}"
        plan = continuation(attempt_id, run.prompt, run.params, seat.info or self._fleet.info, run.tokens)
        if isinstance(plan, Done):
            return plan
        seat.sent += 1
        before = len(run.tokens)
        try:
            done = await self._read(run, seat, plan)
        except WorkerBusy as busy:
            self._fleet.refused(seat, busy)
            run.streak.refusals += 1
            self._stands_still(run)
            raise
        except WorkerFault as fault:
            await self._broke(run, seat, fault, got_on=len(run.tokens) > before)
            if len(run.tokens) > before:
                return None
            raise
        except _StartOver:
            await self._start_over(run)
            return None
        self._fleet.came_through(seat)
        return done

    async def _seat_for(self, run: Run) -> Seat:
        while (seat := self._fleet.pick(run)) is None:
            since = self._stands_still(run)
            left_s = since + self._budget.seconds - self._clock()
            if left_s <= 0:
                raise self._failure(run, "no worker is fit")
            await self._fleet.changed(left_s)
        return seat

    async def _broke(self, run: Run, seat: Seat, fault: WorkerFault, *, got_on: bool) -> None:
        self._fleet.broke(seat, fault)
        now = self._clock()
        run.broke_at = now if run.broke_at is None else run.broke_at
        run.failovers += 1
        run.tried.append(seat.name)
        if got_on:
            run.streak = Streak()
        streak = run.streak
        if not seat.worker.recovers_itself or (streak.faults and not got_on):
            streak.avoid.add(seat.name)
        if not got_on:
            streak.faults += 1
        self._stands_still(run)
        cause = type(fault).__name__
        self._metrics.failovers.labels(cause).inc()
        _log.info("%s goes on elsewhere at token %d: %s", run.request_id, len(run.tokens), fault)
        await self._journal.note_failover(run.request_id, seat.name, cause)

    async def _start_over(self, run: Run) -> None:
        run.restarts += 1
        if run.restarts > self._budget.attempts:
            raise self._failure(run, f"the weights changed under it {run.restarts} times")
        run.start_over()
        await self._journal.cut(run.request_id, 0)

    def _stands_still(self, run: Run) -> float:
        if run.streak.since is None:
            run.streak.since = self._clock()
        return run.streak.since

    def _is_spent(self, run: Run) -> bool:
        streak = run.streak
        return streak.faults >= self._budget.attempts or (
            streak.since is not None and self._clock() - streak.since >= self._budget.seconds
        )

    def _pause_s(self, run: Run, state: RetryCallState) -> float:
        """How long to wait before the next attempt: not at all while there is another worker to try."""
        streak = run.streak
        fault = state.outcome.exception() if state.outcome else None
        # A spread, so that those who were refused together do not come back together.
        spread = 1.0 + random.random() / 4
        if isinstance(fault, WorkerBusy):
            if self._fleet.has_other(streak.avoid):
                return 0.0
            asked_s = fault.retry_after_s or 0.0
            pause_s = max(asked_s, min(_PAUSE_S * _PAUSE_BASE ** (streak.refusals - 1), MOST_PAUSE_S))
            return pause_s * spread
        if streak.faults == 1 or self._fleet.has_other(streak.avoid):
            return 0.0
        return min(_PAUSE_S * _PAUSE_BASE ** (streak.faults - 2), MOST_PAUSE_S) * spread

    def _failure(self, run: Run, why: str) -> RequestFailed:
        return RequestFailed(
            f"gave up {run.request_id} after {run.attempts} attempts, at token {len(run.tokens)}: {why}",
            request_id=run.request_id,
            tried=tuple(run.tried),
        )

    async def _read(self, run: Run, seat: Seat, request: EngineRequest) -> Done:
        """Read one attempt to its end, and put it down whatever happens."""
        stream = seat.worker.generate(request)
        run.begin_attempt(seat.name, self._clock())
        seat.runs.add(run)
        is_over = False
        try:
            done, is_over = await self._pump(run, seat, request, stream)
            return done
        except asyncio.CancelledError:
            self._raise_verdict(run)
            raise
        except WorkerFault as fault:
            # An engine that turns a cancellation into a fault of its own swallowed what the watch sent.
            self._raise_verdict(run)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from fault
            is_over = isinstance(fault, WorkerGone | WorkerBusy)
            raise
        except RequestRejected:
            is_over = True
            raise
        finally:
            seat.runs.discard(run)
            run.end_attempt()
            await self._put_down(run, seat, stream, request.request_id, tell=not is_over)

    @staticmethod
    def _raise_verdict(run: Run) -> None:
        """Turn the watch's cancellation into its verdict, unless somebody else cancelled the task as well."""
        verdict, task = run.verdict, asyncio.current_task()
        run.silent_since = math.inf
        if task is None:
            return
        others = task.cancelling()
        for _ in range(run.strikes):
            others = task.uncancel()
        run.strikes = 0
        if verdict is not None and not others:
            raise verdict

    async def _pump(
        self, run: Run, seat: Seat, request: EngineRequest, stream: AsyncIterator[TokenChunk]
    ) -> tuple[Done, bool]:
        """Take chunks until the request ends; with whether the engine ended it (and not a stop string).

        This is the hot path: what stands in the loop runs for every token of every stream."""
        clock, append, observe = self._clock, self._journal.append, seat.pace.observe
        info = seat.info or self._fleet.info
        tokens, outlet, request_id = run.tokens, run.outlet, run.request_id
        upto = len(tokens) + request.params.max_tokens
        count_tokens = self._metrics.tokens.inc
        taken = 0
        try:
            async for chunk in stream:
                now = clock()
                start = len(tokens)
                count = len(chunk.token_ids)
                if (
                    count != len(chunk.logprobs)
                    or start + count > upto
                    or (chunk.start is not None and chunk.start != start)
                ):
                    raise _garbled(seat, chunk, start, upto)
                if run.has_begun:
                    if count:
                        observe(now - run.silent_since)
                elif count:
                    self._first_token(run, seat, now)
                run.silent_since = seat.moved_at = now
                reason, ended_by = chunk.finish_reason, chunk.stop_reason
                stop = None
                if count:
                    if chunk.weight_version != run.version:
                        self._check_version(run, chunk.weight_version)
                    if run.stops is not None:
                        chunk, stop = run.until_stop(chunk, info)
                    if reason is not None:
                        # Whether it is the last one is for the journal to say, once it has been told.
                        chunk = replace(chunk, finish_reason=None, stop_reason=None)
                    commit = append(request_id, start, chunk)
                    run.take(chunk)
                    taken += count
                    is_last = stop is not None or reason in ("stop", "length")
                    if is_last:
                        run.last = chunk
                    elif outlet is not None:
                        outlet.put(chunk, commit)
                    if commit is not None:
                        if commit is run.commit:
                            run.ahead += count
                        else:
                            run.commit, run.ahead = commit, count
                            if self._timed_commit is None:
                                self._time_commit(commit, now)
                    if run.ahead > MOST_AHEAD or (outlet is not None and outlet.is_full):
                        await self._hold(run)
                if stop is not None:
                    return Done("stop", stop), False
                if reason is not None:
                    if reason == "abort":
                        raise WorkerGone(f"{seat.name} dropped the request by itself", worker=seat.name)
                    return Done(reason, ended_by), True
        finally:
            count_tokens(taken)
        raise WorkerGone(f"{seat.name} ended the stream without a finish reason", worker=seat.name)

    def _first_token(self, run: Run, seat: Seat, now: float) -> None:
        """The attempt's first: the time until now was queue time."""
        run.has_begun = True
        run.first_token_at = now
        run.streak = Streak()
        seat.waits.append(now - run.sent_at)
        self._metrics.first_token.observe(now - run.sent_at)
        if run.broke_at is not None:
            self._metrics.failover_gap.observe(now - run.broke_at)
            run.broke_at = None

    def _check_version(self, run: Run, version: int) -> None:
        before, run.version = run.version, version
        if before is None or run.rule == "continue":
            return
        if run.rule == "restart":
            raise _StartOver
        run.version = before
        raise WeightVersionChanged(
            f"request {run.request_id} began under weight version {before} and would go on under {version}",
            before=before,
            after=version,
        )

    async def _hold(self, run: Run) -> None:
        """Read no further for now: the consumer or the journal is behind."""
        run.silent_since = math.inf
        if run.outlet is not None:
            await run.outlet.room()
        if run.commit is not None and run.ahead > MOST_AHEAD:
            # Not awaited itself: others share it, and whoever is cancelled would cancel it for them.
            await asyncio.wait([run.commit])
            run.commit.result()
            run.ahead = 0
        run.silent_since = self._clock()

    def _time_commit(self, commit: asyncio.Future[None], now: float) -> None:
        def observe(_: object) -> None:
            self._timed_commit = None
            self._metrics.commit.observe(self._clock() - now)

        self._timed_commit = commit
        commit.add_done_callback(observe)

    async def _put_down(
        self, run: Run, seat: Seat, stream: AsyncIterator[TokenChunk], attempt_id: str, *, tell: bool
    ) -> None:
        if tell:
            run.telling = self._spawn(self._abort(seat, attempt_id))
        close = getattr(stream, "aclose", None)
        if close is not None:
            with contextlib.suppress(WorkerFault):
                await within(PUT_DOWN_S, seat.name, "closing a stream", close())

    @staticmethod
    async def _abort(seat: Seat, attempt_id: str) -> None:
        with contextlib.suppress(WorkerFault):
            await within(PUT_DOWN_S, seat.name, "an abort", seat.worker.abort(attempt_id))


def _garbled(seat: Seat, chunk: TokenChunk, start: int, upto: int) -> WorkerGarbled:
    if len(chunk.token_ids) != len(chunk.logprobs):
        what = f"{len(chunk.token_ids)} token ids with {len(chunk.logprobs)} logprobs"
    elif chunk.start is not None and chunk.start != start:
        what = f"a chunk that begins at token {chunk.start} where {start} was next"
    else:
        what = f"{start + len(chunk.token_ids) - upto} tokens more than it was asked for"
    return WorkerGarbled(f"{seat.name} gave {what}", worker=seat.name)
