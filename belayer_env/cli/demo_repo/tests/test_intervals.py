from slotbook.intervals import Interval, merge, subtract


def test_apart():
    assert not Interval(0, 10).overlaps(Interval(20, 30))


def test_touching_is_not_overlapping():
    assert not Interval(0, 10).overlaps(Interval(10, 20))


def test_inside_is_overlapping():
    assert Interval(0, 30).overlaps(Interval(10, 20))


def test_merge_joins_touching():
    assert merge([Interval(10, 20), Interval(0, 10)]) == [Interval(0, 20)]


def test_merge_swallows_what_lies_inside():
    assert merge([Interval(0, 30), Interval(10, 20)]) == [Interval(0, 30)]


def test_subtract():
    assert subtract(Interval(0, 60), [Interval(10, 20), Interval(50, 90)]) == [Interval(0, 10), Interval(20, 50)]
