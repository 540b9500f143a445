"""What a host is and has, as plain data: gathered in `gather` and `engine`, judged in `verdict`. Bytes."""

from __future__ import annotations

from dataclasses import dataclass

from belayer_env.host.criu_find import CriuBinary
from belayer_env.host.store_mount import StoreDisk

__all__ = ["EngineFacts", "HostFacts", "RuncFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuncFacts:
    """``runc`` is its version, empty where it is missing; ``runc_refusal`` its words where it does not start.
    ``criu_refusal`` is what `criu check` said, empty when it passed; ``cgroup``: "v1", "v2", "hybrid", ""."""

    is_root: bool = True
    runc: str = ""
    runc_refusal: str = ""
    criu: CriuBinary | None = None
    criu_refusal: str = ""
    cgroup: str = ""
    has_overlay: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """``refusal`` is why it does not answer, empty when it does. ``criu`` is the one that its own PATH leads
    to; ``knows_criu`` is False where that PATH cannot be read."""

    installed: bool = False
    refusal: str = ""
    version: str = ""
    experimental: bool = False
    driver: str = ""
    is_local: bool = True
    knows_criu: bool = True
    criu: CriuBinary | None = None
    criu_refusal: str = ""

    @property
    def answers(self) -> bool:
        """Whether there is an Engine at all."""
        return not self.refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """All of it. ``userns_refusal`` is empty where a user namespace could be made."""

    runc: RuncFacts
    engine: EngineFacts
    store: StoreDisk
    kernel: str
    userns_refusal: str = ""
    sys_resource: bool = True
