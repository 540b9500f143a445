"""The workers of a client: which are fit, what they are busy with, and which weights they have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from belayer_rollout.engines.base import EngineWorker, WeightSource
from belayer_rollout.errors import InvalidRequest, UpdateFailed, WorkerBusy, WorkerFault, WorkerHung
from belayer_rollout.metrics import ClientMetrics
from belayer_rollout.pace import Pace, PaceLimits, probe_deadline_s
from belayer_rollout.routing import (
    Affinity,
    Breaker,
    BreakerEvent,
    BreakerLimits,
    BreakerState,
    Candidate,
    choose,
)
from belayer_rollout.run import Run
from belayer_rollout.status import WorkerStatus
from belayer_rollout.types import ModelInfo

__all__ = ["Fleet", "Seat", "within"]

START_S = 900.0
"""An engine compiles, and loads weights over a network."""
UPDATE_S = 600.0
ASK_S = 10.0
"""For the small questions: which model, which weight version."""
MOST_BUSY_S = 1.0
"""How long a refusal without a word on when to ask again makes other requests look elsewhere first."""

WAITS_KEPT = 32

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


async def within(seconds: float, worker: str, doing: str, call: Awaitable[_T]) -> _T:
    """What ``call`` to a worker returns, within a deadline.

    Raises:
        WorkerHung: it did not return.
        WorkerFault, UpdateFailed: what it raised."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise WorkerHung(f"{worker} did not finish {doing} within {seconds:g} s", worker=worker) from error


