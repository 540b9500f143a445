"""After a restore pids go on from where they were: what a replay prints of them is what was told."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from belayer_env import ContainerEnv, Task
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.sandbox.layers import LayerStore
from belayer_env.sandbox.pids import counting_on
from tests.sandboxes import Sandboxes

SPAWN = "true | cat; sleep 100 & echo $!; sh -c 'echo $$'"


@pytest.mark.usefixtures("full_runtime")
def test_the_next_process_gets_the_pid_that_it_would_have_got(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    for _ in range(3):
        sandbox.run("sleep 900 & for i in 1 2 3 4 5; do /bin/true; done")
    checkpoint = sandboxes.save(sandbox)
    expected = sandbox.run(SPAWN).output
    assert len(expected.split()) == 2
    for _ in range(2):
        assert sandboxes.restore(checkpoint).run(SPAWN).output == expected
    meta: Any = checkpoint.saved.meta
    assert meta["last_pid"] > 15
    del meta["last_pid"]  # of an earlier version
    assert sandboxes.restore(checkpoint).run("echo ok").output == "ok\n"


def test_a_replayed_step_that_prints_pids_is_recognised(
    nothing_left_behind: None, full_runtime: SandboxRuntime, store_dir: Path, layers: LayerStore, image: str
) -> None:
    store = store_dir / "store"
    env = ContainerEnv(Task(image=image), runtime=full_runtime.name, policy="never", store=store)
    try:
        env.reset()
        env.step("for i in 1 2 3 4 5 6 7 8 9; do /bin/true; done")
        env.checkpoint()
        told = [env.step(SPAWN)[0] for _ in range(2)]
        env.episode.sandbox.kill()
        *_, info = env.step("true")
        assert "rollback" not in info
        assert env.telemetry.recoveries[-1].num_replayed == 2
        assert [step.observation for step in env.episode.ledger.steps[1:3]] == told
    finally:
        env.close()
        layers.drop(store)


def test_without_a_namespace_to_enter_pids_begin_anew_and_that_is_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="belayer")
    with counting_on(os.getpid(), 0):
        pass
    assert caplog.text == ""
    with counting_on(2**22 + 1, 7):  # above what the kernel gives
        pass
    assert "begin anew" in caplog.text
