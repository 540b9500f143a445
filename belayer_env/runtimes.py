"""From a runtime's name to a SandboxRuntime: "runc", "docker", or "auto" for the best this host gives."""

from __future__ import annotations

import logging
import warnings
from typing import Literal

from belayer_env.errors import InvalidInput, RuntimeUnavailable, TierUnavailable
from belayer_env.host.probe import runtime_tier
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.spec import Tier
from belayer_env.store import Store

__all__ = ["NAMES", "TierWarning", "open_runtime", "open_sweeper"]

NAMES = ("runc", "docker")
"""In the order in which "auto" prefers them."""

_LOG = logging.getLogger("belayer")


class TierWarning(UserWarning):
    """Checkpoints will not carry processes on this host."""


def open_runtime(
    runtime: str | SandboxRuntime, store: Store, *, require: Literal["full"] | None = None
) -> SandboxRuntime:
    """The runtime asked for, with the store's layers and images. A tier below FULL warns, once a process.

    Raises:
        InvalidInput: no such name, or ``require`` is not "full".
        RuntimeUnavailable: it cannot run here.
        TierUnavailable: ``require`` is "full", and it gives only FILES."""
    if require not in (None, "full"):
        raise InvalidInput(f'require must be None or "full", not {require!r}')
    found = _named(runtime, store) if isinstance(runtime, str) else runtime
    if found.tier is not Tier.FULL:
        if require == "full":
            raise TierUnavailable(f"the {found.name} runtime gives only files here: {found.tier_reason}")
        warnings.warn(
            f"checkpoints by the {found.name} runtime carry files and shell state, no processes: "
            f"{found.tier_reason}",
            TierWarning,
            stacklevel=4,
        )
    return found


def open_sweeper(name: str, store: Store) -> SandboxRuntime:
    """A runtime to sweep homes with: whatever tier it gives, and if its parts have been uninstalled, as far
    as it goes without them.

    Raises:
        InvalidInput: no such name.
        RuntimeUnavailable: not even that."""
    if name not in NAMES:
        raise InvalidInput(f"no runtime {name!r}: its sandboxes must be removed by what made them")
    return _made(name, store, Tier.FILES, "only to sweep")


def _named(name: str, store: Store) -> SandboxRuntime:
    if name == "auto":
        name = _best()
        _LOG.info("runtime auto: %s", name)
    elif name not in NAMES:
        raise InvalidInput(f'runtime must be "auto", "runc" or "docker", or a SandboxRuntime, not {name!r}')
    tier, reason = runtime_tier(name)
    if tier is None:
        raise RuntimeUnavailable(f"the {name} runtime cannot run here: {reason}")
    return _made(name, store, tier, reason)


def _made(name: str, store: Store, tier: Tier, reason: str) -> SandboxRuntime:
    # Imported when asked for: the Docker SDK alone takes 0.2 s.
    if name == "docker":
        from belayer_env.sandbox.docker import DockerRuntime

        return DockerRuntime(store.layers, store.images, tier=tier, tier_reason=reason)
    from belayer_env.sandbox.runc import RuncRuntime

    return RuncRuntime(store.layers, store.images, tier=tier, tier_reason=reason)


def _best() -> str:
    reasons = []
    fallback = None
    for name in NAMES:
        tier, reason = runtime_tier(name)
        if tier is Tier.FULL:
            return name
        reasons.append(f"{name}: {reason}")
        if tier is not None and fallback is None:
            fallback = name
    if fallback is None:
        raise RuntimeUnavailable(f"no runtime can run here ({'; '.join(reasons)}); run: belayer doctor")
    return fallback
