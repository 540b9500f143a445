"""OpenRLHF's group for weights: rank 0 is the trainer, and each engine has its rank, from start to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from belayer_integrations.openrlhf.shadow.options import ShadowUnavailable

__all__ = ["SyncGroup", "join"]


@dataclass(frozen=True, slots=True)
class SyncGroup:
    """This process's place in it."""

    device: str
    """Where tensors are to be for it."""
    broadcast: Callable[[Any], None]
    """Fill a tensor with what rank 0 sends; blocks until it is there."""


def join(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    use_ray: bool,
) -> SyncGroup:
    """By upstream's own means. Blocks until all ranks have come.

    Raises:
        ShadowUnavailable: it wants CUDA, and there is none."""
    import torch

    # Without --vllm.sync_with_ray upstream takes NCCL, whatever the backend is.
    is_nccl = backend == "nccl" or not use_ray
    if is_nccl and not torch.cuda.is_available():
        raise ShadowUnavailable(
            "weights are to come by NCCL, and the rollout actor sees no CUDA device: shadow=True receives "
            "them in the actor's own process, so Ray has to give it one (num_gpus)"
        )
    device = f"cuda:{torch.cuda.current_device()}" if is_nccl else "cpu"
    if use_ray:
        from ray.util import collective

        collective.init_collective_group(
            world_size=world_size, rank=rank, backend=backend, group_name=group_name
        )
        return SyncGroup(device, lambda tensor: collective.broadcast(tensor, 0, group_name=group_name))

    from openrlhf.utils.distributed_util import stateless_init_process_group

    group = stateless_init_process_group(master_address, master_port, rank, world_size, torch.device(device))
    return SyncGroup(
        device, lambda tensor: group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
    )
