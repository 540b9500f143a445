"""A weight update of a pair: filled aside, committed in one step, followed by both engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from belayer_rollout.errors import OwnerFault, RolloutError, UpdateFailed, WorkerFault
from belayer_rollout.pair_engine import Slot
from belayer_rollout.pair_owner import OwnerSeat

__all__ = ["put_in_force"]

Lose = Callable[[Slot, str], None]


async def put_in_force(
    seat: OwnerSeat,
    primary: Slot,
    shadow: Slot | None,
    *,
    before: int,
    version: int,
    directory: Path,
    lose: Lose,
) -> None:
    """Return once ``version`` is in force. An engine that can't follow then is handed to ``lose``: its
    successor maps what is in force.

    Raises:
        UpdateFailed: it is not, and ``before`` still is, on both."""
    if shadow is not None:
        # Idle, and at its own pace: the primary serves on meanwhile.
        await _fill(seat, shadow, before, version, directory, lose)
    async with _held(primary, lose):
        if shadow is None:
            await _fill(seat, primary, before, version, directory, lose)
        await _follow(primary, version, lose)
    if shadow is not None:
        await _follow(shadow, version, lose)


async def _fill(
    seat: OwnerSeat, filler: Slot, before: int, version: int, directory: Path, lose: Lose
) -> None:
    try:
        await filler.engine.fill(directory, version)
    except WorkerFault as error:
        lose(filler, f"it broke while it loaded weights {version}: {error}")
        # It may have died right after the commit: the owner knows.
        if await _version_of(seat) != version:
            raise UpdateFailed(f"weights {version}: {error}", version=before) from error
    except UpdateFailed as error:
        raise UpdateFailed(str(error), version=before) from error


async def _version_of(seat: OwnerSeat) -> int | None:
    try:
        return await seat.in_force()
    except OwnerFault:
        return None


@contextlib.asynccontextmanager
async def _held(primary: Slot, lose: Lose) -> AsyncIterator[None]:
    """Within: no step of the primary is under way, and its requests wait. One that was held stays so."""
    was_held, primary.is_held = primary.is_held, True
    try:
        with contextlib.suppress(WorkerFault):
            # One that is lost draws no token, which is all that is wanted here.
            await primary.engine.hold()
        yield
    finally:
        primary.is_held = was_held
        primary.seen_alive = asyncio.get_running_loop().time()
        if not (primary.is_lost or was_held):
            try:
                await primary.engine.release()
            except RolloutError as error:
                lose(primary, f"it did not go on after an update: {error}")


async def _follow(slot: Slot, version: int, lose: Lose) -> None:
    if slot.is_lost:
        return
    try:
        followed = await slot.engine.follow()
    except RolloutError as error:
        lose(slot, f"it could not follow to weights {version}: {error}")
        return
    if followed != version:
        lose(slot, f"it follows weights {followed}, not {version}")
