"""What the next bubble, checkpoint and fault are likely to be. Pure: no clock, no I/O. Seconds and bytes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import combinations

from belayer_env.errors import InvalidInput

__all__ = ["BubblePredictor", "CostPredictor", "FaultRate"]

WINDOW = 32
"""Observations kept: enough for a quantile, few enough to follow a model that is being trained."""

PRIOR_WEIGHT = 8.0
"""How many bubbles of its own outweigh what an episode was told of other episodes."""

BASE_COST_S, BYTES_PER_S = 0.1, 500e6
"""A checkpoint's cost before any was seen. Source: belayer bench checkpoint (2 cores, btrfs)."""

_PRIOR_SPAN_BYTES = 256 * 1024**2
_MOST_BYTES = 1 << 62
_MOST_S = 86_400.0
_PRIOR_FAULTS, _PRIOR_S = 1.0, 86_400.0
"""One fault a day: it takes a few hours of sandboxes without any, or two faults, to count for more."""


class BubblePredictor:
    """Bubbles of one episode, newest ``window`` kept; ``prior`` are recent ones of other episodes."""

    def __init__(self, prior: Iterable[float] = (), *, window: int = WINDOW) -> None:
        """Raises:
        InvalidInput: a prior bubble that is no time, or a window below 1."""
        if window < 1:
            raise InvalidInput(f"window counts bubbles, 1 or more, not {window!r}")
        self._prior = [_checked_s(seconds, "a bubble") for seconds in prior]
        self._recent: deque[float] = deque(maxlen=window)
        self._hint: float | None = None
        self._kept_promises: deque[float] = deque(maxlen=window)

    @property
    def recent(self) -> tuple[float, ...]:
        """This episode's own, oldest first: what other episodes may be given as ``prior``."""
        return tuple(self._recent)

    def observe(self, seconds: float) -> None:
        """A bubble has ended; so has what was hinted of it.

        Raises:
            InvalidInput: negative, infinite or NaN."""
        self._recent.append(_checked_s(seconds, "a bubble"))
        if self._hint:
            self._kept_promises.append(min(1.0, seconds / self._hint))
        self._hint = None

    def hint(self, seconds: float) -> None:
        """What a rollout client expects of the next bubble, and of that one only; a second hint replaces the
        first. It goes before the quantile of earlier bubbles, cut down to how well earlier hints held: to the
        quantile of (bubble / hint, at most 1), where one hint counts as kept in advance.

        Raises:
            InvalidInput: negative, infinite or NaN."""
        self._hint = _checked_s(seconds, "a hint")

    def predict(self, quantile: float) -> float:
        """A length that the next bubble falls short of with a probability of at most ``quantile``.

        For n bubbles of one kind in any order this holds exactly: the next one is as likely to come anywhere
        among them, so the k-th shortest is undercut with probability k / (n + 1). Too few of them, or none,
        and it is 0. Bubbles of other episodes count as `PRIOR_WEIGHT` own ones together, at most.

        Raises:
            InvalidInput: quantile is not between 0 and 1."""
        if not 0 < quantile < 1:
            raise InvalidInput(f"a quantile lies between 0 and 1, not {quantile!r}")
        if self._hint is not None:
            return self._hint * _quantile(
                [(1.0, 1.0), *((kept, 1.0) for kept in self._kept_promises)], quantile
            )
        weight = min(1.0, PRIOR_WEIGHT / len(self._prior)) if self._prior else 0.0
        known = [
            *((seconds, 1.0) for seconds in self._recent),
            *((seconds, weight) for seconds in self._prior),
        ]
        # The one to come is itself one of the n + 1; it stands at 0, the shortest it can be.
        return _quantile([(0.0, 1.0), *known], quantile)


