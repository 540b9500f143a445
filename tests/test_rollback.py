"""A context is cut to exactly what it was."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_env.errors import InvalidInput
from belayer_env.rollback import Conversation, Rollback

STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 99), max_size=4), st.lists(st.integers(0, 99), max_size=4)), max_size=6
)


def snapshot(talk: Conversation) -> tuple[object, ...]:
    return copy.deepcopy((talk.messages, talk.token_ids, talk.loss_mask, talk.logprobs, talk.last_step))


@given(steps=STEPS, unfinished=st.lists(st.integers(0, 99), max_size=3), data=st.data())
def test_a_cut_gives_back_the_context_of_that_step(
    steps: list[tuple[list[int], list[int]]], unfinished: list[int], data: st.DataObject
) -> None:
    talk = Conversation([{"role": "user", "content": "task"}], token_ids=[1, 2])
    after = [snapshot(talk)]
    for number, (sampled, observed) in enumerate(steps, start=1):
        talk.add_message({"role": "assistant", "content": str(sampled)})
        talk.add_sampled(sampled, [-0.5] * len(sampled))
        talk.add_message({"role": "user", "content": str(observed)})
        talk.add_observed(observed)
        talk.mark_step(number)
        after.append(snapshot(talk))
    talk.add_sampled(unfinished, [-1.0] * len(unfinished))
    to_step = data.draw(st.integers(0, len(steps)))
    talk.cut(Rollback(to_step=to_step, reason="test"))
    assert snapshot(talk) == after[to_step]
    assert len(talk.token_ids) == len(talk.loss_mask) == len(talk.logprobs)
    assert talk.cut(to_step) == 0


def test_misuse_changes_nothing() -> None:
    talk = Conversation(token_ids=[1])
    with pytest.raises(InvalidInput):
        talk.add_sampled([1, 2], [0.0])
    with pytest.raises(InvalidInput):
        talk.mark_step(2)
    with pytest.raises(InvalidInput):
        talk.cut(1)
    with pytest.raises(InvalidInput):
        talk.cut(-1)
    assert snapshot(talk) == ([], [1], [0], [0.0], 0)


def test_the_message_says_what_no_longer_holds() -> None:
    assert "after step 4 has been undone" in Rollback(to_step=4, reason="x").message()
    assert "since the start" in Rollback(to_step=0, reason="x").message()
