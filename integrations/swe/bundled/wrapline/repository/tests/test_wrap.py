import pytest
from wrapline import wrap


def test_short_text_is_one_line():
    assert wrap("a bc", 10) == ["a bc"]


def test_width_must_be_positive():
    with pytest.raises(ValueError):
        wrap("a", 0)


@pytest.mark.parametrize("text", ["one", "  one ", "one\n"])
def test_space_around_is_dropped(text):
    assert wrap(text, 5) == ["one"]
