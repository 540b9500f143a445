"""The rooms of one day, and what is booked in them."""

from slotbook.intervals import Interval, subtract


class Conflict(Exception):
    """The room is taken."""


class Calendar:
    def __init__(self, opening: Interval) -> None:
        self.opening = opening
        self._taken: dict[str, list[Interval]] = {}

    def book(self, room: str, slot: Interval) -> None:
        for taken in self._taken.get(room, []):
            if taken.overlaps(slot):
                raise Conflict(f"{room} is taken from {taken.start} to {taken.end}")
        self.block(room, slot)

    def block(self, room: str, slot: Interval) -> None:
        """Take a slot, whatever lies in it already (cleaning, repairs)."""
        self._taken.setdefault(room, []).append(slot)

    def free(self, room: str) -> list[Interval]:
        return subtract(self.opening, self._taken.get(room, []))

    def first_free(self, room: str, minutes: int) -> Interval | None:
        for slot in self.free(room):
            if slot.end - slot.start >= minutes:
                return Interval(slot.start, slot.start + minutes)
        return None
