"""Siblings: the samples of one prompt, which share a baseline. What a lost one gets for a reward.

OpenRLHF lays rewards out as a table of prompts by samples and subtracts each row's mean, whatever a sample's
action mask says: no cell can be left empty. With the mean of its row's other cells in it, a lost sample
leaves that mean, and so the others' advantages, as they are without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from statistics import fmean

__all__ = ["Group", "Groups"]

NO_SIBLING = 0.0
"""The reward where all of a group are lost. All being equal, no advantage comes of it."""


class Group:
    """One prompt's samples under way, in one event loop."""

    def __init__(self) -> None:
        self._num_joined = 0
        self._num_settled = 0
        self._rewards: list[float] = []
        self._all_settled = asyncio.Event()

    def join(self) -> int:
        """One more sample: its number in the group."""
        self._num_joined += 1
        return self._num_joined - 1

    def settle(self, reward: float | None) -> None:
        """A sample is over, with that reward; None: it is lost. Once for each that has joined."""
        if reward is not None:
            self._rewards.append(reward)
        self._num_settled += 1
        if self.is_settled:
            self._all_settled.set()

    @property
    def is_settled(self) -> bool:
        """All are over."""
        return self._num_settled == self._num_joined

    async def fill_in(self) -> float:
        """The mean of those that are not lost, when all are over."""
        await self._all_settled.wait()
        return fmean(self._rewards) if self._rewards else NO_SIBLING


class Groups:
    """Who is whose sibling. `RolloutRayActor` starts all samples of a prompt at once, before any of them can
    have got anywhere: the calls that are under way together with one key are one group."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, Group] = {}

    def join(self, key: Hashable) -> tuple[Group, int]:
        """The group of that key, and the new sample's number in it; `leave` is owed when it has settled."""
        group = self._groups.setdefault(key, Group())
        return group, group.join()

    def leave(self, key: Hashable) -> None:
        """The group is forgotten with the last of its samples."""
        group = self._groups.get(key)
        if group is not None and group.is_settled:
            del self._groups[key]
