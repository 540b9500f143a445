"""ShadowPair: a primary engine and a fully initialised shadow on one owner's memory, as one EngineWorker.

The pair watches the primary (its processes by pidfd, its tokens by the clock). When it is lost, its streams
end with WorkerGone, so that the client goes on from its journal; the old processes are fenced; owner and
device are checked; the shadow maps the live arena and takes every request from then on; and another shadow
is built in the background. Where a check fails the pair starts cold, and its history says why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any

from belayer_rollout.engines.base import WeightSource
from belayer_rollout.engines.probe import prove_generating
from belayer_rollout.errors import (
    InvalidRequest,
    OwnerDamaged,
    OwnerFault,
    RolloutError,
    SetupError,
    UpdateFailed,
    WeightsLost,
    WorkerFault,
    WorkerGone,
)
from belayer_rollout.pair_engine import EngineFactory, PairEngine, Slot
from belayer_rollout.pair_owner import OwnerSeat
from belayer_rollout.pair_record import Takeover
from belayer_rollout.pair_state import Event, PairState, after
from belayer_rollout.pair_update import put_in_force
from belayer_rollout.types import EngineRequest, ModelInfo, TokenChunk

__all__ = ["ShadowPair"]

STALL_S = 60.0
"""Silence of the whole engine with streams open. Prefill of a very long prompt gives no token meanwhile."""

WAIT_S = 300.0
"""How long a request waits for the next primary: a cold start of a large model takes minutes."""

FENCE_S = 10.0
"""After SIGKILL. Only a process that hangs in the kernel takes longer than some milliseconds."""

WATCH_S = 0.1
"""How often the watch looks for stopped and silent engines; deaths need no looking."""

COLD_STARTS = 3
"""In a row; then the pair is broken, as one more would fail like these."""

REBUILD_WAIT_S = 1.0
"""After a shadow that could not be built, doubled each time."""

MOST_REBUILD_WAIT_S = 60.0

MIN_BUILD_S = 1.0
"""What is waited in any case for an engine that is being built already."""


class ShadowPair:
    """See the module. One event loop; not for use after `close`."""

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "pair",
        engine_args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        weight_version: int = 0,
        exact_resume: bool = True,
        memory: str = "host",
        stall_s: float = STALL_S,
        wait_s: float = WAIT_S,
        make_engine: EngineFactory | None = None,
    ) -> None:
        """``engine_args``, ``env``, ``exact_resume``: as `VllmWorker`'s. ``weight_version``: of ``model`` on
        disk. ``memory``: "host" or "cuda:N", as `OwnerProcess`'s. ``make_engine``: in place of vLLM."""
        if not (stall_s > 0 and wait_s > 0):
            raise InvalidRequest(f"stall_s and wait_s must be positive: {stall_s}, {wait_s}")
        self._model = Path(model)
        self._name = name
        self._engine_args = dict(engine_args or {})
        self._env = dict(env or {})
        self._files: Path | None = None
        """Where weights `_files_version` are; None: in the model's own files."""
        self._files_version = weight_version
        self._version = weight_version
        self._exact = exact_resume
        self._memory = memory
        self._stall_s = stall_s
        self._wait_s = wait_s
        self._make_engine = make_engine or self._make_vllm
        self._state = PairState.NEW
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()
        """Held by whoever changes weights or the primary."""
        self._losses: asyncio.Queue[tuple[Slot | int, str, float]] = asyncio.Queue()
        """What was lost (an engine, or the owner of that process id), why, and when that was seen."""
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._disposals: set[asyncio.Task[Any]] = set()
        """Of those, the ones that must come to their end."""
        self._rebuilding: asyncio.Task[None] | None = None
        self._building: asyncio.Task[Slot] | None = None
        """The next shadow, until it is one, or a primary is to be made of it."""
        self._build_s = 0.0
        """What the last engine took to be built."""
        self._seat = OwnerSeat(memory)
        self._primary: Slot | None = None
        self._shadow: Slot | None = None
        self._epoch = 0
        self._directory: Path | None = None
        self._is_paused = False
        self._broken = ""
        self.history: list[Takeover] = []
        """Every fault of a primary, oldest first."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def supports_exact_resume(self) -> bool:
        return self._exact

    @property
    def recovers_itself(self) -> bool:
        return True

    @property
    def state(self) -> PairState:
        return self._state

    @property
    def epoch(self) -> int:
        """Grows with every primary; its chunks are marked NAME/EPOCH."""
        return self._epoch

    @property
    def directory(self) -> Path | None:
        """For its engines' sockets, and what its user wants to go when the pair does; None before `start`."""
        return self._directory

    def primary_processes(self) -> tuple[int, ...]:
        """Ids of the processes of the engine that serves, EngineCore first; for drills."""
        return self._primary.processes.pids if self._primary is not None else ()

    def shadow_processes(self) -> tuple[int, ...]:
        """Likewise of the shadow; empty until it is ready."""
        return self._shadow.processes.pids if self._shadow is not None else ()

    def owner_process(self) -> int | None:
        """The owner's process id."""
        return self._seat.pid

    async def wait_for(self, *states: PairState, timeout_s: float = WAIT_S) -> None:
        """Until the pair is in one of these states.

        Raises:
            TimeoutError: it did not get there."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self._state in states)

    async def start(self) -> None:
        """Return when a primary serves; its shadow is built after that (`wait_for(PairState.GUARDED)`).
        A broken pair starts anew, and where its weights were lost, from files: see `weight_version`.

        Raises:
            WorkerFault, OwnerFault, SetupError: it can't be."""
        async with self._starting:
            if self._state in (PairState.NEW, PairState.BROKEN):
                first = self._state is PairState.NEW
                await self._move(Event.START)
                # Where those in force were lost, this call is the consent to older ones.
                self._version = await self._held_version()
                if first:
                    self._directory = Path(tempfile.mkdtemp(prefix="belayer-pair-"))
                    self._spawn(self._supervise())
                    self._spawn(self._watch_pace())
                async with self._turn:
                    await self._cold_start(Takeover(time.time(), "start", "cold"))
        await self._serving()

    async def model_info(self) -> ModelInfo:
        slot = await self._serving()
        return await slot.engine.model_info()

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        slot = await self._serving()
        async with contextlib.aclosing(slot.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    async def abort(self, request_id: str) -> None:
        if self._primary is not None:
            await self._primary.engine.abort(request_id)

    async def health(self) -> None:
        if self._is_paused:
            await self._serving()
        else:
            await prove_generating(self)

    async def pause(self) -> None:
        """Draw no token until `resume`, whoever becomes primary meanwhile; requests wait. Idempotent."""
        self._is_paused = True
        async with self._turn:
            if (primary := self._at_work) is not None:
                # One that breaks in this has a successor, which is paused before it serves.
                with contextlib.suppress(WorkerFault):
                    await self._keep_paused(primary)

    async def resume(self) -> None:
        """Go on. Idempotent."""
        async with self._turn:
            was_paused, self._is_paused = self._is_paused, False
            if (primary := self._at_work) is not None and was_paused:
                primary.is_held = False
                primary.seen_alive = time.monotonic()
                try:
                    await primary.engine.release()
                except RolloutError as error:
                    self._lose(primary, f"it did not go on after a pause: {error}")

    async def weight_version(self) -> int:
        await self._serving()
        return self._version

    async def update_weights(self, version: int, source: WeightSource) -> None:
        """See `EngineWorker.update_weights`. The shadow, which is idle, loads the update into the owner's
        other buffer while the primary serves on; committing it is one step, after which both map it. A
        cancelled call waits until the update is through or undone.

        A directory has to stay as it is until the next update: if the owner's memory is lost, and no engine
        has it either, these weights are loaded from there. Tensors are not kept: lost with all three
        processes, they break the pair (`WeightsLost`), which serves no older ones on its own account."""
        update = asyncio.ensure_future(self._update(version, source))
        try:
            await asyncio.shield(update)
        except asyncio.CancelledError:
            await asyncio.wait({update})
            if not update.cancelled():
                update.exception()
            raise

    async def close(self) -> None:
        await self._move(Event.CLOSE)
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            for task in tasks:
                if task not in self._disposals:
                    task.cancel()
            await asyncio.wait(tasks)
        slots = [slot for slot in (self._primary, self._shadow) if slot is not None]
        self._primary = self._shadow = None
        for slot in slots:
            slot.is_lost = True
            slot.engine.sever("the pair is closed")
        await asyncio.gather(*(slot.dispose() for slot in slots), return_exceptions=True)
        await self._seat.close()
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, True)

    # Private from here on: state and tasks.

    async def _move(self, event: Event) -> None:
        self._state = after(self._state, event)
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _dispose_later(self, slot: Slot) -> None:
        task = self._spawn(slot.dispose())
        self._disposals.add(task)
        task.add_done_callback(self._disposals.discard)

    @property
    def _at_work(self) -> Slot | None:
        """The primary, if it serves and is not known to be lost."""
        slot = self._primary
        return slot if slot is not None and self._state.serves and not slot.is_lost else None

    async def _serving(self) -> Slot:
        ends = asyncio.get_running_loop().time() + self._wait_s
        while (slot := self._at_work) is None:
            if not (self._state.makes_wait or self._state.serves):
                why = f"{self._name} is {self._state.value}. {self._broken}".rstrip()
                raise WorkerGone(why, worker=self._name)
            try:
                async with asyncio.timeout_at(ends), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                raise WorkerGone(f"no primary within {self._wait_s:g} s", worker=self._name) from None
        return slot

    # Watching.

    def _lose(self, slot: Slot, cause: str) -> None:
        """Note a loss, once; its streams end now, and the supervisor does the rest."""
        if not slot.is_lost:
            slot.is_lost = True
            slot.engine.sever(cause)
            self._losses.put_nowait((slot, cause, time.monotonic()))

    async def _watch_death(self, slot: Slot) -> None:
        self._lose(slot, await slot.engine.wait_gone())

    async def _watch_owner(self) -> None:
        pid = await self._seat.wait_gone()
        self._losses.put_nowait((pid, f"the owner (process {pid}) died", time.monotonic()))

    async def _watch_pace(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for slot in (self._primary, self._shadow):
                if slot is not None and not slot.is_lost and (why := slot.why_hung(self._stall_s)):
                    self._lose(slot, why)

    async def _supervise(self) -> None:
        while True:
            slot, cause, seen = await self._losses.get()
            if isinstance(slot, int):
                await self._replace_owner(slot, cause)
            elif slot is self._primary:
                await self._replace_primary(slot, cause, seen)
            elif slot is self._shadow:
                await self._replace_shadow()

    # Taking over.

    async def _replace_primary(self, old: Slot, cause: str, seen: float) -> None:
        record = Takeover(time.time(), cause, detect_s=seen - old.seen_alive if old.num_open else None)
        self.history.append(record)
        self._primary = None
        await self._move(Event.PRIMARY_LOST)
        try:
            # At once: an update that runs meanwhile must not keep the old one alive.
            await old.processes.fence(FENCE_S)
            record.fence_s = time.monotonic() - seen
            async with self._turn:
                if self._state is PairState.PROMOTING:
                    await self._promote(record)
                else:
                    record.reason = "no shadow was ready"
                if self._state is PairState.COLD:
                    await self._cold_start(record)
        except WorkerFault as error:
            # It can't be fenced: nothing may map the arena, and no second engine may speak for it.
            record.reason = self._broken = f"{type(error).__name__}: {error}"
            if self._state is PairState.PROMOTING:
                await self._move(Event.REFUSED)
            await self._discard_shadow()
            await self._move(Event.START_FAILED)
        finally:
            record.swap_s = time.monotonic() - seen
            record.is_over = True
            self._dispose_later(old)

    async def _promote(self, record: Takeover) -> None:
        began = time.monotonic()
        try:
            shadow = self._shadow
            if shadow is None or shadow.is_lost:
                raise WorkerGone("the shadow is lost, too", worker=self._name)
            epoch, version = await self._seat.fence()
            checked = time.monotonic()
            answer = await shadow.engine.activate(epoch)
            await self._keep_paused(shadow)
            if shadow.is_lost:
                raise WorkerGone("the shadow was lost as it took over", worker=self._name)
        except (OwnerFault, WorkerFault) as error:
            record.reason = f"{type(error).__name__}: {error}"
            await self._move(Event.REFUSED)
            return
        # The device is checked in the worker, in the same call as the mapping: a round trip less.
        device_s = float(answer.get("check_s", 0.0))
        record.check_s = checked - began + device_s
        record.activate_s = time.monotonic() - checked - device_s
        self._shadow = None
        await self._crown(shadow, version, record, Event.ACTIVATED)

    async def _keep_paused(self, slot: Slot) -> None:
        if self._is_paused:
            slot.is_held = True
            await slot.engine.hold()

    async def _crown(self, slot: Slot, version: int | None, record: Takeover, event: Event) -> None:
        """From here on requests go to it."""
        self._epoch += 1
        self._version = self._files_version if version is None else version
        slot.engine.rename(f"{self._name}/{self._epoch}")
        slot.seen_alive = time.monotonic()
        self._primary = slot
        record.epoch, record.weight_version = self._epoch, self._version
        self._broken = ""
        await self._move(event)
        self._rebuild()

    async def _cold_start(self, record: Takeover) -> None:
        """Build a primary, on the owner's memory if that is sound. Leaves the pair ALONE or BROKEN."""
        record.path = "cold"
        for _ in range(COLD_STARTS):
            try:
                await self._build_primary(record)
                return
            except (SetupError, WeightsLost) as error:
                self._broken = f"{type(error).__name__}: {error}"
                break
            except RolloutError as error:
                self._broken = f"{type(error).__name__}: {error}"
                record.notes.append(self._broken)
        await self._discard_shadow()
        await self._move(Event.START_FAILED)

    async def _build_primary(self, record: Takeover) -> None:
        owner = self._seat.pid
        await self._make_owner_sound(record)
        slot = await self._adopted(record) if owner == self._seat.pid else None
        await self._discard_shadow()
        if slot is None:
            slot = await self._build(lane=0, in_background=False)
        try:
            epoch, version = await self._seat.fence()
            await slot.engine.activate(epoch)
            await self._keep_paused(slot)
            if slot.is_lost:
                raise WorkerGone("the primary died as it was activated", worker=self._name)
        except BaseException:
            await slot.dispose()
            raise
        await self._crown(slot, version, record, Event.PRIMARY_READY)

    async def _adopted(self, record: Takeover) -> Slot | None:
        """The shadow that is being built, once it is: sooner there than one that is begun now, if it goes on
        as the last one did."""
        building, self._building = self._building, None
        if building is None:
            return None
        slot = None
        try:
            await asyncio.wait({building}, timeout=max(self._build_s, MIN_BUILD_S))
            if building.done():
                slot = building.result()
                record.notes.append("the shadow that was being built serves")
            else:
                record.notes.append(f"the shadow that is being built is late by {self._build_s:.1f} s")
        except RolloutError as error:
            record.notes.append(f"the shadow that was being built: {type(error).__name__}: {error}")
        finally:
            if slot is None:
                await self._abandon(building)
        return slot

    async def _build(self, *, lane: int, in_background: bool) -> Slot:
        engine = self._make_engine(
            owner=self._seat.process.path,
            lane=lane,
            name=f"{self._name}/shadow",
            in_background=in_background,
            weights=self._files,
            files_version=self._files_version,
        )
        slot = Slot(engine, lane)
        began = time.monotonic()
        try:
            await slot.start()
        except BaseException:
            await slot.dispose()
            raise
        self._build_s = time.monotonic() - began
        self._spawn(self._watch_death(slot))
        return slot

    # The owner.

    async def _make_owner_sound(self, record: Takeover) -> None:
        """Raises:
        WeightsLost: nobody has the weights in force."""
        if await self._sound_version(record) is None and self._version != self._files_version:
            raise WeightsLost(
                f"weights {self._version} were lost with their owner; {self._files_version} is in files. "
                "Give update_weights a directory that stays, or start the pair again to have those"
            )

    async def _held_version(self) -> int:
        """What an owner that is sound has, or else the files'."""
        with contextlib.suppress(OwnerFault):
            if self._seat.pid is not None and (held := await self._seat.check(None)) is not None:
                return held
        return self._files_version

    async def _sound_version(self, record: Takeover) -> int | None:
        """The version that the owner holds, which may be another owner now; None: it is empty."""
        rescue_from: list[PairEngine] = []
        if self._seat.pid is not None:
            try:
                return await self._seat.check(None)
            except OwnerDamaged as error:
                # What an engine maps is this very memory: only the files are left.
                record.notes.append(f"OwnerDamaged: {error}")
            except OwnerFault as error:
                record.notes.append(f"{type(error).__name__}: {error}")
                if self._shadow is not None and not self._shadow.is_lost:
                    rescue_from.append(self._shadow.engine)
        return await self._seat_owner(rescue_from)

    async def _seat_owner(self, rescue_from: list[PairEngine]) -> int | None:
        version = await self._seat.renew(rescue_from)
        self._spawn(self._watch_owner())
        return version

    async def _replace_owner(self, pid: int, cause: str) -> None:
        """The primary serves on from the memory that it still maps, and hands that to a new owner."""
        async with self._turn:
            primary = self._at_work
            if primary is None or pid != self._seat.pid:
                # Whoever builds the next primary sees to the owner first, or has done so.
                return
            slots = [slot for slot in (primary, self._shadow) if slot is not None]
            try:
                if await self._seat_owner([slot.engine for slot in slots]) is None:
                    raise OwnerDamaged("its weights could not be kept")
                await self._seat.fence()
            except OwnerFault as error:
                self._lose(primary, f"{cause}, and {error}")
                return
            if primary.is_lost:
                # Lost together with the owner; the shadow has handed over its weights and takes over.
                return
            await self._discard_shadow()
            if self._state is PairState.GUARDED:
                await self._move(Event.SHADOW_LOST)
            self._rebuild()

    # The shadow.

    def _rebuild(self) -> None:
        if self._rebuilding is None or self._rebuilding.done():
            self._rebuilding = self._spawn(self._build_shadow())

    async def _build_shadow(self) -> None:
        wait_s = REBUILD_WAIT_S
        while self._state is PairState.ALONE and self._primary is not None:
            building = self._spawn(self._build(lane=1 - self._primary.lane, in_background=True))
            self._building = building
            try:
                # Not to be cancelled with this task: a primary's successor may be made of it.
                slot = await asyncio.shield(building)
                async with self._turn:
                    # The weights may have changed while it was built.
                    await slot.engine.follow()
                    if self._state is PairState.ALONE and not slot.is_lost and self._building is building:
                        self._shadow, self._building = slot, None
                        await self._move(Event.SHADOW_READY)
                        return
            except RolloutError as error:
                self._broken = f"no shadow: {error}"
            finally:
                if self._building is building:
                    self._building = None
                    await self._abandon(building)
            if self._broken:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_REBUILD_WAIT_S)

    async def _abandon(self, building: asyncio.Task[Slot]) -> None:
        building.cancel()
        await asyncio.wait({building})
        if not building.cancelled() and building.exception() is None:
            building.result().is_lost = True
            self._dispose_later(building.result())

    async def _replace_shadow(self) -> None:
        async with self._turn:
            await self._discard_shadow()
            if self._state is PairState.GUARDED:
                await self._move(Event.SHADOW_LOST)
            self._rebuild()

    async def _discard_shadow(self) -> None:
        if self._rebuilding is not None and not self._rebuilding.done():
            self._rebuilding.cancel()
            await asyncio.wait({self._rebuilding})
        slot, self._shadow = self._shadow, None
        if slot is not None:
            slot.is_lost = True
            slot.engine.sever("discarded")
            self._dispose_later(slot)

    # Weights and engines.

    async def _update(self, version: int, source: WeightSource) -> None:
        from belayer_rollout.engines.vllm.weights import check_complete, staged

        with contextlib.ExitStack() as stack:
            try:
                directory = await asyncio.to_thread(stack.enter_context, staged(source))
                if self._model.is_dir():
                    await asyncio.to_thread(check_complete, self._model, directory)
            except (ValueError, OSError) as error:
                raise UpdateFailed(f"weights {version}: {error}", version=self._version) from error
            while True:
                await self._serving()
                async with self._turn:
                    primary, shadow = self._at_work, self._shadow
                    if primary is None:
                        continue
                    await put_in_force(
                        self._seat,
                        primary,
                        shadow if shadow is not None and not shadow.is_lost else None,
                        before=self._version,
                        version=version,
                        directory=directory,
                        lose=self._lose,
                    )
                    self._version = version
                    if not isinstance(source, Mapping):
                        self._files, self._files_version = directory.absolute(), version
                    return

    def _make_vllm(
        self,
        *,
        owner: Path,
        lane: int,
        name: str,
        in_background: bool,
        weights: Path | None,
        files_version: int,
    ) -> PairEngine:
        from belayer_rollout.engines.vllm.attached import AttachedVllm, half_of_the_cores
        from belayer_rollout.engines.vllm.extension import LEFTOVER

        env = {
            "VLLM_CPU_OMP_THREADS_BIND": half_of_the_cores(lane),
            # They are the last to use these when this process is killed, and the owner with it.
            LEFTOVER: os.pathsep.join(map(str, (self._directory, owner.parent))),
        }
        return AttachedVllm(
            self._model,
            owner=owner,
            memory=self._memory,
            name=name,
            engine_args=self._engine_args,
            env=env | self._env,
            weights=weights,
            files_version=files_version,
            exact_resume=self._exact,
            in_background=in_background,
        )
