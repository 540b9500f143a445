"""The rollout client: tokens in, tokens out, over workers that may break at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from prometheus_client import CollectorRegistry

from belayer_rollout.background import Background
from belayer_rollout.bubble import Lengths, predicted_rest_s, predicted_rest_tokens
from belayer_rollout.continuation import Done
from belayer_rollout.drive import PUT_DOWN_S, Budget, Driver
from belayer_rollout.engines.base import EngineWorker, WeightSource
from belayer_rollout.errors import (
    ClientClosed,
    InvalidRequest,
    JournalFault,
    RequestCancelled,
    RequestFailed,
    RolloutError,
    UnknownRequest,
)
from belayer_rollout.fleet import Fleet
from belayer_rollout.intake import checked_rule, finished, run_of, take_up
from belayer_rollout.journal import Journal
from belayer_rollout.journal_base import MemoryJournal, TokenJournal
from belayer_rollout.metrics import ClientMetrics
from belayer_rollout.outlet import MOST_CHUNKS, Outlet
from belayer_rollout.pace import PaceLimits
from belayer_rollout.routing import BreakerLimits
from belayer_rollout.run import Run
from belayer_rollout.status import ClientStatus
from belayer_rollout.text import TextDecoder
from belayer_rollout.types import (
    MOST_SEED,
    Generation,
    ModelInfo,
    OnVersionChange,
    SamplingParams,
    TokenChunk,
)
from belayer_rollout.watch import Watch

__all__ = ["RolloutClient"]


class RolloutClient:
    """Generates on a fleet of workers. A request outlives any worker, and with a journal the client as well.

    All calls belong to one event loop. The workers are started by the first call (or by ``async with``) and
    closed with the client, as is a journal that it opened itself."""

    def __init__(
        self,
        workers: Sequence[EngineWorker],
        *,
        journal: str | Path | TokenJournal | None = None,
        tokenizer: TextDecoder | None = None,
        durability: Literal["strict", "relaxed"] = "strict",
        on_version_change: OnVersionChange = "continue",
        max_in_flight: int = 4096,
        budget: Budget | None = None,
        pace: PaceLimits | None = None,
        breaker: BreakerLimits | None = None,
        max_buffered_chunks: int = MOST_CHUNKS,
        owns_workers: bool = True,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """``journal``: a file (opened with ``durability``), a journal, or None: tokens are kept in memory
        until their request ends. ``tokenizer``: for stop strings. ``max_in_flight``: further requests wait.
        ``max_buffered_chunks``: how far a stream is read ahead of its consumer. ``owns_workers``: False
        leaves them open when the client closes. ``registry``: for the metrics; None makes one.

        Raises:
            InvalidRequest: an option out of range, no worker, or two of one name."""
        checked_rule(on_version_change)
        if durability not in ("strict", "relaxed"):
            raise InvalidRequest(f'durability is "strict" or "relaxed", not {durability!r}')
        if max_in_flight < 1 or max_buffered_chunks < 1:
            raise InvalidRequest("max_in_flight and max_buffered_chunks must be 1 or more")
        self._pace = pace or PaceLimits()
        self._budget = budget or Budget()
        self._journal_at = journal
        self._durability = durability
        self._tokenizer = tokenizer
        self._rule = on_version_change
        self._max_buffered = max_buffered_chunks
        self._owns_workers = owns_workers
        self.metrics = ClientMetrics(registry)
        self._fleet = Fleet(
            workers, breaker=breaker or BreakerLimits(), pace=self._pace, metrics=self.metrics, clock=_now
        )
        self._lengths = Lengths()
        self._runs: dict[str, Run] = {}
        self._num_open = 0
        self._background = Background()
        self._slots = asyncio.Semaphore(max_in_flight)
        self._admission = asyncio.Event()
        self._admission.set()
        self._starting = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._journal: TokenJournal | None = None
        self._driver: Driver | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the workers and open the journal. Idempotent; the first request does it too.

        Raises:
            SetupError: a worker cannot work on this host.
            WorkerFault: no worker could be started (if some could, the others are tried again later).
            JournalFault: the journal cannot be opened."""
        await self._started()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str = "",
        request_id: str | None = None,
        on_version_change: OnVersionChange | None = None,
    ) -> Generation:
        """The whole generation. Requests of one ``session`` go to one worker while it is well. A
        ``request_id`` that the journal knows goes on from its tokens. Cancelling the caller ends it at the
        worker, too; its tokens stay in the journal.

        Raises:
            InvalidRequest: a value out of range, stop strings without a tokenizer, an id that is in flight
                here or in the journal with other content.
            RequestRejected: the engine refuses it.
            RequestFailed: the budget is used up; `resume` can try again later.
            WeightVersionChanged: the rule is "fail", and the weights changed.
            RequestCancelled: through `cancel`.
            JournalFault: the journal failed.
            ClientClosed: the client was, or is being, closed."""
        run = self._run(prompt_token_ids, params, session, request_id, on_version_change)
        self._go(run)
        return await self._outcome(run)

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str = "",
        request_id: str | None = None,
        on_version_change: OnVersionChange | None = None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """The same, chunk by chunk: each token once, in order, after the commit that makes it durable. The
        last chunk has the finish reason, and may hold no token. Leaving the iterator cancels the request.

        Raises:
            InvalidRequest: also for the rule "restart", as what was handed on cannot be taken back.
            RolloutError: as `generate`."""
        rule = on_version_change or self._rule
        if rule == "restart":
            raise InvalidRequest(
                'a stream cannot "restart" what it has handed on: use generate, or another rule'
            )
        outlet = Outlet(self._max_buffered)
        run = self._run(prompt_token_ids, params, session, request_id, rule, outlet=outlet)
        return self._stream(run)

    async def resume(
        self, request_id: str, *, on_version_change: OnVersionChange | None = None
    ) -> Generation:
        """The generation of a journalled request: at once if it has ended, else it goes on from its tokens.
        One that is in flight here is waited for.

        Raises:
            UnknownRequest: the journal holds no such request.
            RolloutError: as `generate`."""
        if (running := self._runs.get(request_id)) is not None and running.task is not None:
            try:
                return await asyncio.shield(running.task)
            except asyncio.CancelledError:
                if running.task.cancelled():
                    raise _ending(running) from None
                raise
        _, journal = await self._started()
        logged = await journal.load(request_id)
        run = Run(request_id, logged.session, logged.prompt_token_ids, logged.params, self._rule)
        if (ended := finished(run, logged)) is not None:
            return ended
        return await self.generate(
            logged.prompt_token_ids,
            logged.params,
            session=logged.session,
            request_id=request_id,
            on_version_change=on_version_change,
        )

    async def cancel(self, request_id: str) -> bool:
        """End a request in flight, here and at its worker; the journal has it as "abort". Whoever waits for
        it gets RequestCancelled. False: it was not in flight."""
        run = self._runs.get(request_id)
        if run is None or run.task is None:
            return False
        run.end("cancel")
        await asyncio.wait([run.task])
        if run.telling is not None:
            await asyncio.wait([run.telling])
        if not run.task.cancelled():
            return False
        if run.is_open and self._journal is not None:
            await self._journal.finish(request_id, "abort", None, len(run.tokens))
        return True

    def hint_bubble(self, name: str, *, quantile: float = 0.5) -> float | None:
        """Seconds until the running generation of this request id, or session, is likely to end: from its
        worker's pace and from how long generations that went as far as this one went on. None: none runs.
        0.0: it is about to end, or nothing is known to go by."""
        run = self._runs.get(name)
        if run is None:
            run = next((one for one in reversed(self._runs.values()) if one.session == name), None)
        if run is None:
            return None
        made = len(run.tokens)
        rest = predicted_rest_tokens(
            made, run.params.max_tokens, self._lengths.beyond(run.session, made), quantile
        )
        seat = self._fleet.seats.get(run.worker) if run.worker is not None else None
        if seat is None:
            return 0.0
        queue_s = 0.0 if run.has_begun else (seat.wait_s or 0.0) - (_now() - run.sent_at)
        return predicted_rest_s(rest, seat.pace.gap_s or 0.0, queue_s=queue_s)

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """Put other weights in force on all workers. New requests wait until that is done; running ones go
        on, under the new weights from some token on, which their chunks tell. Once begun it is carried
        through, even if the caller is cancelled.

        Raises:
            UpdateFailed: not every worker followed; ``version`` is in force. If any followed, the others are
                out of rotation until they have those weights: the fleet is never a mixture."""
        await self._started()
        await asyncio.shield(self._background.spawn(self._update(version, source)))

    async def model_info(self) -> ModelInfo:
        """What the workers serve, as the first that said so told it.

        Raises:
            SetupError, WorkerFault, JournalFault: as `start`."""
        await self._started()
        return self._fleet.info

    def status(self) -> ClientStatus:
        """How things are now."""
        return ClientStatus(
            workers=tuple(seat.status() for seat in self._fleet.seats.values()),
            in_flight=self._num_open,
            waiting=len(self._runs) - self._num_open,
            weight_version=self._fleet.version,
        )

    async def aclose(self) -> None:
        """Cancel what runs (the journal keeps it for `resume`) and close what the client owns. Idempotent,
        never raises."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    close = aclose

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _stream(self, run: Run) -> AsyncGenerator[TokenChunk, None]:
        self._go(run)
        assert run.outlet is not None
        assert run.task is not None
        try:
            while (chunk := await run.outlet.get()) is not None:
                yield chunk
        finally:
            run.end()
            await asyncio.wait([run.task])

    def _run(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        session: str,
        request_id: str | None,
        rule: OnVersionChange | None,
        *,
        outlet: Outlet | None = None,
    ) -> Run:
        return run_of(
            prompt,
            params,
            session,
            request_id,
            rule or self._rule,
            tokenizer=self._tokenizer,
            inexact=[
                seat.name for seat in self._fleet.seats.values() if not seat.worker.supports_exact_resume
            ],
            outlet=outlet,
        )

    def _go(self, run: Run) -> None:
        """Let the run run, as a task of its own."""
        if self._closing is not None:
            raise ClientClosed("the client is closed")
        if run.request_id in self._runs:
            raise InvalidRequest(f"request {run.request_id!r} is in flight already")
        self._runs[run.request_id] = run
        run.task = asyncio.create_task(self._work(run))
        run.task.add_done_callback(lambda task: self._ended(run, task))

    async def _work(self, run: Run) -> Generation:
        driver, journal = await self._started()
        async with self._slots:
            await self._admission.wait()
            self._num_open += 1
            self.metrics.in_flight.inc()
            try:
                known = await self._open(run, journal)
                if isinstance(known, Generation):
                    return known
                return await driver.drive(run, known)
            finally:
                self._num_open -= 1
                self.metrics.in_flight.dec()

    async def _open(self, run: Run, journal: TokenJournal) -> Generation | Done | None:
        """Enter it into the journal, or take up what is there."""
        if run.has_id:
            try:
                logged = await journal.load(run.request_id)
            except UnknownRequest:
                pass
            else:
                return take_up(run, logged, self._fleet.info)
        if run.params.seed is None:
            run.params = replace(run.params, seed=secrets.randbelow(MOST_SEED))
        await journal.open_request(run.request_id, run.session, run.prompt, run.params)
        run.is_open = True
        return None

    async def _outcome(self, run: Run) -> Generation:
        assert run.task is not None
        try:
            return await asyncio.shield(run.task)
        except asyncio.CancelledError:
            if run.task.cancelled() and run.ended_by is not None:
                raise _ending(run) from None
            run.end()
            await asyncio.wait([run.task])
            raise

    def _ended(self, run: Run, task: asyncio.Task[Generation]) -> None:
        """The run's task is done, in whatever way."""
        del self._runs[run.request_id]
        error: BaseException | None
        if task.cancelled():
            error = _ending(run) if run.ended_by else asyncio.CancelledError()
            outcome = "cancelled"
        elif error := task.exception():
            outcome = type(error).__name__
        else:
            outcome = task.result().finish_reason
            self._lengths.observe(run.session, len(run.tokens))
        self.metrics.requests.labels(outcome).inc()
        if run.outlet is not None:
            run.outlet.close(error)
        can_come_back = run.has_id or run.ended_by or isinstance(error, RequestFailed | JournalFault)
        if error and run.is_open and not can_come_back:
            # Nobody knows its id, so that nobody will resume it: its session can be pruned.
            self._background.spawn(self._drop(run))

    async def _drop(self, run: Run) -> None:
        if self._journal is not None:
            with contextlib.suppress(RolloutError):
                await self._journal.finish(run.request_id, "abort", None, len(run.tokens))

    async def _started(self) -> tuple[Driver, TokenJournal]:
        if self._closing is not None:
            raise ClientClosed("the client is closed")
        if self._driver is None or self._journal is None:
            async with self._starting:
                if self._driver is None or self._journal is None:
                    await self._fleet.start()
                    self._journal = self._open_journal()
                    clock = asyncio.get_running_loop().time
                    self._driver = Driver(
                        self._fleet,
                        self._journal,
                        self.metrics,
                        self._budget,
                        clock=clock,
                        spawn=self._background.spawn,
                        nonce=secrets.token_hex(3),
                    )
                    watch = Watch(
                        self._fleet, self._pace, self.metrics, clock=clock, spawn=self._background.spawn
                    )
                    self._watching = asyncio.create_task(watch.keep())
        return self._driver, self._journal

    def _open_journal(self) -> TokenJournal:
        if self._journal_at is None:
            return MemoryJournal()
        if isinstance(self._journal_at, str | Path):
            return Journal(self._journal_at, durability=self._durability)
        return self._journal_at

    async def _update(self, version: int, source: WeightSource) -> None:
        async with self._updating:
            self._admission.clear()
            try:
                await self._fleet.update_weights(version, source)
            finally:
                self._admission.set()

    async def _close(self) -> None:
        running = [run.task for run in self._runs.values() if run.task is not None]
        for run in list(self._runs.values()):
            run.end("close")
        if running:
            # The watch sees to it that they do end.
            await asyncio.wait(running)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._background.close(PUT_DOWN_S)
        if self._owns_workers:
            await self._fleet.close()
        if self._journal is not None and self._journal is not self._journal_at:
            await self._journal.close()


def _now() -> float:
    """Never a wall clock: those jump."""
    return asyncio.get_running_loop().time()


def _ending(run: Run) -> RolloutError:
    if run.ended_by == "close":
        return ClientClosed(f"the client was closed under request {run.request_id}")
    return RequestCancelled(f"request {run.request_id} was cancelled")
