"""The faults of the rollout side: one exception type per kind, typed by what the caller can do about it.

RolloutError
├── WorkerFault               a worker broke; the client continues the request elsewhere
│   ├── WorkerGone            it died, or its connection did
│   ├── WorkerHung            it is there and gives no token within its deadline
│   ├── WorkerBusy            it took nothing in (429, 503): try later or elsewhere, nothing was lost
│   └── WorkerGarbled         it answered what no engine may: no ids, ids without logprobs, broken JSON
├── RequestRejected           the engine says that this request is wrong (400): never sent again
├── RequestFailed             every attempt of the budget was used; the journal has the tokens
├── WeightVersionChanged      on_version_change="fail", and the weights changed half-way
├── RequestCancelled          the caller (or another holder of its id) cancelled it
├── JournalFault              the journal cannot vouch for tokens any more
│   ├── JournalFull           its disk is full
│   └── JournalDamaged        its file is not what was written
├── OwnerFault                the process or the memory that outlives workers is not fit for a take-over
│   ├── OwnerGone             the owner process died
│   ├── OwnerDamaged          its memory is not what was published: a checksum or an epoch differs
│   ├── WeightsLost           the weights in force went with it, and no files hold them
│   └── DeviceUnfit           the accelerator reports errors or fails a small kernel
├── UpdateFailed              a weight update did not come through: the version before it is in force
├── SetupError                this host cannot do what was asked; it ends with the remedy
│   └── EngineMissing         the engine's package is not installed
└── Misuse                    the caller's mistake; nothing was sent
    ├── InvalidRequest        (also ValueError) a parameter out of range
    ├── UnknownRequest        (also KeyError) the journal holds no such request
    └── ClientClosed          (also RuntimeError) a call on a closed client
"""

from __future__ import annotations

__all__ = [
    "ClientClosed",
    "DeviceUnfit",
    "EngineMissing",
    "InvalidRequest",
    "JournalDamaged",
    "JournalFault",
    "JournalFull",
    "Misuse",
    "OwnerDamaged",
    "OwnerFault",
    "OwnerGone",
    "RequestCancelled",
    "RequestFailed",
    "RequestRejected",
    "RolloutError",
    "SetupError",
    "UnknownRequest",
    "UpdateFailed",
    "WeightVersionChanged",
    "WeightsLost",
    "WorkerBusy",
    "WorkerFault",
    "WorkerGarbled",
    "WorkerGone",
    "WorkerHung",
]


class RolloutError(Exception):
    """Root of everything this package raises on purpose."""


class WorkerFault(RolloutError):
    """A worker broke. ``worker`` is its name; the tokens it gave before are in the journal."""

    def __init__(self, message: str, *, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class WorkerGone(WorkerFault):
    """The worker died, or the connection to it was refused, reset or closed half-way."""


class WorkerHung(WorkerFault):
    """The worker is there and gave no token within the deadline that its own pace sets."""


class WorkerBusy(WorkerFault):
    """The worker took the request not in; ``retry_after_s`` is its own word on when to ask again."""

    def __init__(self, message: str, *, worker: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, worker=worker)
        self.retry_after_s = retry_after_s


class WorkerGarbled(WorkerFault):
    """The worker answered what no engine may: malformed chunks, no token ids, fewer logprobs than ids."""


class RequestRejected(RolloutError):
    """The engine refuses the request as such (too long, a parameter it lacks). It is not sent again."""


class RequestFailed(RolloutError):
    """Every attempt of the budget was used. ``request_id`` resumes it later: its tokens are journalled."""

    def __init__(self, message: str, *, request_id: str, tried: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.tried = tried


class WeightVersionChanged(RolloutError):
    """The request would go on under other weights than it began with, and the caller's rule is "fail"."""

    def __init__(self, message: str, *, before: int, after: int) -> None:
        super().__init__(message)
        self.before = before
        self.after = after


class RequestCancelled(RolloutError):
    """The request was cancelled through the client, and its worker was told."""


class JournalFault(RolloutError):
    """The journal failed: no token since its last commit is claimed to be durable, and streams stop."""


class JournalFull(JournalFault):
    """The journal's disk is full. Free some, or prune sessions, then resume the requests."""


class JournalDamaged(JournalFault):
    """The journal's file is not what was written; the message names what is wrong."""


class OwnerFault(RolloutError):
    """A take-over on the owner's memory is not safe: the pair starts cold instead."""


class OwnerGone(OwnerFault):
    """The owner process died, and its memory with it."""


class OwnerDamaged(OwnerFault):
    """The owner's memory is not what was published, or belongs to another epoch."""


class WeightsLost(OwnerFault):
    """The weights in force went with their owner, and no files hold them: nothing older serves instead."""


class DeviceUnfit(OwnerFault):
    """The accelerator reports errors, or fails a small kernel."""


class UpdateFailed(RolloutError):
    """A weight update did not come through. ``version`` is the one that is in force."""

    def __init__(self, message: str, *, version: int) -> None:
        super().__init__(message)
        self.version = version


class SetupError(RolloutError):
    """This host cannot do what was asked. The message ends with what helps."""


class EngineMissing(SetupError):
    """The engine's package is not installed here."""


class Misuse(RolloutError):
    """The caller's mistake; nothing was sent, nothing was lost."""


class InvalidRequest(Misuse, ValueError):
    """A parameter out of range, or one that cannot be honoured as asked."""


class UnknownRequest(Misuse, KeyError):
    """The journal holds no request of that id (it never did, or its session was pruned)."""

    def __str__(self) -> str:
        # KeyError would show the repr of its message.
        return str(self.args[0]) if self.args else ""


class ClientClosed(Misuse, RuntimeError):
    """A call on a closed client."""
