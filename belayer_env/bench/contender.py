"""Who takes part in the checkpoint bench, and with what load: the same for all. Seconds, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["CHANGED_BYTES", "DIRTY", "SERVER", "Contender", "LeftOut", "Sample"]

CHANGED_BYTES = 5_000_000

SERVER = "python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &"

DIRTY = f"head -c {CHANGED_BYTES} /dev/urandom >/root/changed"
"""Run before each checkpoint: nobody is measured on files that a checkpoint before has written out."""


class LeftOut(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round.

    ``pause_s``: how long the container stood still for a checkpoint, or the most it can have been.
    ``checkpoint_s``: until the checkpoint can be used. ``restore_s``: from a checkpoint until a new container
    has answered its first command. ``step_s``: one `true` in the running container."""

    pause_s: float
    checkpoint_s: float
    restore_s: float
    step_s: float


class Contender(Protocol):
    """One way to run a shell and a server in a container, to checkpoint and to restore it."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    @property
    def version(self) -> str:
        """Of what is measured; known once started."""

    def start(self) -> None:
        """The container with its load running.

        Raises:
            LeftOut: it is not installed, or cannot do this here."""

    def round(self) -> Sample:
        """One checkpoint, one restore, one step. What it restored is gone again when this returns.

        Raises:
            PeerFailed, BelayerError: it broke."""

    def close(self) -> None:
        """Remove all it made, half-made things too. Idempotent, never raises."""
