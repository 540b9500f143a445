"""What processes that died left on this host, and its removal: sandboxes, half-made checkpoints, episodes."""

from __future__ import annotations

from dataclasses import dataclass

from belayer_env.errors import BelayerError
from belayer_env.runtimes import open_sweeper
from belayer_env.store import Store

__all__ = ["Collected", "collect_garbage", "end_abandoned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one collection removed, by id, and what it could not ("id: why").

    ``resumable``: open episodes whose process is dead. They stay, with their checkpoints, unless asked
    for."""

    sandboxes: tuple[str, ...]
    partials: tuple[str, ...]
    episodes: tuple[str, ...]
    resumable: tuple[str, ...]
    failed: tuple[str, ...]


def collect_garbage(store: Store, *, episodes: bool = False) -> Collected:
    """Remove the sandboxes, mounts, namespaces, cgroups and files that have no living owner.

    ``episodes``: end the open episodes of dead processes as well; they cannot be resumed then. Idempotent,
    and harmless beside running envs: what a living process owns is not touched."""
    swept, failed = [], []
    for home in store.homes():
        if home.is_owned:
            continue
        try:
            # A home whose owner.json is unreadable says no runtime; runc's sweep goes by the home's name
            # alone.
            open_sweeper(home.runtime or "runc", store).sweep(home.path)
            swept.append(home.id)
        except BelayerError as error:
            failed.append(f"{home.id}: {error}")
    abandoned = [
        record.id
        for record in store.episodes()
        if record.state == "open" and (record.owner is None or not record.owner.is_alive())
    ]
    if episodes:
        for episode_id in abandoned:
            store.end_episode(episode_id)
    partials = store.sweep_partials()
    return Collected(
        sandboxes=tuple(swept),
        partials=tuple(path.name for path in partials),
        episodes=tuple(abandoned) if episodes else (),
        resumable=() if episodes else tuple(abandoned),
        failed=tuple(failed),
    )


def end_abandoned(store: Store, episode_id: str) -> None:
    """End an open episode whose process died, with what it left running: nobody will resume it.

    Raises:
        InvalidInput: it is unknown or closed, or its process lives.
        BelayerError: it is ended, and something of it could not be removed; `collect_garbage` may later."""
    store.claim_episode(episode_id)
    failed: BelayerError | None = None
    for home in store.homes():
        if home.episode_id == episode_id:
            try:
                open_sweeper(home.runtime or "runc", store).sweep(home.path)
            except BelayerError as error:
                failed = error
    store.end_episode(episode_id)
    if failed is not None:
        raise failed
