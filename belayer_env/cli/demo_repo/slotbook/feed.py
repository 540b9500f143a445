"""Bookings as JSON: [{"room": "blue", "from": "9:00", "to": "10:30"}, ...]."""

import json
from urllib.request import urlopen

from slotbook.calendar import Calendar
from slotbook.intervals import Interval


def minutes(text: str) -> int:
    hours, rest = text.split(":")
    return int(hours) * 60 + int(rest)


def load(url: str, opening: Interval) -> Calendar:
    with urlopen(url, timeout=10) as answer:
        bookings = json.load(answer)
    calendar = Calendar(opening)
    for booking in bookings:
        slot = Interval(minutes(booking["from"]), minutes(booking["to"]))
        if booking.get("blocked"):
            calendar.block(booking["room"], slot)
        else:
            calendar.book(booking["room"], slot)
    return calendar
