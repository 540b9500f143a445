"""Fixtures: a store on btrfs, the test images, every runtime of this host, a watch over what tests leave."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_env import paths
from belayer_env.errors import BelayerError
from belayer_env.host.probe import runtime_tier
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.sandbox.layers import LayerStore, open_layers
from belayer_env.spec import GIB, Tier
from tests.sandboxes import Sandboxes, traces
from tests.store_dirs import loop_disk

RUNTIMES = [
    pytest.param("runc", marks=pytest.mark.criu),
    pytest.param("docker", marks=pytest.mark.docker),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The zoo goes through Docker in `make test-slow`: an Engine takes some 0.3 s for what runc does in 0.05,
    and the programs are the same."""
    for item in items:
        if item.path.name == "test_zoo.py" and item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def store_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new directory: on the btrfs that $BELAYER_TEST_STORE names, else on the default store's, else on one
    made for this session, else wherever /tmp is."""
    named = os.environ.get("BELAYER_TEST_STORE")
    with contextlib.ExitStack() as stack:
        base = Path(named) if named else paths.default_store()
        if not named and not _is_btrfs(base):
            try:
                base = stack.enter_context(loop_disk("btrfs", 8 * GIB))
            except pytest.skip.Exception:
                base = tmp_path_factory.mktemp("store")
        directory = Path(tempfile.mkdtemp(prefix="test-", dir=base))
        try:
            yield directory
        finally:
            open_layers(directory).drop(directory)


@pytest.fixture(scope="session")
def layers(store_dir: Path) -> LayerStore:
    return open_layers(store_dir)


@pytest.fixture(scope="session")
def image() -> str:
    """$BELAYER_TEST_IMAGE, else the Debian image that `belayer setup` makes."""
    return os.environ.get("BELAYER_TEST_IMAGE") or _set_up_image(paths.test_image())


@pytest.fixture(scope="session")
def busybox_image() -> str:
    """An image with a POSIX sh and no bash."""
    return _set_up_image(paths.busybox_image())


@pytest.fixture(scope="session", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, store_dir: Path, layers: LayerStore) -> SandboxRuntime:
    """Each runtime, at the tier this host gives it."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    tier, reason = runtime_tier(request.param)
    if tier is None:
        pytest.skip(f"no {request.param} runtime: {reason}; run: make setup")
    images = store_dir / "images"
    images.mkdir(exist_ok=True)
    if request.param == "docker":
        docker = pytest.importorskip("belayer_env.sandbox.docker")
        made: SandboxRuntime = docker.DockerRuntime(layers, images, tier=tier, tier_reason=reason)
        return made
    from belayer_env.sandbox.runc import RuncRuntime

    return RuncRuntime(layers, images, tier=tier, tier_reason=reason)


@pytest.fixture
def full_runtime(runtime: SandboxRuntime) -> SandboxRuntime:
    """The same, where its checkpoints carry processes."""
    if runtime.tier is not Tier.FULL:
        pytest.skip(f"{runtime.name} gives only files here: {runtime.tier_reason}")
    return runtime


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a mount, cgroup, loop device, process, file or descriptor."""
    if "runtime" not in request.fixturenames:
        yield
        return
    directory: Path = request.getfixturevalue("store_dir")
    before = traces(directory)
    yield
    assert not traces(directory) - before


@pytest.fixture
def sandboxes(
    nothing_left_behind: None, runtime: SandboxRuntime, layers: LayerStore, store_dir: Path, image: str
) -> Iterator[Sandboxes]:
    """Makes sandboxes for one test."""
    made = Sandboxes(runtime, layers, store_dir, image)
    try:
        yield made
    finally:
        made.close()
    assert not made.homes_left()


@pytest.fixture(scope="module")
def shared_sandboxes(
    runtime: SandboxRuntime, layers: LayerStore, store_dir: Path, image: str
) -> Iterator[Sandboxes]:
    """Makes sandboxes that the tests of a module share."""
    before = traces(store_dir)
    made = Sandboxes(runtime, layers, store_dir, image)
    try:
        yield made
    finally:
        made.close()
    assert not made.homes_left()
    assert not traces(store_dir) - before


@pytest.fixture(scope="module")
def shell(shared_sandboxes: Sandboxes) -> Sandbox:
    """One sandbox that the tests of a module share: they undo what they do to it."""
    return shared_sandboxes.create()


def _is_btrfs(directory: Path) -> bool:
    if not directory.is_dir() or os.geteuid() != 0:
        return False
    try:
        return open_layers(directory).kind == "btrfs"
    except BelayerError:
        return False


def _set_up_image(rootfs: Path) -> str:
    if not rootfs.is_dir():
        pytest.fail(f"the test image {rootfs} is not there; run: make setup")
    return f"rootfs:{rootfs}"


@pytest.fixture(scope="session")
def runtime_names() -> frozenset[str]:
    """The runtimes that give FULL here."""
    if os.geteuid() != 0:
        return frozenset()
    return frozenset(name for name in ("runc", "docker") if runtime_tier(name)[0] is Tier.FULL)
