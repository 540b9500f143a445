"""Events out of bytes, however the network cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_rollout.engines import sse
from belayer_rollout.engines.sse import EventParser

payloads = st.lists(st.binary(min_size=1).filter(lambda b: not set(b) & set(b"\r\n")), max_size=8)


@given(payloads, st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_events_survive_any_cutting(events: list[bytes], newline: bytes, data: st.DataObject) -> None:
    stream = b"".join(
        data.draw(st.sampled_from([b"", b": keep-alive" + newline * 2, b"id: 3" + newline]))
        + b"data: "
        + event
        + newline * 2
        for event in events
    )
    parser, found = EventParser(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += parser.feed(stream[:size])
        stream = stream[size:]
    assert found == events
    assert parser.is_between_events


def test_several_data_lines_are_one_event() -> None:
    assert EventParser().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]


def test_half_an_event_is_no_event() -> None:
    parser = EventParser()
    assert parser.feed(b'data: {"x": ') == []
    assert not parser.is_between_events


def test_an_event_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        EventParser().feed(b"data: " + b"x" * 200)
