"""The fault taxonomy: one exception type per kind of fault, typed by what the caller can do about it.

BelayerError
├── Fault                     the world broke; recovery acts on it
│   ├── SandboxGone           the container's init died or was removed
│   │   └── SandboxOOM        ... because the kernel's OOM killer took it
│   ├── SandboxFrozen         somebody froze the container
│   ├── SandboxHung           the container runs, but its shell does not answer
│   ├── SandboxAstray         its shell has run something else than what the host knows of
│   ├── EngineUnavailable     the container engine (dockerd) does not answer
│   ├── RuntimeFailed         a runtime command (runc, mount, Docker API call) failed or timed out
│   ├── StoreFull             the store's disk is full
│   ├── CheckpointRefused     the sandbox cannot be checkpointed as it is now
│   ├── CheckpointCorrupt     a checkpoint's files are not what was published
│   ├── RestoreFailed         a checkpoint did not come back to life
│   ├── ContextDiverged       a replayed step gave another observation than the ledger holds
│   └── RecoveryFailed        every rung of the ladder was tried
├── SetupError                this host or task cannot do what was asked; it ends with the remedy
│   ├── RuntimeUnavailable    no such runtime here
│   ├── TierUnavailable       require="full", and the host gives only FILES
│   ├── ImageNotFound         the image reference names nothing
│   ├── ImageUnreadable       it names something that is no usable root file system
│   ├── TaskSetupFailed       a command of Task.setup failed
│   ├── PlottingUnavailable   matplotlib is not installed
│   └── IncompatibleCheckpoint  made on a host, or by a runtime, this one cannot stand in for
└── Misuse                    the caller's mistake; nothing was run
    ├── InvalidInput          (also ValueError) a value out of range, a NUL in a command, a bad reference
    ├── ForeignCheckpoint     (also ValueError) a checkpoint of another task or a dropped one
    ├── NotReset              (also RuntimeError) step() before reset()
    ├── EpisodeOver           (also RuntimeError) step() after the episode ended
    └── EnvClosed             (also RuntimeError) a call on a closed env
"""

from __future__ import annotations

__all__ = [
    "BelayerError",
    "CheckpointCorrupt",
    "CheckpointRefused",
    "ContextDiverged",
    "EngineUnavailable",
    "EnvClosed",
    "EpisodeOver",
    "Fault",
    "ForeignCheckpoint",
    "ImageNotFound",
    "ImageUnreadable",
    "IncompatibleCheckpoint",
    "InvalidInput",
    "Misuse",
    "NotReset",
    "NotText",
    "PlottingUnavailable",
    "RecoveryFailed",
    "RestoreFailed",
    "RuntimeFailed",
    "RuntimeUnavailable",
    "SandboxAstray",
    "SandboxFrozen",
    "SandboxGone",
    "SandboxHung",
    "SandboxOOM",
    "SetupError",
    "StoreFull",
    "TaskSetupFailed",
    "TierUnavailable",
]


class BelayerError(Exception):
    """Root of everything this package raises on purpose."""


class Fault(BelayerError):
    """The world broke. ``begun`` tells recovery whether the step it hit may have had effects."""

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


class SandboxGone(Fault):
    """The container's init died or the container was removed; its processes are lost."""


class SandboxOOM(SandboxGone):
    """The container died by the OOM killer (its memory cgroup counted a kill)."""


class SandboxFrozen(Fault):
    """The container's cgroup was frozen by somebody else."""


class SandboxHung(Fault):
    """The container is there, but its shell does not answer within its deadline."""


class SandboxAstray(Fault):
    """Its shell has not run last what the host knows of as the last: the state is not that of the step."""


class EngineUnavailable(Fault):
    """The container engine does not answer."""


class RuntimeFailed(Fault):
    """A command of the runtime failed or ran past its deadline; the message holds its own words."""


class StoreFull(Fault):
    """The store's disk is full: nothing was published."""


class CheckpointRefused(Fault):
    """The sandbox cannot be checkpointed as it is now. It has been proven thawed and answering.

    ``cause`` is a short stable word ("traced", "io_uring", "inotify", "ghost-too-big", "deadline",
    "unknown"), for a policy that should stop asking; ``culprit`` names the process or file; ``pid`` is its
    host pid, if known."""

    def __init__(
        self, message: str, *, cause: str = "unknown", culprit: str = "", pid: int | None = None
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.culprit = culprit
        self.pid = pid


class CheckpointCorrupt(Fault):
    """A checkpoint's files are not what was published; ``path`` is the first file found wrong."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class RestoreFailed(Fault):
    """A verified checkpoint did not come back to life; the message holds CRIU's first error."""


class ContextDiverged(Fault):
    """A replayed step gave another observation than the ledger holds. ``step``: its number, from 1."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class RecoveryFailed(Fault):
    """Every rung was tried; ``tried`` lists them in order, each with the error it met."""

    def __init__(self, message: str, *, tried: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tried = tried


class SetupError(BelayerError):
    """This host or task cannot do what was asked. The message ends with the command that helps."""


class RuntimeUnavailable(SetupError):
    """The runtime asked for cannot run on this host."""


class TierUnavailable(SetupError):
    """``require="full"`` was asked for, and this host gives only FILES."""


class PlottingUnavailable(SetupError):
    """A picture was asked for, and matplotlib is not installed."""


class ImageNotFound(SetupError):
    """The image reference names nothing that can be found."""


class ImageUnreadable(SetupError):
    """The image reference names something that is no usable root file system."""


class TaskSetupFailed(SetupError):
    """A command of ``Task.setup`` failed or timed out; the message holds its output."""


class IncompatibleCheckpoint(SetupError):
    """The checkpoint was made on a host, or by a runtime, that this one cannot stand in for."""


class Misuse(BelayerError):
    """The caller's mistake; nothing was run, nothing was lost."""


class NotText(Misuse, TypeError):
    """An action that is no text: a list, None, bytes."""


class InvalidInput(Misuse, ValueError):
    """A value out of range, a NUL byte in a command, a malformed image reference."""


class ForeignCheckpoint(Misuse, ValueError):
    """A checkpoint of another task, or one that has been dropped."""


class NotReset(Misuse, RuntimeError):
    """``step()`` or ``checkpoint()`` before ``reset()``."""


class EpisodeOver(Misuse, RuntimeError):
    """``step()`` after the episode terminated: call ``reset()``."""


class EnvClosed(Misuse, RuntimeError):
    """A call on a closed env."""
