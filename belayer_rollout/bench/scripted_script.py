"""What a scripted engine server does, and how it breaks: plain data, given as JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

__all__ = ["Fault", "FaultKind", "Faults", "Settings"]

FaultKind = Literal[
    "die",
    "hang",
    "reset",
    "half_close",
    "close",
    "cut_event",
    "malformed",
    "duplicate",
    "no_ids",
    "few_logprobs",
    "error_event",
    "status",
]
"""die: the process kills itself. hang: it stops itself (SIGSTOP). reset: the connection gets an RST.
half_close: no more is sent, and the connection stays open. close: the stream ends cleanly without a finish
reason. cut_event: it ends inside an event. malformed, no_ids, few_logprobs, error_event: such an event is
sent. duplicate: the last event is sent again. status: the request is refused with ``status``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to break."""

    kind: FaultKind
    after: int = 0
    """Tokens of the request before it happens. At max_tokens: after the last token, before the event that
    ends the stream."""
    times: int = 1
    """How often; -1: always."""
    of_all: bool = False
    """``after`` counts the tokens of all requests, not of each."""
    status: int = 500
    retry_after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"kind must be one of {get_args(FaultKind)}, not {self.kind!r}")


@dataclass(slots=True, kw_only=True)
class Settings:
    """How the server behaves while nothing breaks."""

    vocab: int = 1000
    burst: int = 1
    """Tokens per event."""
    pace_s: float = 0.0
    """Between two events of a stream; 0: as fast as the reader reads."""
    queue_s: float = 0.0
    """Before the first event of a stream."""
    hold: bool = False
    """While it is set, no stream gets its first event."""
    probe_s: float = 0.0
    """Before the token of a request for one token."""
    health_s: float = 0.0
    """Before /health answers."""
    version: int = 0
    version_after: int | None = None
    """After so many tokens of a request the version becomes ``version_then``, for all."""
    version_then: int = 0
    tells_version: bool = True
    """Whether events have a `weight_version`."""
    tells_usage: bool = True
    """Whether events count, when they are asked to."""
    stop_at: int | None = None
    """See `TokenSource`."""
    odd_logprobs: bool = False
    """NaN and -Infinity among the logprobs, as Python's json writes them."""
    max_model_len: int = 2**20
    update_status: int = 200
    """What /update_weights answers; other than 200, the version stays."""
    faults: list[Fault] = field(default_factory=list)

    def update(self, given: dict[str, Any]) -> None:
        """Change what is named.

        Raises:
            ValueError: there is no such setting."""
        unknown = given.keys() - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(f"no such settings: {sorted(unknown)}")
        for name, value in given.items():
            setattr(self, name, [Fault(**fault) for fault in value] if name == "faults" else value)


class Faults:
    """The faults that are still to come."""

    def __init__(self, faults: list[Fault]) -> None:
        self._left: list[Fault] = list(faults)

    def refusal(self) -> Fault | None:
        """The one that refuses a request that comes now."""
        return self._take(lambda fault: fault.kind == "status")

    def due(self, of_request: int, of_all: int) -> Fault | None:
        """The one that happens to a stream after so many tokens."""
        if not self._left:
            return None
        return self._take(lambda fault: _is_due(fault, of_request, of_all))

    def is_due(self, of_request: int, of_all: int) -> bool:
        """Whether `due` would give one."""
        return any(_is_due(fault, of_request, of_all) for fault in self._left)

    def _take(self, is_it: Callable[[Fault], bool]) -> Fault | None:
        for at, fault in enumerate(self._left):
            if is_it(fault):
                if fault.times == 1:
                    del self._left[at]
                elif fault.times > 1:
                    self._left[at] = replace(fault, times=fault.times - 1)
                return fault
        return None


def _is_due(fault: Fault, of_request: int, of_all: int) -> bool:
    return fault.kind != "status" and (of_all if fault.of_all else of_request) >= fault.after
