"""From a book and a ledger to the conversation that they tell: where an episode goes on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from belayer_integrations.openrlhf.book import BookedTurn, context_digest
from belayer_integrations.openrlhf.sampling import Turn
from belayer_integrations.trajectory import Trajectory

from belayer_env.ledger import Step

__all__ = ["BookAstray", "retell"]


class BookAstray(Exception):
    """Book and ledger are not of one story: the episode cannot be gone on with, and is begun afresh."""


def retell(
    turns: Sequence[BookedTurn],
    steps: Sequence[Step],
    *,
    into: Trajectory,
    action_of: Callable[[Turn], str | None],
    encode: Callable[[str], Sequence[int]],
    replay: Literal["always", "never"],
) -> Turn | None:
    """Bring a trajectory that holds just its prompt to the end of the ledger, whose observations are the
    truth. Returns the turn whose step has to run still, which has been said then; None where the model is to
    speak (or ``into.end`` says that it is over).

    Turns that the ledger knows nothing of are kept where the last one's step just had not been written; cut
    where the ledger went back meanwhile, and where the step may have begun of a task whose commands are not
    to be run twice (``replay``).

    Raises:
        BookAstray: they differ: a step without a turn, another action, another context."""
    if len(steps) > len(turns):
        raise BookAstray(f"the ledger holds {len(steps)} steps, the book {len(turns)} turns")
    for step, booked in zip(steps, turns, strict=False):
        _say(booked, into)
        if action_of(booked.turn) != step.action:
            raise BookAstray(f"step {step.number} of the ledger ran another action than its turn holds")
        text = [] if step.terminated else encode(step.observation)
        into.observe(text, step.reward, is_over=step.terminated)
    untold = turns[len(steps) :]
    if into.end is not None:
        if untold:
            raise BookAstray("the book goes on after the ledger's end")
        return None
    if len(untold) != 1 or replay == "never":
        return None
    _say(untold[0], into)
    return untold[0].turn


def _say(booked: BookedTurn, into: Trajectory) -> None:
    if into.end is not None:
        raise BookAstray("the book goes on after the episode's end")
    if context_digest(into.conversation.token_ids) != booked.context:
        raise BookAstray(f"turn {len(into.rewards) + 1} answered another context than the ledger tells")
    into.speak(booked.turn.token_ids, booked.turn.logprobs)
