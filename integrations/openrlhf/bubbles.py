"""How long a turn of the model will take: what an env can use for a checkpoint meanwhile. Seconds, tokens."""

from __future__ import annotations

import contextvars
from collections import deque
from statistics import median
from typing import Any

from belayer_rollout.bubble import WINDOW, Lengths, predicted_rest_s, predicted_rest_tokens

__all__ = ["SESSION", "Bubbles"]

SESSION: contextvars.ContextVar[str] = contextvars.ContextVar("belayer_session", default="")
"""Which episode a request belongs to, set by who asks: upstream's calls of its engine have no room for it."""

_QUANTILE = 0.5
_ALL = ""


class Bubbles:
    """Learns from the turns of one actor. Its engine is asked first if it is one that knows: a `ShadowEngine`
    sees its queue and its pace as they are now."""

    def __init__(self) -> None:
        self._lengths = Lengths()
        self._token_s: deque[float] = deque(maxlen=WINDOW)

    def observe(self, tokens: int, seconds: float) -> None:
        """A turn of so many took so long, its wait in the engine's queue included."""
        if tokens > 0:
            self._lengths.observe(_ALL, tokens)
            self._token_s.append(seconds / tokens)

    def predict(self, actor: Any, session: str, max_tokens: int) -> float:
        """Seconds that the turn which has just begun will likely take; 0.0 if nothing is known to go by."""
        ask = getattr(getattr(actor, "llm", None), "hint_bubble", None)
        if ask is not None and (seconds := ask(session)):
            return float(seconds)
        if not self._token_s:
            return 0.0
        tokens = predicted_rest_tokens(0, max_tokens, self._lengths.beyond(_ALL, 0), _QUANTILE)
        return predicted_rest_s(tokens, median(self._token_s))
