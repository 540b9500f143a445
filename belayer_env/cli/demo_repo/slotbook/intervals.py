"""Half-open intervals [start, end) of minutes since midnight."""

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    start: int
    end: int

    def overlaps(self, other: "Interval") -> bool:
        return self.start <= other.end and other.start <= self.end


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same minutes in the fewest intervals, in order."""
    merged: list[Interval] = []
    for interval in sorted(intervals):
        if merged and interval.start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, interval.end)
        else:
            merged.append(interval)
    return merged


def subtract(whole: Interval, taken: Iterable[Interval]) -> list[Interval]:
    """What of ``whole`` is in none of ``taken``."""
    left = []
    start = whole.start
    for interval in merge(taken):
        if interval.start > start:
            left.append(Interval(start, min(interval.start, whole.end)))
        start = max(start, interval.end)
    if start < whole.end:
        left.append(Interval(start, whole.end))
    return left
