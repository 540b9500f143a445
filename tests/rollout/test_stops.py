"""Stop strings over the text of all attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_rollout.errors import InvalidRequest
from belayer_rollout.stops import StopWatch
from belayer_rollout.text import decode_function
from tests.rollout.byte_tokenizer import ByteTokenizer


def watch(*stop: str, prompt: Sequence[int] = b"prompt", min_tokens: int = 0) -> StopWatch:
    return StopWatch(decode_function(ByteTokenizer()), prompt, stop, min_tokens=min_tokens)


def test_the_token_that_completes_a_stop_string_is_the_last_one_kept() -> None:
    assert watch("END").feed(b"the END of it") == (7, "END")
    assert watch("END").feed(b"the EN") is None


def test_a_stop_string_across_chunks_is_found() -> None:
    watching = watch("END")
    assert watching.feed(b"the E") is None
    assert watching.feed(b"N") is None
    assert watching.feed(b"Dxx") == (1, "END")


def test_a_character_whose_bytes_come_apart_is_whole_when_its_last_byte_comes() -> None:
    watching = watch("🙂!")
    first, *rest = "🙂".encode()
    assert watching.feed([first]) is None
    assert watching.feed(rest[:2]) is None
    assert watching.feed([rest[2], ord("!")]) == (2, "🙂!")
    assert watch("🙂").feed("a🙂b".encode()) == (5, "🙂")


def test_the_string_that_completes_first_wins_and_then_the_one_asked_first() -> None:
    assert watch("long stop", "stop").feed(b"a stop") == (6, "stop")
    assert watch("xab", "ab").feed(b"xab") == (3, "xab")
    assert watch("ab", "xab").feed(b"xab") == (3, "ab")
    assert watch("abc", "b").feed(b"abc") == (2, "b")


def test_what_ends_within_min_tokens_does_not_count_and_what_ends_after_it_does() -> None:
    assert watch("ab", min_tokens=2).feed(b"abxxab") == (6, "ab")
    assert watch("ab", min_tokens=1).feed(b"abxx") == (2, "ab")
    assert watch("ab", min_tokens=4).feed(b"abab") is None


def test_a_stop_string_does_not_begin_in_the_prompt() -> None:
    assert watch("prompt!", prompt=b"prompt").feed(b"!!") is None


def test_special_tokens_have_no_text_unless_asked() -> None:
    assert watch("ab").feed([ord("a"), 300, 301, ord("b")]) == (4, "ab")
    assert watch("<300>").feed([300]) is None
    shown = StopWatch(decode_function(ByteTokenizer(), skip_special_tokens=False), b"", ["<300>"])
    assert shown.feed([ord("a"), 300]) == (2, "<300>")


def test_bytes_that_never_become_text_do_not_hide_a_stop_string_after_them() -> None:
    for length in range(30):
        for junk in (b"\x80", b"\xf0", b"\xf0\x9f", b"\xc3"):
            watching = watch("END")
            assert watching.feed(junk * length) is None
            assert watching.feed("🙂END".encode()) == (7, "END"), (junk, length)


def test_long_texts_take_time_in_proportion() -> None:
    for text in (b"x" * 20_000, b"\x80" * 20_000, [300] * 20_000):
        tokenizer = ByteTokenizer()
        watching = StopWatch(decode_function(tokenizer), b"", ["END"])
        assert watching.feed(text) is None
        assert tokenizer.decoded < 60 * 20_000


@pytest.mark.parametrize("stop", [[], ["a", ""]])
def test_no_stop_string_is_no_watch(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        StopWatch(decode_function(ByteTokenizer()), b"", stop)


def test_a_tokenizer_gets_the_options_that_it_knows() -> None:
    class Bare:
        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join(map(chr, token_ids))

    class Full:
        def decode(self, token_ids: Sequence[int], **options: Any) -> str:
            raise AssertionError

    class Transformers:
        def decode(
            self,
            token_ids: Sequence[int],
            skip_special_tokens: bool = False,
            clean_up_tokenization_spaces: bool | None = None,
        ) -> str:
            return f"{skip_special_tokens} {clean_up_tokenization_spaces}"

    assert decode_function(Bare())([65]) == "A"
    assert decode_function(Transformers())([65]) == "True False"
    with pytest.raises(AssertionError):
        decode_function(Full())([65])


texts = st.text(alphabet="ab🙂é\n", max_size=40)


@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab🙂é", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_chunks_give_what_the_whole_text_says(text: str, stops: list[str], data: st.DataObject) -> None:
    tokens = list(text.encode())
    # Independently: the shortest text, in whole characters, that ends with a stop string.
    expected = None
    for length in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:length].endswith(stop)]
        if ending:
            expected = (len(text[:length].encode()), ending[0])
            break
    watching, at, found = watch(*stops), 0, None
    while at < len(tokens) and found is None:
        size = data.draw(st.integers(1, 6))
        if (hit := watching.feed(tokens[at : at + size])) is not None:
            found = (at + hit[0], hit[1])
        at += size
    assert found == expected
