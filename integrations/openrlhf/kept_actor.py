"""OpenRLHF's rollout actor, as one that Ray starts again when its process has died. Imports OpenRLHF, vLLM
and Ray.

Ray makes the new process with the same arguments, under the same actor id, and gives it the calls again that
were under way; those ids lead its executor to the books that the dead one kept (`books`). Given again is only
what may be: a tensor of the trainer's is part of a collective operation, and comes once."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import ray
from belayer_integrations.openrlhf.calls import Call, call_under_way
from belayer_integrations.openrlhf.incarnation import Incarnation, load_incarnation, save_incarnation
from belayer_integrations.openrlhf.orphans import end_group, lead_group
from belayer_integrations.openrlhf.weights import WeightsSeen
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

__all__ = ["KeptRolloutActor"]

MOST_FRUITLESS = 3
"""After so many deaths in a row between which no call was answered it is no bad luck. (Ray's own bound on
retries will not do: it counts how often it asks, while the actor is being started, whether it has been.)"""

log = logging.getLogger(__name__)

_Upstream: Any = RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__


class KeptRolloutActor(_Upstream):
    """See the module."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        context = ray.get_runtime_context()
        self._belayer_actor, node = context.get_actor_id(), context.get_node_id()
        self._belayer_answers: dict[str, asyncio.Future[Any]] = {}
        before = load_incarnation(self._belayer_actor)
        if before is not None and before.node == node:
            num = end_group(before.group)  # vLLM's engine does not notice that its parent is dead
            log.warning("a rollout actor is started again; %d processes of the dead one were left", num)
        elif before is not None:
            log.warning("a rollout actor is started again, on another node: its episodes are begun afresh")
        incarnation = Incarnation.after(before, node=node, group=lead_group())
        self._belayer_weights = WeightsSeen(is_first=before is None, were_sent=incarnation.got_weights)
        self._belayer_note(incarnation)
        await super().__init__(*args, **kwargs)

    @ray.method(max_task_retries=-1)
    async def generate_responses(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's.

        Raises:
            ActorKeepsDying, StaleWeights: see there."""
        self._belayer_incarnation.require_fruitful(MOST_FRUITLESS)
        self._belayer_weights.require_current()
        task = ray.get_runtime_context().get_task_id()
        answer = self._belayer_answers.get(task)
        if answer is not None:
            # Ray had lost sight of this process, which lives, and gave it the call once more.
            return await asyncio.shield(answer)
        with call_under_way(Call(self._belayer_actor, task)):
            answer = asyncio.ensure_future(super().generate_responses(*args, **kwargs))
        self._belayer_answers[task] = answer
        try:
            found = await answer
        finally:
            del self._belayer_answers[task]
        if not self._belayer_incarnation.has_answered:
            self._belayer_note(dataclasses.replace(self._belayer_incarnation, has_answered=True))
        return found

    async def init_process_group(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, never given again."""
        found = await super().init_process_group(*args, **kwargs)
        self._belayer_weights.join()
        return found

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> Any:
        """Upstream's, never given again. ``empty_cache``: it is the last tensor of an update.

        Raises:
            ActorRestarted: see there."""
        self._belayer_expect_weights(by_group=True)
        found = await super().update_weight(name, dtype, shape, empty_cache)
        self._belayer_weights.receive(by_group=True, is_last=empty_cache)
        return found

    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any, empty_cache: bool = False
    ) -> Any:
        """Upstream's, never given again. ``empty_cache``: it is the last tensor of an update."""
        self._belayer_expect_weights(by_group=False)
        found = await super().update_weight_cuda_ipc(name, dtype, shape, ipc_handles, empty_cache)
        self._belayer_weights.receive(by_group=False, is_last=empty_cache)
        return found

    def _belayer_expect_weights(self, *, by_group: bool) -> None:
        """From now on its weights are not those of the beginning: said before it is so."""
        self._belayer_weights.receive(by_group=by_group, is_last=False)
        if not self._belayer_incarnation.got_weights:
            self._belayer_note(dataclasses.replace(self._belayer_incarnation, got_weights=True))

    def _belayer_note(self, incarnation: Incarnation) -> None:
        self._belayer_incarnation = incarnation
        save_incarnation(self._belayer_actor, incarnation)

    @ray.method(max_task_retries=-1)
    def get_num_unfinished_requests(self) -> Any:
        """Upstream's."""
        return super().get_num_unfinished_requests()

    @ray.method(max_task_retries=-1)
    async def reset_prefix_cache(self) -> Any:
        """Upstream's; there is nothing in a new one's."""
        return await super().reset_prefix_cache()

    @ray.method(max_task_retries=-1)
    async def pause_generation(self) -> Any:
        """Upstream's."""
        return await super().pause_generation()

    @ray.method(max_task_retries=-1)
    async def resume_generation(self) -> Any:
        """Upstream's."""
        return await super().resume_generation()

    @ray.method(max_task_retries=-1)
    async def sleep(self, level: int = 1) -> Any:
        """Upstream's."""
        return await super().sleep(level=level)

    @ray.method(max_task_retries=-1)
    async def wake_up(self, tags: Any = None) -> Any:
        """Upstream's."""
        return await super().wake_up(tags=tags)
