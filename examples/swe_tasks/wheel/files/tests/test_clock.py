from clock import face


def test_twelve_hours():
    assert len(face()) == 12


def test_four_is_written_as_clockmakers_do():
    assert face()[3] == "IIII"


def test_nine():
    assert face()[8] == "IX"
