"""The watch over all streams of a client: one task that looks for silent ones and tries broken workers again.

One task, and not a timer for each token: a thousand streams give tens of thousands of tokens a second."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from belayer_rollout.errors import WorkerBusy, WorkerFault, WorkerHung
from belayer_rollout.fleet import Fleet, Seat, within
from belayer_rollout.metrics import ClientMetrics
from belayer_rollout.pace import PaceLimits, Suspicion, probe_deadline_s, suspicion
from belayer_rollout.run import Run

__all__ = ["Watch"]

GAPS_SAMPLED = 8
"""Of each worker, at each look."""
STRIKE_AGAIN_S = 5.0
"""A reader that is cancelled, by the watch or a caller, and does not come back (an engine's clean-up hangs)
is cancelled again."""


class Watch:
    """Looks at every stream several times a second."""

    def __init__(
        self,
        fleet: Fleet,
        limits: PaceLimits,
        metrics: ClientMetrics,
        *,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._fleet = fleet
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._spawn = spawn
        self._probed: set[str] = set()
        self._struck: dict[Run, float] = {}

    async def keep(self) -> None:
        """Look on and on."""
        tick_s = self._limits.tick_s
        while True:
            before = self._clock()
            await asyncio.sleep(tick_s)
            late_s = self._clock() - before - tick_s
            if late_s > tick_s:
                self._forgive(late_s)
            self.look()

    def look(self) -> None:
        """Once over everything."""
        now = self._clock()
        for seat in self._fleet.trials_due():
            self._spawn(self._fleet.trial(seat))
        for seat in self._fleet.seats.values():
            self._metrics.observe_gaps(seat.pace.recent[-GAPS_SAMPLED:])
            self._look_at(seat, now)
        for run, at in list(self._struck.items()):
            if run.worker is None or not (run.verdict or run.is_ending):
                del self._struck[run]
            elif now - at >= STRIKE_AGAIN_S:
                self._strike(run)

    def _look_at(self, seat: Seat, now: float) -> None:
        deadline_s = seat.pace.deadline_s
        worker_silent_s = now - seat.moved_at
        is_suspect = False
        for run in seat.runs:
            if run.verdict is not None or run.is_ending:
                self._struck.setdefault(run, now)
                continue
            found = suspicion(
                self._limits,
                deadline_s=deadline_s,
                silent_s=now - run.silent_since,
                worker_silent_s=worker_silent_s,
                has_begun=run.has_begun,
            )
            if found is Suspicion.STREAM:
                self._strike(
                    run,
                    WorkerHung(
                        f"{seat.name} gave this request no token for {now - run.silent_since:.1f} s",
                        worker=seat.name,
                    ),
                )
            is_suspect = is_suspect or found is Suspicion.WORKER
        if is_suspect and seat.name not in self._probed:
            self._probed.add(seat.name)
            self._spawn(self._probe(seat))

    async def _probe(self, seat: Seat) -> None:
        asked_at = self._clock()
        try:
            deadline_s = probe_deadline_s(self._limits, len(seat.runs))
            await within(deadline_s, seat.name, "a health probe", seat.worker.health())
        except WorkerBusy:
            # A refusal is an answer: whoever is overrun is not dead.
            seat.moved_at = max(seat.moved_at, self._clock())
        except WorkerFault as fault:
            if seat.moved_at <= asked_at:
                self._condemn(seat, fault)
        else:
            seat.moved_at = max(seat.moved_at, self._clock())
        finally:
            self._probed.discard(seat.name)

    def _condemn(self, seat: Seat, fault: WorkerFault) -> None:
        """No stream moves and it does not prove itself: every request leaves it."""
        for run in list(seat.runs):
            # Not one that waits for its consumer or its journal: that one's worker owes it nothing.
            if run.verdict is None and run.silent_since < math.inf:
                verdict = WorkerHung(
                    f"{seat.name} gives no tokens and is not healthy: {fault}", worker=seat.name
                )
                verdict.__cause__ = fault
                self._strike(run, verdict)

    def _strike(self, run: Run, verdict: WorkerFault | None = None) -> None:
        if run.task is not None:
            run.verdict = verdict or run.verdict
            run.strikes += 1
            self._struck[run] = self._clock()
            run.task.cancel()

    def _forgive(self, late_s: float) -> None:
        """This process stood still (stopped, or its loop was blocked): that is no silence of a worker."""
        for seat in self._fleet.seats.values():
            seat.moved_at += late_s
            for run in seat.runs:
                run.silent_since += late_s
