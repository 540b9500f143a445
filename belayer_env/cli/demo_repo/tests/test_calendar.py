import pytest

from slotbook.calendar import Calendar, Conflict
from slotbook.intervals import Interval


@pytest.fixture
def calendar():
    return Calendar(Interval(480, 1080))


def test_a_taken_room_is_refused(calendar):
    calendar.book("blue", Interval(540, 600))
    with pytest.raises(Conflict):
        calendar.book("blue", Interval(570, 630))


def test_meetings_back_to_back(calendar):
    calendar.book("blue", Interval(540, 600))
    calendar.book("blue", Interval(600, 660))
    assert calendar.free("blue") == [Interval(480, 540), Interval(660, 1080)]


def test_a_block_inside_a_meeting_frees_nothing(calendar):
    calendar.book("blue", Interval(480, 720))
    calendar.block("blue", Interval(540, 555))
    assert calendar.first_free("blue", 30) == Interval(720, 750)
