"""One sample of a rollout: its tokens, rewards and end. Pure: no env, no model, no clock. Natural logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from belayer_env import Conversation, Rollback

__all__ = ["End", "Rollout", "Trajectory"]

End = Literal["terminated", "turns", "tokens", "silent", "failed"]
"""Why a trajectory is over: the task says so; the turns are used up; the tokens are; the model gave no
command; something broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished sample as a trainer takes it: three lists, one entry a token. ``env_mask`` is 1 on the
    tokens that the model sampled, and 0 throughout where ``reward`` is None, the mark of a sample that is not
    to count."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    reward: float | None
    error: str | None


class Trajectory:
    """A sample under way: the model's turns and the env's answers, cut where the env was rolled back."""

    def __init__(
        self, prompt_ids: Sequence[int], *, max_turns: int, max_tokens: int, max_rollbacks: int
    ) -> None:
        """``max_tokens``: of the completion, observations too."""
        self.conversation = Conversation(token_ids=prompt_ids)
        self.rewards: list[float] = []
        self.rollbacks: list[Rollback] = []
        self.end: End | None = None
        self.error: str | None = None
        self._num_prompt = len(prompt_ids)
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._max_rollbacks = max_rollbacks

    @property
    def tokens_left(self) -> int:
        """What the completion may still grow by."""
        return self._max_tokens - (len(self.conversation.token_ids) - self._num_prompt)

    def speak(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """The model's turn."""
        self.conversation.add_sampled(token_ids, logprobs)

    def fall_silent(self) -> None:
        """The model's turn held no command: there is nothing to answer."""
        self.end = "silent"

    def observe(self, token_ids: Sequence[int], reward: float, *, is_over: bool) -> None:
        """The env's answer to the turn; left out, and the end, where there is no room for it."""
        self.rewards.append(reward)
        if is_over:
            self.end = "terminated"
        elif len(self.rewards) >= self._max_turns:
            self.end = "turns"
        elif len(token_ids) >= self.tokens_left:  # the model must be able to answer
            self.end = "tokens"
        else:
            self.conversation.add_observed(token_ids)
            self.conversation.mark_step(len(self.rewards))

    def undo(self, rollback: Rollback) -> None:
        """The env went back, and so do tokens and rewards: the model goes on from there, none the wiser."""
        self.conversation.cut(rollback)
        del self.rewards[rollback.to_step :]
        self.rollbacks.append(rollback)
        if len(self.rollbacks) > self._max_rollbacks:
            self.fail(f"rolled back {len(self.rollbacks)} times, the last time because: {rollback.reason}")

    def fail(self, error: str) -> None:
        """It is lost: it will carry no loss and have no reward."""
        self.end, self.error = "failed", error

    def rollout(self, total: Callable[[Sequence[float]], float], *, filler_id: int) -> Rollout:
        """What the trainer gets. ``total``: from the rewards of the steps to that of the trajectory.
        ``filler_id`` stands, masked, where nothing was said at all: trainers want a token at least."""
        talk = self.conversation
        completion_ids = talk.token_ids[self._num_prompt :]
        logprobs, mask = talk.logprobs[self._num_prompt :], talk.loss_mask[self._num_prompt :]
        if not completion_ids:
            completion_ids, logprobs, mask = [filler_id], [0.0], [0]
        is_lost = self.end == "failed"
        return Rollout(
            prompt_ids=talk.token_ids[: self._num_prompt],
            completion_ids=completion_ids,
            logprobs=logprobs,
            env_mask=[0] * len(mask) if is_lost else mask,
            reward=None if is_lost else float(total(self.rewards)),
            error=self.error,
        )
