"""What the incarnations of one actor have to know of each other, kept where Ray keeps its own: with the
cluster's head, so that an actor that is started on another node has it too."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

__all__ = ["Incarnation", "load_incarnation", "save_incarnation"]

_NAMESPACE = "belayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """The newest one of an actor. ``node``: Ray's id of it; ``group``: its process group there;
    ``got_weights``: it, or one before it, was sent any."""

    node: str
    group: int
    got_weights: bool


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
