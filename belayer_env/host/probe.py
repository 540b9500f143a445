"""The tier each runtime gives on this host, asked once per process."""

from __future__ import annotations

import functools

from belayer_env.errors import InvalidInput
from belayer_env.host.gather import gather_runc
from belayer_env.host.verdict import judge_docker, judge_runc
from belayer_env.spec import Tier

__all__ = ["forget", "runtime_tier"]


@functools.cache
def runtime_tier(name: str) -> tuple[Tier | None, str]:
    """The best tier of "runc" or "docker" here, None where it cannot run at all, and why it is no better with
    the remedy (empty for FULL). About 0.1 s, then cached until `forget`.

    Raises:
        InvalidInput: no such runtime."""
    if name == "runc":
        verdict = judge_runc(gather_runc())
    elif name == "docker":
        # Imported when asked for: the Docker SDK costs a process 0.2 s, which the runc runtime need not pay.
        from belayer_env.host.engine import gather_engine

        verdict = judge_docker(gather_engine())
    else:
        raise InvalidInput(f'runtime must be "runc" or "docker", not {name!r}')
    return verdict.tier, verdict.reason


def forget() -> None:
    """Ask again at the next call: something was installed, started or stopped."""
    runtime_tier.cache_clear()
