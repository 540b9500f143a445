import os

import pytest

from slotbook.feed import load, minutes
from slotbook.intervals import Interval

URL = os.environ.get("SLOTBOOK_URL")


def test_minutes():
    assert minutes("9:05") == 545


@pytest.mark.skipif(not URL, reason="SLOTBOOK_URL names no server")
def test_the_day_of_the_feed():
    calendar = load(URL, Interval(480, 1080))
    assert calendar.free("blue") == [Interval(480, 540), Interval(750, 1080)]
    assert calendar.first_free("green", 60) == Interval(555, 615)
