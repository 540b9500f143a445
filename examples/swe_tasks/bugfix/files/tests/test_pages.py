from pages import num_pages, page


def test_first_page_starts_with_the_first_item():
    assert page(list("abcdef"), 1, 4) == list("abcd")


def test_last_page_may_be_short():
    assert page(list("abcdef"), 2, 4) == list("ef")


def test_a_short_last_page_counts():
    assert num_pages(list("abcdef"), 4) == 2


def test_full_pages_are_not_followed_by_an_empty_one():
    assert num_pages(list("abcdefgh"), 4) == 2


def test_no_items_no_pages():
    assert num_pages([]) == 0
