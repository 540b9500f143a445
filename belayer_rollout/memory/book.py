"""What an owner knows: which buffer is in force, who fills the next one, which epoch may act. Pure.

Two buffers at most: the one in force and the one being filled (the draft). A draft belongs to the connection
that began it and ends with it. Committing is one assignment, so there is always exactly one (version,
buffer, digests) in force. The epoch is a fencing number: it only grows, and an act under an older one is
refused."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Book", "Commit", "Draft", "Refused"]


class Refused(Exception):
    """The owner's answer to what is not allowed now. ``kind`` goes over the wire."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Commit:
    """Weights in force."""

    version: int
    buffer: int
    num_bytes: int
    digests: tuple[bytes, ...]
    layout: bytes


@dataclass(frozen=True, slots=True)
class Draft:
    """A buffer that is being filled."""

    buffer: int
    num_bytes: int
    holder: Hashable


class Book:
    """The owner's books. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.epoch = 0
        self.in_force: Commit | None = None
        self.draft: Draft | None = None
        self._buffers = 0

    def begin(self, holder: Hashable, num_bytes: int) -> Draft:
        """A new draft for ``holder``; one that it had before is given up.

        Raises:
            Refused: another holder's draft is under way."""
        if num_bytes < 1:
            raise Refused("misuse", f"a buffer of {num_bytes} bytes")
        if self.draft is not None and self.draft.holder != holder:
            raise Refused("busy", f"buffer {self.draft.buffer} is being filled by another client")
        self._buffers += 1
        self.draft = Draft(self._buffers, num_bytes, holder)
        return self.draft

    def check_draft(self, holder: Hashable, buffer: int, version: int) -> Draft:
        """The draft that ``holder`` may commit.

        Raises:
            Refused: it is no longer there, or the version would go back."""
        draft = self.draft
        if draft is None or draft.holder != holder or draft.buffer != buffer:
            raise Refused("lost", f"buffer {buffer} is not yours to commit")
        if self.in_force is not None and version <= self.in_force.version:
            raise Refused("version", f"version {version} is not after {self.in_force.version}")
        return draft

    def commit(self, draft: Draft, version: int, digests: tuple[bytes, ...], layout: bytes) -> int | None:
        """Put the draft in force; the buffer that was in force before is returned.

        Raises:
            Refused: as `check_draft`."""
        self.check_draft(draft.holder, draft.buffer, version)
        before = self.in_force
        self.in_force = Commit(version, draft.buffer, draft.num_bytes, digests, layout)
        self.draft = None
        return before.buffer if before is not None else None

    def give_up(self, holder: Hashable) -> int | None:
        """``holder`` is gone: its draft, if any, is no more, and its buffer is returned."""
        if self.draft is None or self.draft.holder != holder:
            return None
        buffer = self.draft.buffer
        self.draft = None
        return buffer

    def fence(self, seen: int) -> int:
        """Begin a new epoch, for one who knows the current one.

        Raises:
            Refused: ``seen`` is not current: somebody else began one meanwhile."""
        self.check_epoch(seen)
        self.epoch += 1
        return self.epoch

    def check_epoch(self, epoch: int) -> None:
        """Only the current epoch may act.

        Raises:
            Refused: ``epoch`` is another one."""
        if epoch != self.epoch:
            raise Refused("fenced", f"epoch {epoch} may not act: the current one is {self.epoch}")
