"""Device memory through an owner. Skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from belayer_rollout.memory.launch import OwnerProcess
from belayer_rollout.memory.layout import TensorSpec, plan_layout

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed", exc_type=ImportError)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LAYOUT = plan_layout([TensorSpec("w", (512, 512), "float32")])


@pytest.fixture
def owner() -> Iterator[OwnerProcess]:
    process = OwnerProcess(memory="cuda:0")
    try:
        yield process
    finally:
        process.close()


def test_a_view_goes_over_to_other_weights_at_its_address(owner: OwnerProcess) -> None:
    from belayer_rollout.engines.vllm.tensors import tensor_at
    from belayer_rollout.memory.cuda import CudaMapper

    mapper = CudaMapper(0)
    device = torch.device("cuda:0")
    address = None
    for version in (1, 2):
        draft = owner.client.begin(LAYOUT.num_bytes)
        target = mapper.map(draft.handle, draft.num_bytes, "write")
        tensor_at(target, draft.num_bytes, device).fill_(version)
        mapper.unmap(target, draft.num_bytes)
        owner.client.commit(draft, version, LAYOUT)
        os.close(draft.handle)
        attached = owner.client.attach()
        address = mapper.map(attached.handle, attached.num_bytes, "read", at=address)
        os.close(attached.handle)
        if version == 1:
            view = tensor_at(address, LAYOUT.num_bytes, device)
        assert bool((view == version).all())
    assert owner.client.verify() > 0


def test_scratch_becomes_the_arena_at_its_address(owner: OwnerProcess) -> None:
    from belayer_rollout.engines.vllm.tensors import tensor_at
    from belayer_rollout.memory.cuda import CudaMapper

    mapper = CudaMapper(0)
    size = 4 * mapper.granularity
    address = mapper.map_scratch(size)
    view = tensor_at(address, size, torch.device("cuda:0"))
    view.fill_(1)
    handle = owner.client.activate(owner.client.fence(0), size)
    assert mapper.map(handle, size, "write", at=address) == address
    os.close(handle)
    view.fill_(2)
    torch.cuda.synchronize()
    assert bool((view == 2).all())
