"""How long a running generation will go on: the bubble that an environment can use. Pure. Seconds, tokens."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from belayer_rollout.errors import InvalidRequest

__all__ = ["Lengths", "predicted_rest_s", "predicted_rest_tokens"]

WINDOW = 64
"""Generations remembered, of a session and of all."""

MOST_SESSIONS = 4096
ENOUGH = 4
"""A session with fewer generations that went so far is asked together with all the others."""


class Lengths:
    """How many tokens earlier generations had, by session and over all sessions."""

    def __init__(self) -> None:
        self._of_all: deque[int] = deque(maxlen=WINDOW)
        self._of_session: OrderedDict[str, deque[int]] = OrderedDict()

    def observe(self, session: str, tokens: int) -> None:
        """A generation has ended with so many."""
        self._of_all.append(tokens)
        own = self._of_session.setdefault(session, deque(maxlen=WINDOW))
        own.append(tokens)
        self._of_session.move_to_end(session)
        if len(self._of_session) > MOST_SESSIONS:
            self._of_session.popitem(last=False)

    def beyond(self, session: str, tokens: int) -> list[int]:
        """Lengths of generations that went further than ``tokens``: the session's own, or all if those are
        too few."""
        own = [length for length in self._of_session.get(session, ()) if length > tokens]
        return own if len(own) >= ENOUGH else [length for length in self._of_all if length > tokens]


def predicted_rest_tokens(made: int, max_tokens: int, longer: Iterable[int], quantile: float) -> int:
    """How many tokens are still to come, after ``made``: the quantile over generations that were ``longer``.

    0 if there was none: nothing to go by, and a bubble promised in vain costs its user more than one missed.

    Raises:
        InvalidRequest: quantile is not within [0, 1]."""
    if not 0 <= quantile <= 1:
        raise InvalidRequest(f"a quantile lies within 0..1, not {quantile!r}")
    ordered = sorted(longer)
    if not ordered:
        return 0
    likely = ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
    return max(0, min(likely, max_tokens) - made)


def predicted_rest_s(rest_tokens: int, token_s: float, *, queue_s: float = 0.0) -> float:
    """Seconds for them, at ``token_s`` each; ``queue_s``: what is still to wait for the first one."""
    return max(0.0, queue_s) + rest_tokens * token_s if rest_tokens else 0.0
