"""What the incarnations of one actor have to know of each other, kept where Ray keeps its own: with the
cluster's head, so that an actor that is started on another node has it too."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

__all__ = ["ActorKeepsDying", "Incarnation", "load_incarnation", "save_incarnation"]

_NAMESPACE = "belayer"


class ActorKeepsDying(RuntimeError):
    """A rollout actor that was started again and again, and never came to answer a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """The newest one of an actor. ``node``: Ray's id of it; ``group``: its process group there;
    ``got_weights``: it, or one before it, was sent any; ``has_answered``: a call was; ``num_fruitless``:
    those in a row before it that had died without an answer."""

    node: str
    group: int
    got_weights: bool = False
    has_answered: bool = False
    num_fruitless: int = 0

    @classmethod
    def after(cls, before: Incarnation | None, *, node: str, group: int) -> Incarnation:
        """The next one; the first, if there was none before."""
        if before is None:
            return cls(node=node, group=group)
        return cls(
            node=node,
            group=group,
            got_weights=before.got_weights,
            num_fruitless=0 if before.has_answered else before.num_fruitless + 1,
        )

    def require_fruitful(self, most: int) -> None:
        """Before a call is taken.

        Raises:
            ActorKeepsDying: ``most`` before it had died in a row without an answer."""
        if self.num_fruitless >= most and not self.has_answered:
            raise ActorKeepsDying(
                f"this rollout actor has died {self.num_fruitless} times in a row without having answered a "
                "call: look for the cause in Ray's logs of the node (the kernel's OOM killer, a crash of the "
                "engine)"
            )


def load_incarnation(actor: str) -> Incarnation | None:
    """The last one that was saved; None for an actor that is new. Inside a Ray process."""
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(_key(actor), namespace=_NAMESPACE)
    return Incarnation(**json.loads(found)) if found else None


def save_incarnation(actor: str, incarnation: Incarnation) -> None:
    """When this returns, `load_incarnation` finds it in any process of the cluster."""
    from ray.experimental.internal_kv import _internal_kv_put

    text = json.dumps(dataclasses.asdict(incarnation))
    _internal_kv_put(_key(actor), text, overwrite=True, namespace=_NAMESPACE)


def _key(actor: str) -> str:
    return f"openrlhf-actor-{actor}"