class CostPredictor:
    """What a checkpoint of so many bytes takes: base + size / rate, fitted to the newest ``window`` of them.

    The line is Theil and Sen's (the median of the slopes between any two, here weighted by their distance in
    size), so that a few checkpoints on a busy disk do not bend it. Two imagined ones on the line of
    `BASE_COST_S` and `BYTES_PER_S` hold the slope where the sizes seen are too much alike to give one."""

    def __init__(self, *, window: int = WINDOW) -> None:
        """Raises:
        InvalidInput: a window below 1."""
        if window < 1:
            raise InvalidInput(f"window counts checkpoints, 1 or more, not {window!r}")
        self._seen: deque[tuple[float, float]] = deque(maxlen=window)
        self._base_s, self._s_per_byte = BASE_COST_S, 1 / BYTES_PER_S
        self._is_fitted = True

    def observe(self, size_bytes: int, seconds: float) -> None:
        """A checkpoint has been made. More than a day counts as a day.

        Raises:
            InvalidInput: a size or time that is negative, infinite or NaN."""
        self._seen.append((_checked_bytes(size_bytes), min(_checked_s(seconds, "a cost"), _MOST_S)))
        self._is_fitted = False

    def predict(self, size_bytes: int) -> float:
        """Seconds, 0 or more, and never less for more bytes.

        Raises:
            InvalidInput: a size that is negative, infinite or NaN."""
        if not self._is_fitted:  # not at each observation: an episode begins with those of dozens before it
            self._fit()
            self._is_fitted = True
        return self._base_s + _checked_bytes(size_bytes) * self._s_per_byte

    def _fit(self) -> None:
        imagined = [(0.0, BASE_COST_S), (_PRIOR_SPAN_BYTES, BASE_COST_S + _PRIOR_SPAN_BYTES / BYTES_PER_S)]
        slopes = [
            ((second[1] - first[1]) / (second[0] - first[0]), second[0] - first[0])
            for first, second in combinations(sorted([*self._seen, *imagined]), 2)
            if second[0] > first[0]
        ]
        self._s_per_byte = max(0.0, _quantile(slopes, 0.5))
        bases = [(seconds - size * self._s_per_byte, 1.0) for size, seconds in self._seen]
        self._base_s = max(0.0, _quantile(bases, 0.5))


class FaultRate:
    """How often a sandbox is lost: ``given``, or learnt from faults and the time they were watched for.

    The estimate is the mean of a Gamma distribution, which starts as one fault a day and which every second
    watched and every fault seen moves."""

    def __init__(self, *, given: float | None = None) -> None:
        """Raises:
        InvalidInput: a given rate that is negative, infinite or NaN."""
        self._given = None if given is None else _checked_s(given, "a rate")
        self._faults, self._seconds = _PRIOR_FAULTS, _PRIOR_S

    def observe(self, *, faults: int = 0, seconds: float = 0.0) -> None:
        """So many faults were seen in so many seconds of sandboxes, added up over all of them.

        Raises:
            InvalidInput: a number or time that is negative, infinite or NaN."""
        if isinstance(faults, bool) or not isinstance(faults, int) or not 0 <= faults <= _MOST_BYTES:
            raise InvalidInput(f"faults are counted, 0 or more, not {faults!r}")
        self._seconds += _checked_s(seconds, "a time watched")
        self._faults += faults

    @property
    def per_s(self) -> float:
        """Faults per second and sandbox."""
        return self._faults / self._seconds if self._given is None else self._given


def _quantile(weighted: list[tuple[float, float]], quantile: float) -> float:
    """The least value such that it and what is below it weigh more than this share of all."""
    weighted = sorted(weighted)
    left = quantile * math.fsum(weight for _, weight in weighted)
    for value, weight in weighted:
        left -= weight
        if left < 0:
            return value
    return weighted[-1][0]


def _checked_s(seconds: float, what: str) -> float:
    # A bool is an int, and a comparison with NaN is False.
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"{what} is finite and 0 or more, not {seconds!r}")
    try:
        return float(seconds)
    except OverflowError as error:
        raise InvalidInput(f"{what} is finite and 0 or more, not an integer this large") from error


def _checked_bytes(size: int) -> float:
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 <= size <= _MOST_BYTES:
        raise InvalidInput(f"a size is a number of bytes, 0 or more, not {size!r}")
    return float(size)
