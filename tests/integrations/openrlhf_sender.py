"""OpenRLHF's trainer as its rollout actors see it: rank 0 of the group for weights. The real one needs CUDA;
what this one sends, and with which calls, is `ActorPPOTrainer.broadcast_to_vllm`'s, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

GROUP = "openrlhf"


@ray.remote(num_cpus=0)
class Sender:
    """Holds a model that goes away from the files' as training makes it."""

    def __init__(self, model: Path, engines: list[Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.engines = engines

    def join(self) -> None:
        from ray.util import collective

        world_size = len(self.engines) + 1
        refs = [
            engine.init_process_group.remote(
                "127.0.0.1", 0, i + 1, world_size, GROUP, backend="gloo", use_ray=True
            )
            for i, engine in enumerate(self.engines)
        ]
        collective.init_collective_group(world_size=world_size, rank=0, backend="gloo", group_name=GROUP)
        ray.get(refs)

    def train(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def send(self, start: int = 0, stop: int | None = None) -> int:
        """Parameters from ``start`` to ``stop``; how many there are in all."""
        from ray.util import collective

        parameters = list(self.model.named_parameters())
        for count, (name, parameter) in list(enumerate(parameters, 1))[start:stop]:
            refs = [
                engine.update_weight.remote(
                    name,
                    dtype=parameter.dtype,
                    shape=parameter.shape,
                    empty_cache=count == len(parameters),
                )
                for engine in self.engines
            ]
            collective.broadcast(parameter.data, 0, group_name=GROUP)
            ray.get(refs)
        return len(parameters)

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Of each token but the first, by the model as it is now."""
        import torch

        with torch.no_grad():
            rows = torch.log_softmax(self.model(torch.tensor([token_ids])).logits[0], dim=-1)
        return [rows[at, token].item() for at, token in enumerate(token_ids[1:])]