class Seat:
    """One worker and what the client knows of it."""

    def __init__(self, worker: EngineWorker, breaker: BreakerLimits, pace: PaceLimits) -> None:
        self.worker = worker
        self.name = worker.name
        self.breaker = Breaker(breaker)
        self.pace = Pace(pace)
        self.runs: set[Run] = set()
        self.info: ModelInfo | None = None
        self.version: int | None = None
        """The weights it has, as far as the client put them there or asked."""
        self.is_started = False
        self.is_stale = False
        """It has other weights than the fleet: out of rotation."""
        self.busy_until = -math.inf
        self.moved_at = -math.inf
        """When it last gave any sign of life."""
        self.sent = 0
        self.faults: Counter[str] = Counter()
        self.waits: deque[float] = deque(maxlen=WAITS_KEPT)
        """From sending a request to its first token."""

    @property
    def wait_s(self) -> float | None:
        """The median wait for a first token; None before there was one."""
        return sorted(self.waits)[len(self.waits) // 2] if self.waits else None

    @property
    def is_fit(self) -> bool:
        """It may get requests."""
        return (
            self.is_started
            and not self.is_stale
            and (self.worker.recovers_itself or self.breaker.state is BreakerState.CLOSED)
        )

    def status(self) -> WorkerStatus:
        """How it is now."""
        return WorkerStatus(
            name=self.name,
            is_fit=self.is_fit,
            is_stale=self.is_stale,
            breaker=self.breaker.state.value,
            load=len(self.runs),
            sent=self.sent,
            gap_s=self.pace.gap_s,
            deadline_s=self.pace.deadline_s,
            weight_version=self.version,
            faults=dict(self.faults),
        )


class Fleet:
    """All workers of a client."""

    def __init__(
        self,
        workers: Sequence[EngineWorker],
        *,
        breaker: BreakerLimits,
        pace: PaceLimits,
        metrics: ClientMetrics,
        clock: Callable[[], float],
    ) -> None:
        """Raises:
        InvalidRequest: no worker, or two of one name."""
        self.seats = {worker.name: Seat(worker, breaker, pace) for worker in workers}
        if not workers or len(self.seats) < len(workers):
            raise InvalidRequest("a client needs one or more workers, each with a name of its own")
        self.version: int | None = None
        """The weights in force, once the client has put some there."""
        self._source: Path | None = None
        self._affinity = Affinity()
        self._pace = pace
        self._metrics = metrics
        self._clock = clock
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()

    @property
    def info(self) -> ModelInfo:
        """The model, as far as any worker has told."""
        return next((seat.info for seat in self.seats.values() if seat.info is not None), ModelInfo())

    async def start(self) -> None:
        """Start all; those that break are tried again later, as long as one works.

        Raises:
            SetupError: a worker cannot work on this host.
            WorkerFault: none could be started."""
        waiting = [seat for seat in self.seats.values() if not seat.is_started]
        outcomes = await asyncio.gather(*map(self._start, waiting), return_exceptions=True)
        faults = [outcome for outcome in outcomes if isinstance(outcome, WorkerFault)]
        others = [outcome for outcome in outcomes if outcome and not isinstance(outcome, WorkerFault)]
        if others:
            raise others[0]
        for seat, outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, WorkerFault) and seat.breaker.state is BreakerState.CLOSED:
                self._count(seat, outcome)
                self._on(seat, BreakerEvent.FAULT)
        if faults and not any(seat.is_started for seat in self.seats.values()):
            raise faults[0]

    def pick(self, run: Run) -> Seat | None:
        """The worker for the next attempt at a request; None if none is fit now."""
        now = self._clock()
        name = choose(
            [
                Candidate(seat.name, len(seat.runs), seat.is_fit, seat.busy_until > now, seat.sent)
                for seat in self.seats.values()
            ],
            home=self._affinity.home(run.session),
            avoid=run.streak.avoid,
        )
        if name is None:
            return None
        self._affinity.settle(run.session, name)
        return self.seats[name]

    def has_other(self, avoid: Collection[str]) -> bool:
        """Whether a fit worker is neither in ``avoid`` nor busy: then nobody need wait."""
        now = self._clock()
        return any(
            seat.is_fit and seat.name not in avoid and seat.busy_until <= now for seat in self.seats.values()
        )

    async def changed(self, seconds: float) -> None:
        """Wait until a worker becomes fit, or for ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def broke(self, seat: Seat, fault: WorkerFault) -> None:
        """A request broke on it. One that recovers itself gets its next request at once."""
        self._count(seat, fault)
        if not seat.worker.recovers_itself:
            self._on(seat, BreakerEvent.FAULT)

    def came_through(self, seat: Seat) -> None:
        """A request ended well on it."""
        seat.moved_at = self._clock()
        self._on(seat, BreakerEvent.SUCCESS)

    def refused(self, seat: Seat, busy: WorkerBusy) -> None:
        """It is busy: it lives, and others are asked first for a while."""
        now = self._clock()
        seat.moved_at = now
        seat.busy_until = now + (MOST_BUSY_S if busy.retry_after_s is None else busy.retry_after_s)

    def trials_due(self) -> list[Seat]:
        """Broken workers whose trial is due; it begins now."""
        now = self._clock()
        due = [
            seat
            for seat in self.seats.values()
            if seat.breaker.state is BreakerState.OPEN and now >= seat.breaker.trial_at
        ]
        for seat in due:
            self._on(seat, BreakerEvent.TRIAL)
        return due

    async def trial(self, seat: Seat) -> None:
        """Let it prove that it works, and under the right weights; only then it gets requests again."""
        try:
            if not seat.is_started:
                await self._start(seat)
            deadline_s = probe_deadline_s(self._pace, len(seat.runs))
            with contextlib.suppress(WorkerBusy):
                await within(deadline_s, seat.name, "a health probe", seat.worker.health())
            await self._catch_up(seat)
        except (WorkerFault, UpdateFailed) as fault:
            _log.info("trial of %s failed: %s", seat.name, fault)
            self._on(seat, BreakerEvent.TRIAL_FAILED)
        except BaseException:
            self._on(seat, BreakerEvent.TRIAL_FAILED)
            raise
        else:
            self._on(seat, BreakerEvent.TRIAL_PASSED)

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """Put these weights into every worker; see `RolloutClient.update_weights`."""
        async with self._updating:
            await self._update_all(version, source)

    async def _update_all(self, version: int, source: WeightSource) -> None:
        seats = [seat for seat in self.seats.values() if seat.is_started]
        outcomes = await asyncio.gather(*(self._update(seat, version, source) for seat in seats))
        failed = [(seat, fault) for seat, fault in zip(seats, outcomes, strict=True) if fault]
        followed = [seat for seat in seats if seat.version == version]
        if followed:
            self.version, self._source = version, source if isinstance(source, Path) else None
        for seat in seats:
            # If none followed, those that still tell the version of before are no mixture.
            seat.is_stale = seat.version != (version if followed else self._in_force(seats))
            if seat.is_stale and seat.breaker.state is BreakerState.CLOSED:
                # Its trials bring it back, once it has the right weights.
                self._on(seat, BreakerEvent.FAULT)
        self._wake()
        if failed:
            out = ", ".join(seat.name for seat in seats if seat.is_stale) or "none"
            causes = "; ".join(f"{seat.name}: {fault}" for seat, fault in failed)
            in_force = self._in_force(seats)
            raise UpdateFailed(
                f"version {version} did not reach every worker; {in_force} is in force; "
                f"out of rotation: {out} ({causes})",
                version=in_force,
            ) from failed[0][1]

    async def close(self) -> None:
        """Close every worker."""
        await asyncio.gather(*(seat.worker.close() for seat in self.seats.values()))

    def _in_force(self, seats: Sequence[Seat]) -> int:
        if self.version is not None:
            return self.version
        return max((seat.version for seat in seats if seat.version is not None), default=0)

    async def _start(self, seat: Seat) -> None:
        await within(START_S, seat.name, "its start", seat.worker.start())
        seat.info = await within(ASK_S, seat.name, "telling its model", seat.worker.model_info())
        seat.is_started = True
        seat.moved_at = self._clock()

    async def _catch_up(self, seat: Seat) -> None:
        """One that came back may have come back with the weights that it once began with."""
        async with self._updating:
            if self.version is None:
                return
            seat.version = await within(
                ASK_S, seat.name, "telling its weight version", seat.worker.weight_version()
            )
            fault = None
            if seat.version != self.version and self._source is not None:
                fault = await self._update(seat, self.version, self._source)
            seat.is_stale = seat.version != self.version
            if seat.is_stale:
                raise fault or UpdateFailed(
                    f"{seat.name} has version {seat.version}, not {self.version}", version=self.version
                )

    async def _update(
        self, seat: Seat, version: int, source: WeightSource
    ) -> WorkerFault | UpdateFailed | None:
        """Update one worker; ``seat.version`` is what it says it has after that, None if it says nothing."""
        try:
            await within(UPDATE_S, seat.name, "a weight update", seat.worker.update_weights(version, source))
        except UpdateFailed as fault:
            seat.version = fault.version
            return fault
        except WorkerFault as fault:
            self._count(seat, fault)
            try:
                seat.version = await within(
                    ASK_S, seat.name, "telling its weight version", seat.worker.weight_version()
                )
            except WorkerFault:
                seat.version = None
            # Its answer may have been lost after it had done the work.
            return None if seat.version == version else fault
        seat.version = version
        return None

    def _count(self, seat: Seat, fault: WorkerFault) -> None:
        seat.faults[type(fault).__name__] += 1

    def _on(self, seat: Seat, event: BreakerEvent) -> None:
        before = seat.breaker.state
        state = seat.breaker.on(event, self._clock())
        if state is not before:
            _log.info("breaker of %s: %s after %s", seat.name, state.value, event.value)
            self._metrics.show_breaker(seat.name, state)
            if state is BreakerState.CLOSED:
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
