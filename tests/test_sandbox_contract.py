"""What every sandbox promises, the one in memory and the real ones alike: on this rest the tests of recovery,
which run on the one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_env.errors import InvalidInput, NotText, RestoreFailed, SandboxFrozen, SandboxGone
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.sandbox.layers import LayerStore, open_layers
from belayer_env.spec import SandboxSpec
from tests.memory_sandbox import RANDOM, SPAWN, MemoryRuntime
from tests.sandboxes import Sandboxes

KINDS = [
    pytest.param("memory"),
    pytest.param("runc", marks=pytest.mark.criu),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture(params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path: Path, runtime_names: frozenset[str]
) -> Iterator[Sandboxes]:
    """Makes sandboxes of each kind."""
    if request.param == "memory":
        sandboxes = Sandboxes(MemoryRuntime(), open_layers(tmp_path), tmp_path, "rootfs:/")
    elif request.param not in runtime_names:
        pytest.skip(f"the {request.param} runtime does not give FULL here; run: make setup")
    else:
        store_dir: Path = request.getfixturevalue("store_dir")
        layers: LayerStore = request.getfixturevalue("layers")
        image: str = request.getfixturevalue("image")
        sandboxes = Sandboxes(_real(request.param, layers, store_dir), layers, store_dir, image)
    try:
        yield sandboxes
    finally:
        sandboxes.close()
    assert not sandboxes.homes_left()


def _real(name: str, layers: LayerStore, store_dir: Path) -> SandboxRuntime:
    from belayer_env.sandbox.docker import DockerRuntime
    from belayer_env.sandbox.runc import RuncRuntime
    from belayer_env.spec import Tier

    images = store_dir / "images"
    images.mkdir(exist_ok=True)
    kind: type[RuncRuntime] | type[DockerRuntime] = RuncRuntime if name == "runc" else DockerRuntime
    return kind(layers, images, tier=Tier.FULL)


def settle(sandbox: Sandbox) -> None:
    other = SPAWN.replace("900", "901")
    for command in ("touch /root/list", "A=4", "echo one >>/root/list", SPAWN, other):
        assert sandbox.run(command).exit_code == 0


def shown(sandbox: Sandbox) -> list[tuple[str, int]]:
    asked = ("echo $A", "echo $B", "cat /root/list", "pgrep -c sleep")
    return [(done.output, done.exit_code) for done in map(sandbox.run, asked)]


SETTLED = [("4\n", 0), ("\n", 0), ("one\n", 0), ("2\n", 0)]


def test_state_stays_between_commands(made: Sandboxes) -> None:
    sandbox = made.create()
    settle(sandbox)
    assert shown(sandbox) == SETTLED
    assert sandbox.run("A=$((A+3)); echo $A").output == "7\n"
    assert sandbox.run("echo $A").output == "7\n"


def test_exit_codes_and_time_outs_are_results(made: Sandboxes) -> None:
    sandbox = made.create()
    assert sandbox.run("(exit 3)").exit_code == 3
    assert sandbox.run("cat /root/list").exit_code == 1
    assert sandbox.run("pgrep -c sleep").exit_code == 1
    done = sandbox.run("sleep 999", timeout_s=0.5)
    assert (done.timed_out, done.exit_code) == (True, 124)
    assert sandbox.run("true").exit_code == 0


def test_two_runs_of_something_random_differ(made: Sandboxes) -> None:
    sandbox = made.create()
    first, second = sandbox.run(RANDOM).output, sandbox.run(RANDOM).output
    assert first != second
    assert sandbox.run("cat /root/list").output == first + second


def test_what_is_no_command_runs_nothing(made: Sandboxes) -> None:
    sandbox = made.create()
    for command, error in ((b"true", NotText), (None, NotText), ("echo \0", InvalidInput)):
        with pytest.raises(error):
            sandbox.run(command)  # type: ignore[arg-type]
    assert sandbox.run("true").exit_code == 0


def test_a_save_is_of_its_instant_and_the_sandbox_goes_on(made: Sandboxes) -> None:
    sandbox = made.create()
    settle(sandbox)
    checkpoint = made.save(sandbox)
    sandbox.run("B=later")
    sandbox.run("echo later >>/root/list")
    sandbox.run(SPAWN)
    first, second = made.restore(checkpoint), made.restore(checkpoint)
    assert shown(first) == SETTLED
    first.run("A=5")
    assert shown(second) == SETTLED
    assert shown(sandbox) == [("4\n", 0), ("later\n", 0), ("one\nlater\n", 0), ("3\n", 0)]
    assert len({sandbox.id, first.id, second.id}) == 3


def test_a_restored_sandbox_can_be_saved(made: Sandboxes) -> None:
    sandbox = made.create()
    settle(sandbox)
    for _ in range(2):
        sandbox = made.reborn(sandbox)
    assert shown(sandbox) == SETTLED


def test_a_damaged_save_is_not_restored_and_leaves_nothing(made: Sandboxes) -> None:
    sandbox = made.create()
    checkpoint = made.save(sandbox)
    for path in (checkpoint.directory / "images").iterdir():
        path.unlink()
    home = made.new_home()
    with pytest.raises(RestoreFailed):
        made.runtime.restore(checkpoint.spec, checkpoint.directory, checkpoint.saved.meta, home)
    made.runtime.sweep(home)
    assert not home.exists()


def test_a_killed_sandbox_says_so_everywhere(made: Sandboxes, tmp_path: Path) -> None:
    sandbox = made.create()
    assert sandbox.is_alive()
    assert sandbox.answers()
    sandbox.kill()
    sandbox.kill()
    assert not sandbox.is_alive()
    assert not sandbox.answers()
    with pytest.raises(SandboxGone) as fault:
        sandbox.run("true")
    assert not fault.value.begun
    into = made.new_home() / "saved"
    with pytest.raises(SandboxGone):
        sandbox.save(into)
    assert not into.exists()
    assert sandbox.fingerprint() is None
    assert sandbox.memory_bytes() >= 0
    into.parent.rmdir()


def test_destroy_removes_all_and_may_be_called_twice(made: Sandboxes) -> None:
    sandbox = made.create()
    settle(sandbox)
    sandbox.destroy()
    sandbox.destroy()
    assert not sandbox.is_alive()
    assert not made.homes_left()


def test_sweep_removes_what_runs_by_its_home_alone(made: Sandboxes) -> None:
    home = made.new_home()
    sandbox = made.runtime.create(SandboxSpec(image=made.image), home)
    made.runtime.sweep(home)
    assert not home.exists()
    assert not sandbox.is_alive()
    made.runtime.sweep(home)
    sandbox.destroy()


def test_a_suspended_sandbox_stands_still_until_it_is_woken(made: Sandboxes) -> None:
    sandbox = made.create()
    settle(sandbox)
    sandbox.suspend()
    assert sandbox.is_alive()
    with pytest.raises(SandboxFrozen):
        sandbox.run("true")
    sandbox.wake()
    woken = made.reborn(sandbox)
    woken.suspend()
    woken.kill()
    with pytest.raises(SandboxGone):
        woken.wake()


def test_a_fingerprint_changes_when_something_does(made: Sandboxes) -> None:
    sandbox = made.create()
    settle(sandbox)
    directory = made.new_home()
    saved = sandbox.save(directory / "saved", with_fingerprint=True)
    if saved.fingerprint is not None:
        assert sandbox.fingerprint() in (saved.fingerprint, None)
        sandbox.run("B=changed")
        assert sandbox.fingerprint() != saved.fingerprint
    made.layers.drop(directory / "saved" / "layer")
    made.layers.drop(directory)


def test_processes_are_those_inside(made: Sandboxes) -> None:
    sandbox = made.create()
    settle(sandbox)
    found = sandbox.processes()
    assert found[0].pid == 1
    assert [process.argv for process in found if process.argv[0] == "sleep"] == [
        ("sleep", "900"),
        ("sleep", "901"),
    ]
