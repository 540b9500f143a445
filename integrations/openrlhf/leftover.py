"""What a dead actor's episodes left behind, ended and removed."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import anyio.to_thread
from belayer_integrations.openrlhf.book import Past

from belayer_env.errors import BelayerError
from belayer_env.garbage import end_abandoned
from belayer_env.store import Store

__all__ = ["end_leftover", "sweep_store"]

log = logging.getLogger(__name__)

_swept: set[Path] = set()
_sweeping = threading.Lock()


async def end_leftover(past: Past) -> None:
    """End the episode that a book tells of, if a dead process left it open: nobody goes on with it. Never
    raises."""
    await anyio.to_thread.run_sync(_end, past)


def _end(past: Past) -> None:
    if past.episode_id is None or past.store is None or not past.store.is_dir():
        return
    sweep_store(past.store)
    try:
        with Store(past.store) as store:
            if store.episode(past.episode_id).state == "open":
                end_abandoned(store, past.episode_id)
    except BelayerError as error:
        log.warning("episode %s of a dead actor waits for `belayer gc`: %s", past.episode_id, error)


def sweep_store(root: Path) -> None:
    """Remove the half-made checkpoints of dead processes from a store, the first time that this process is
    asked to. Never raises."""
    with _sweeping:
        if root in _swept:
            return
        _swept.add(root)
    try:
        with Store(root) as store:
            store.sweep_partials()
    except BelayerError as error:
        log.warning("half-made checkpoints of a dead actor wait for `belayer gc`: %s", error)
