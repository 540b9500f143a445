"""Output is bounded, valid Unicode, and the same however it was cut into chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from belayer_env.sandbox.output import OutputBuffer, decode_output

LIMIT = 64


def fed(data: bytes, sizes: list[int], limit: int = LIMIT) -> OutputBuffer:
    buffer = OutputBuffer(limit)
    at = 0
    for size in [*sizes, len(data)]:
        buffer.feed(data[at : at + size])
        at += size
    return buffer


@given(
    data=st.binary(max_size=400), sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(64, 90)
)
def test_chunks_make_no_difference(data: bytes, sizes: list[int], limit: int) -> None:
    whole, pieces = fed(data, [], limit), fed(data, sizes, limit)
    assert pieces.text() == whole.text()
    assert pieces.truncated == whole.truncated == (len(data) > limit)
    assert pieces.num_bytes == len(data)


@given(data=st.binary(max_size=300))
def test_text_is_always_valid_unicode_without_nul(data: bytes) -> None:
    text = fed(data, [7] * 50).text()
    assert text.encode("utf-8").decode("utf-8") == text
    assert "\0" not in text


@given(text=st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=300))
def test_a_cut_keeps_head_and_tail_and_never_splits_a_character(text: str) -> None:
    data = text.encode()
    kept = fed(data, [5] * 100).text()
    if len(data) <= LIMIT:
        assert kept == text
        return
    head, _, rest = kept.partition("\n[... ")
    count, _, tail = rest.partition(" bytes cut ...]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(data) - int(count) == len(head.encode()) + len(tail.encode())
    # At most three bytes of a split character are given up at either side of the cut.
    assert len(head.encode()) >= LIMIT // 2 - 3
    assert len(tail.encode()) >= LIMIT // 2 - 3


def test_a_flood_takes_no_memory() -> None:
    buffer = OutputBuffer(1000)
    for _ in range(2000):
        buffer.feed(b"x" * 65536)
    assert buffer.truncated
    assert len(buffer.text()) < 1100
    assert f"{2000 * 65536 - 1000} bytes cut" in buffer.text()


def test_bytes_that_are_no_text_are_shown_escaped() -> None:
    assert decode_output(b"a\xff\x00b\xed\xa0\x80c") == "a\\xff\\x00b\\xed\\xa0\\x80c"
    assert decode_output(b"\xc3") == "\\xc3"
    assert decode_output("é→🙂\x1b[0m\t".encode()) == "é→🙂\x1b[0m\t"
