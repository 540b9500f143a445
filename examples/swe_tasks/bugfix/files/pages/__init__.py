"""Lists in pages."""


def page(items, number, size=10):
    """The items on page ``number``, which counts from 1."""
    start = number * size
    return items[start : start + size]


def num_pages(items, size=10):
    """How many pages they fill."""
    return len(items) // size
