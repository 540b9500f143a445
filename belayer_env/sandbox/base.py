"""The seam between an episode and a container: the Sandbox and SandboxRuntime protocols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from belayer_env.spec import ExecResult, SandboxSpec, Tier

__all__ = ["ProcessInfo", "Sandbox", "SandboxRuntime", "Saved"]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process of a sandbox: ``pid`` as the sandbox sees it, its parent there, and its command line."""

    pid: int
    ppid: int
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """What ``Sandbox.save`` wrote into a directory, and what it cost.

    ``meta`` is plain JSON data that ``SandboxRuntime.restore`` needs again. ``pause_s`` is freeze to thaw.
    ``fingerprint``: what `Sandbox.fingerprint` says as long as nothing has changed since; None if that cannot
    be told, or was not asked for."""

    tier: Tier
    pause_s: float
    meta: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None


class Sandbox(Protocol):
    """One running container with one persistent shell. Used by one thread at a time.

    Every method that reaches into the container raises SandboxGone (or SandboxOOM) once init is dead,
    SandboxFrozen when somebody else froze it, SandboxHung when it does not answer within its deadline."""

    @property
    def id(self) -> str:
        """Name of the sandbox, unique on this host."""

    @property
    def spec(self) -> SandboxSpec:
        """What it was made from."""

    @property
    def tier(self) -> Tier:
        """What ``save`` can carry here."""

    def run(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run one command in the persistent shell. ``timeout_s`` None: the spec's step limit.

        A time-out or an exit of the shell is a result, not an error.

        Raises:
            InvalidInput: the command holds a NUL byte or is no text; nothing ran.
            Fault: as above; ``begun`` says whether the command may have had effects."""

    def save(self, into: Path, *, previous: Path | None = None, with_fingerprint: bool = False) -> Saved:
        """Write processes and files of one instant into the directory ``into`` (made by this call).
        ``previous``, an earlier checkpoint's directory, may save copying what has not changed since.

        The sandbox is frozen, dumped, its writable layer cloned, and thawed; afterwards it answers or a Fault
        says it is lost. On any error ``into`` is removed again.

        Raises:
            CheckpointRefused: it cannot be dumped as it is now, with the cause; it goes on unharmed.
            StoreFull: no room."""

    def processes(self) -> list[ProcessInfo]:
        """Its processes now, by sandbox pid."""

    def answers(self) -> bool:
        """Whether its shell answers, within some seconds. Never raises."""

    def fingerprint(self) -> str | None:
        """The state of files, processes and shell in one word, to be compared within this sandbox's life:
        equal ones mean that nothing has changed. None where that cannot be told cheaply. Never raises."""

    def memory_bytes(self) -> int:
        """What its processes hold in memory of their own (anonymous pages) now. Never raises."""

    def suspend(self) -> None:
        """Stop all its processes where they are, until `wake`.

        Raises:
            RuntimeFailed: they could not be stopped."""

    def wake(self) -> None:
        """Let a suspended sandbox go on, and prove that it answers.

        Raises:
            SandboxGone, SandboxHung: it does not."""

    def is_alive(self) -> bool:
        """Whether init lives. Never raises."""

    def kill(self) -> None:
        """SIGKILL init, as a fault drill would. Idempotent; `destroy` is still owed."""

    def destroy(self) -> None:
        """End it and remove all it had on the host. Idempotent, never raises."""


class SandboxRuntime(Protocol):
    """What makes sandboxes. Safe to use from many threads."""

    @property
    def name(self) -> str:
        """ "runc" or "docker"."""

    @property
    def tier(self) -> Tier:
        """The best tier it gives on this host."""

    @property
    def tier_reason(self) -> str:
        """Why it is not FULL, with the remedy; empty when it is."""

    def create(self, spec: SandboxSpec, home: Path) -> Sandbox:
        """A fresh sandbox, its shell answering. ``home`` is an existing empty directory that the sandbox
        owns; everything it leaves on the host can be found from what is in there (see `sweep`).

        Raises:
            SetupError: the image or host cannot do it, with the remedy. Nothing is left running."""

    def restore(self, spec: SandboxSpec, saved_dir: Path, meta: Mapping[str, Any], home: Path) -> Sandbox:
        """A new sandbox with the state that ``Sandbox.save`` wrote, its shell proven answering.
        ``saved_dir`` is only read.

        Raises:
            RestoreFailed: it did not come back. Nothing is left running."""

    def sweep(self, home: Path) -> None:
        """Remove every process, mount, cgroup, container and file of the sandbox whose home this is, alive or
        not. Idempotent; ``home`` is gone afterwards. Used by ``belayer gc`` for sandboxes whose owner
        died."""
