"""Which call of a rollout actor a sample belongs to: told by the hook of `keeping`, read by the executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["Call", "call_under_way", "current_call"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call as Ray names it: both ids are the same when a restarted actor is given the call again."""

    actor: str
    task: str


_CALL: ContextVar[Call | None] = ContextVar("belayer_openrlhf_call", default=None)


def current_call() -> Call | None:
    """The call under way; None in an actor that nobody would start again."""
    return _CALL.get()


@contextmanager
def call_under_way(call: Call) -> Iterator[None]:
    """Tasks that are made meanwhile belong to it."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)
