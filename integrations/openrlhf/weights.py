"""Which weights an actor that was started again would sample from, as against those that it should. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActorRestarted", "StaleWeights", "WeightsSeen"]


class StaleWeights(RuntimeError):
    """A rollout actor died after the trainer had sent it weights, and was started again with those of the
    beginning: nothing may be sampled from them."""


class ActorRestarted(RuntimeError):
    """The trainer's process group for weights has the dead actor in it, and cannot take in another."""


_REMEDY = "start the training again from its last checkpoint (--ckpt.load_enable)"


@dataclass(slots=True)
class WeightsSeen:
    """What one incarnation of an actor knows of its weights. ``is_first``: none came before it;
    ``were_sent``: the trainer has sent some, to whichever incarnation."""

    is_first: bool
    were_sent: bool
    is_in_group: bool = False
    are_current: bool = True

    def __post_init__(self) -> None:
        self.are_current = self.is_first or not self.were_sent

    def join(self) -> None:
        """It is in the trainer's process group."""
        self.is_in_group = True

    def receive(self, *, by_group: bool, is_last: bool) -> None:
        """A tensor of the trainer's; ``is_last`` of this update, which makes them current.

        Raises:
            ActorRestarted: it cannot come, as its way is a process group that this incarnation is not in."""
        if by_group and not self.is_in_group and not self.is_first:
            raise ActorRestarted(
                "this rollout actor died and was started again, and the trainer's process group cannot take "
                f"it in: {_REMEDY}"
            )
        self.were_sent = True
        self.are_current = self.are_current or is_last

    def require_current(self) -> None:
        """Before anything is sampled.

        Raises:
            StaleWeights: it would be with old weights."""
        if not self.are_current:
            raise StaleWeights(
                "this rollout actor died after the trainer had sent it weights, and was started again with "
                f"those that the training began with: {_REMEDY}"
            )
