"""What can befall one sandbox, and the typed fault that says so. Real containers, real kills."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from belayer_env.errors import (
    CheckpointRefused,
    Fault,
    IncompatibleCheckpoint,
    RestoreFailed,
    RuntimeFailed,
    SandboxAstray,
    SandboxFrozen,
    SandboxGone,
    SandboxHung,
    SandboxOOM,
)
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.sandbox.cgroup import Cgroup
from belayer_env.sandbox.image import resolve_image
from belayer_env.sandbox.layers import LayerStore
from belayer_env.spec import MIB, Tier
from tests.sandboxes import Sandboxes

pytestmark = pytest.mark.usefixtures("full_runtime")


def container(sandbox: Sandbox) -> Any:
    """What both runtimes hold of the host's view."""
    return sandbox._container  # type: ignore[attr-defined]


def soon(act: Any, delay_s: float = 0.3) -> threading.Timer:
    timer = threading.Timer(delay_s, act)
    timer.start()
    return timer


def test_a_kill_at_rest_had_not_begun_the_command(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    assert sandbox.is_alive()
    sandbox.kill()
    sandbox.kill()
    assert not sandbox.is_alive()
    with pytest.raises(SandboxGone) as caught:
        sandbox.run("echo never")
    assert not caught.value.begun
    assert not sandbox.answers()
    with pytest.raises(SandboxGone):
        sandbox.save(Path("/nonexistent/never"))


def test_a_kill_in_mid_command_may_have_had_effects(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    timer = soon(sandbox.kill)
    started = time.monotonic()
    with pytest.raises(SandboxGone) as caught:
        sandbox.run("sleep 25")
    timer.join()
    assert caught.value.begun
    assert time.monotonic() - started < 20  # noticed by the pidfd, not by the time limit


def test_destroy_is_idempotent_and_final(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.destroy()
    sandbox.destroy()
    for call in (lambda: sandbox.run("true"), sandbox.processes, sandbox.wake):
        with pytest.raises(SandboxGone):
            call()
    assert sandbox.fingerprint() is None
    assert not sandbox.is_alive()


def test_a_child_that_runs_out_of_memory_is_a_result(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create(memory_bytes=128 * MIB)
    result = sandbox.run("python3 -c 'x = bytearray(400_000_000)' 2>/dev/null; echo code $?")
    assert result.output.splitlines()[-1] in ("code 137", "code 1")
    assert sandbox.run("echo ok").output == "ok\n"


def test_an_init_that_the_oom_killer_takes_is_told_from_other_deaths(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create(memory_bytes=64 * MIB)
    # The first choice of the OOM killer is whoever says so; init is made to.
    Path(f"/proc/{container(sandbox).pid}/oom_score_adj").write_text("1000")
    hog = """python3 -c 'import time; x = b"x" * 20_000_000; time.sleep(9)'"""
    hogs = f"for i in 1 2 3 4 5; do {hog} & done; wait"
    with pytest.raises(SandboxOOM, match=str(64 * MIB)):
        sandbox.run(hogs)


def test_a_step_in_which_the_oom_killer_went_on_to_init_has_no_result(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create(memory_bytes=128 * MIB)
    cgroup: Cgroup = container(sandbox).cgroup
    hog = "python3 -c 'x = bytearray(400_000_000)' 2>/dev/null; echo ended"

    def kill_next() -> None:
        # By then the command has ended, and said of what: the kernel takes so long over its second choice.
        until = time.monotonic() + 20
        while not cgroup.oom_kills() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)
        sandbox.kill()

    done = sandbox.run(hog)
    if not done.oom_kills:
        pytest.skip("here Python is refused the memory, and nobody killed")
    assert done.output.endswith("ended\n")
    assert sandbox.run("echo ok").oom_kills == 0
    sandbox = sandboxes.create(memory_bytes=128 * MIB)
    cgroup = container(sandbox).cgroup
    killer = threading.Thread(target=kill_next)
    killer.start()
    with pytest.raises(SandboxOOM) as caught:
        sandbox.run(hog)
    killer.join()
    assert caught.value.begun


def test_a_foreign_freeze_in_mid_dump_ends_the_checkpoint_soon_and_nothing_else(
    sandboxes: Sandboxes, store_dir: Path
) -> None:
    sandbox = sandboxes.create()
    sandbox.run("V=3; sleep 900 & sleep 901 & python3 -m http.server >/dev/null 2>&1 & true")
    cgroup: Cgroup = container(sandbox).cgroup
    over = threading.Event()

    def freeze_in_the_middle() -> None:
        for is_passed in (cgroup.is_frozen, lambda: not cgroup.is_frozen()):  # ours, until CRIU has thawed it
            while not is_passed() and not over.is_set():
                time.sleep(0.0002)
        if not over.is_set():
            cgroup.freeze()

    for number in range(20):
        over.clear()
        foreigner = threading.Thread(target=freeze_in_the_middle)
        foreigner.start()
        started = time.monotonic()
        into = store_dir / f"never-{number}"
        try:
            sandbox.save(into)
            sandboxes.layers.drop(into)  # it came too late: CRIU needed them no more
        except SandboxFrozen:
            break
        finally:
            over.set()
            foreigner.join()
            cgroup.thaw()
    else:
        pytest.fail("no freeze hit the middle of a dump")
    assert time.monotonic() - started < 20  # CRIU's deadline is 60 s
    assert not into.exists()
    assert sandbox.run("echo $V; jobs | wc -l").output == "3\n3\n"
    sandboxes.layers.drop(sandboxes.save(sandbox).directory)


def test_a_foreign_freeze_before_criu_holds_all_is_told_as_one(
    sandboxes: Sandboxes, store_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU's own limit then ends it sooner than our patience; it has let go of the tasks by then."""
    sandbox = sandboxes.create()
    sandbox.run("V=3; sleep 900 &")
    wrapper = tmp_path / "criu"
    wrapper.write_text(
        "#!/bin/sh\nwork=.\nwhile [ $# -gt 0 ]; do [ $1 = -W ] && work=$2; shift; done\nsleep 3\n"
        'echo "(3.000000) Error (criu/cr-dump.c:1): Timeout reached. Try to interrupt: 0" >$work/dump.log\n'
        "exit 1\n"
    )
    wrapper.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sandboxes.runtime, "criu", wrapper)
        thawed = sandboxes.create()
        into = store_dir / "never"
        with pytest.raises(SandboxFrozen) as caught:
            sandbox.save(into)  # its own freeze, which this CRIU does not lift, stands for the foreign one
        assert not caught.value.begun
        assert not into.exists()
        # The same words under no freezer are a deadline, and nobody knows what such a CRIU has left behind.
        thawer = soon(container(thawed).cgroup.thaw)
        with pytest.raises(CheckpointRefused) as refused:
            thawed.save(into)
        thawer.join()
        assert refused.value.cause == "deadline"
    assert sandbox.run("echo $V; jobs | wc -l").output == "3\n1\n"
    sandboxes.layers.drop(sandboxes.save(sandbox).directory)


def test_a_checkpoint_that_somebody_thawed_in_the_middle_is_none(
    sandboxes: Sandboxes, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox: Any = sandboxes.create()
    sandbox.run("echo before >/root/file")
    snapshot = sandbox._snapshot

    def snapshot_thawed(*args: Any) -> None:
        container(sandbox).cgroup.thaw()
        snapshot(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_snapshot", snapshot_thawed)
        with pytest.raises(RuntimeFailed, match="two instants"):
            sandbox.save(store_dir / "never")
    assert not (store_dir / "never").exists()
    assert sandboxes.reborn(sandbox).run("cat /root/file").output == "before\n"


def test_a_shell_that_has_run_something_else_than_the_host_knows_of_is_astray(
    sandboxes: Sandboxes, store_dir: Path
) -> None:
    sandbox = sandboxes.create()
    sandbox.run("V=3")
    checkpoint = sandboxes.save(sandbox)
    meta: Any = checkpoint.saved.meta
    last_run = meta["last_run"]
    sandboxes.restore(checkpoint).destroy()
    for wrong in (0, last_run - 1, last_run + 1):
        meta["last_run"] = wrong
        with pytest.raises(RestoreFailed, match=f"has last run command {last_run}, and not {wrong}"):
            sandboxes.restore(checkpoint)
    del meta["last_run"]
    assert sandboxes.restore(checkpoint).run("echo $V").output == "3\n"  # of an earlier version
    container(sandbox)._channel._last_run -= 1
    with pytest.raises(SandboxAstray) as caught:
        sandbox.run("V=4")
    assert caught.value.begun
    for use in (sandbox.answers, lambda: sandbox.save(store_dir / "never")):
        try:
            assert use() is False
        except SandboxAstray:
            assert not (store_dir / "never").exists()
    sandboxes.layers.drop(checkpoint.directory)


def test_what_the_shell_ran_last_is_known_again_after_its_own_end(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.run("V=3")
    assert sandbox.run("exit 4").shell_restarted
    sandbox = sandboxes.reborn(sandbox)  # it is not known now, and not held against it
    assert sandbox.run("echo $V").output == "3\n"
    assert sandboxes.reborn(sandbox).run("echo $V").output == "3\n"


def test_a_shell_channel_without_room_is_a_fault(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()

    def is_full() -> bool:
        return any("sleep" in process.argv for process in sandbox.processes())

    for _ in range(5):
        # The end of this very step may truncate under it what it fills: then again.
        sandbox.run("(cat /dev/zero >&3; exec sleep 900) 3>>/belayer/state.new 2>/dev/null &")
        until_s = time.monotonic() + 5
        while not is_full() and time.monotonic() < until_s:
            time.sleep(0.02)
        if is_full():
            break
    with pytest.raises(RuntimeFailed) as caught:
        sandbox.run(": " + "x" * MIB)
    assert caught.value.begun


def test_a_sandbox_that_somebody_froze_is_told_at_rest_and_in_mid_command(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    cgroup: Cgroup = container(sandbox).cgroup
    cgroup.freeze()
    with pytest.raises(SandboxFrozen) as caught:
        sandbox.run("echo never")
    assert not sandbox.answers() or pytest.fail("a frozen sandbox answered")
    cgroup.thaw()
    assert isinstance(caught.value, Fault)
    sandbox = sandboxes.create()
    cgroup = container(sandbox).cgroup
    timer = soon(cgroup.freeze)
    with pytest.raises(SandboxFrozen) as caught:
        sandbox.run("sleep 20")
    timer.join()
    assert caught.value.begun
    with pytest.raises(SandboxFrozen):
        sandbox.save(Path("/nonexistent/never"))
    cgroup.thaw()


def test_suspend_and_wake_stop_time_for_its_processes(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.run("(while :; do date +%s%N >/root/now; sleep 0.05; done) >/dev/null 2>&1 &")
    time.sleep(0.3)
    for _ in range(3):
        sandbox.suspend()
        with pytest.raises(SandboxFrozen) as caught:
            sandbox.run("touch /root/never", timeout_s=2)
        assert not caught.value.begun
        container(sandbox).cgroup.thaw()
        time.sleep(0.1)  # for a shell that found the request when it awoke
        sandbox.wake()
        assert sandbox.answers()
    assert sandbox.run("ls /root/never 2>&1").exit_code == 2
    sandbox.suspend()
    container(sandbox).kill()
    with pytest.raises(SandboxGone):
        sandbox.wake()


@pytest.fixture
def slow_criu(sandboxes: Sandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CRIU that writes its pid and sleeps before the real one would start."""
    runtime: Any = sandboxes.runtime
    if runtime.name != "runc":
        pytest.skip("how CRIU is called is the runc runtime's matter; Docker's own restores")
    wrapper = tmp_path / "criu"
    wrapper.write_text(f'#!/bin/sh\necho $$ >{tmp_path}/pid\nsleep 30 &\nwait\nexec {runtime.criu} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(runtime, "criu", wrapper)
    return tmp_path / "pid"


def test_a_criu_killed_in_mid_dump_counts_the_sandbox_as_lost(sandboxes: Sandboxes, slow_criu: Path) -> None:
    sandbox = sandboxes.create()

    def kill_criu() -> None:
        while not slow_criu.exists() or not slow_criu.read_text().strip():
            time.sleep(0.01)
        os.kill(int(slow_criu.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill_criu)
    killer.start()
    with pytest.raises(CheckpointRefused) as caught:
        sandboxes.save(sandbox)
    killer.join()
    assert caught.value.cause == "killed"
    assert not sandbox.is_alive()
    with pytest.raises(SandboxGone):
        sandbox.run("true")


def test_a_dump_past_its_deadline_counts_the_sandbox_as_lost(
    sandboxes: Sandboxes, slow_criu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belayer_env.sandbox.criu.DUMP_DEADLINE_S", 0.5)
    sandbox = sandboxes.create()
    with pytest.raises(CheckpointRefused) as caught:
        sandboxes.save(sandbox)
    assert caught.value.cause == "deadline"
    assert not sandbox.is_alive()


def test_a_refused_checkpoint_leaves_a_sandbox_that_goes_on(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.run(
        "python3 -c 'import ctypes, os, time\nif os.fork() == 0: ctypes.CDLL(None).ptrace(0, 0, 0, 0)\n"
        "time.sleep(900)' >/dev/null 2>&1 & echo $! >/tmp/pid; sleep 0.5"
    )
    for _ in range(2):
        with pytest.raises(CheckpointRefused, match="debugger") as caught:
            sandboxes.save(sandbox)
        assert caught.value.cause == "traced"
        assert sandbox.run("echo ok").output == "ok\n"
    sandbox.run("pkill -9 python3; sleep 0.2")
    assert sandboxes.reborn(sandbox).run("echo ok").output == "ok\n"


def test_a_restore_that_fails_leaves_nothing(sandboxes: Sandboxes) -> None:
    checkpoint = sandboxes.save(sandboxes.create())
    core = next((checkpoint.directory / "images").glob("core-*"))
    core.write_bytes(b"no image")
    with pytest.raises(RestoreFailed):
        sandboxes.restore(checkpoint)
    sandboxes.runtime.sweep(sandboxes._homes[-1])


def test_an_image_that_changed_since_is_refused(sandboxes: Sandboxes) -> None:
    if sandboxes.runtime.name == "docker":
        pytest.skip("the Engine keeps the image that a checkpoint was made of, and restores on that")
    checkpoint = sandboxes.save(sandboxes.create())
    meta = {**checkpoint.saved.meta, "image_digest": "another"}
    with pytest.raises(IncompatibleCheckpoint):
        sandboxes.runtime.restore(checkpoint.spec, checkpoint.directory, meta, sandboxes.new_home())
    sandboxes.runtime.sweep(sandboxes._homes[-1])


def test_a_stopped_shell_is_hung_not_waited_for(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create(step_timeout_s=2.0)
    shell = next(proc.pid for proc in container(sandbox).procs() if "loop" in " ".join(proc.argv))
    os.kill(shell, signal.SIGSTOP)
    assert not sandbox.answers()
    try:
        result = sandbox.run("echo late")
    except SandboxHung:
        return
    # Its heir ran the command: then that is what is told.
    assert result.shell_restarted or result.timed_out


def test_the_files_tier_carries_files_cwd_and_variables(
    runtime: SandboxRuntime, layers: LayerStore, store_dir: Path, image: str
) -> None:
    if runtime.name != "runc":
        pytest.skip("tests/test_docker.py has Docker's")
    from belayer_env.sandbox.runc import RuncRuntime

    images = store_dir / "images"
    files = RuncRuntime(layers, images, tier=Tier.FILES, tier_reason="for the test")
    made = Sandboxes(files, layers, store_dir, image)
    try:
        sandbox = made.create()
        sandbox.run(
            "cd /srv; echo kept >f; export V='a b'; greet() { echo hi; }; sleep 900 & echo k >/dev/shm/k"
        )
        checkpoint = made.save(sandbox)
        assert checkpoint.saved.tier is Tier.FILES
        sandbox.destroy()
        again = made.restore(checkpoint)
        assert (
            again.run('pwd; cat f; echo "$V"; env | grep ^V=; greet').output == "/srv\nkept\na b\nV=a b\nhi\n"
        )
        # What it does not carry: processes and what lies in memory.
        assert again.run("pgrep sleep; ls /dev/shm").output == ""
    finally:
        made.close()
    assert resolve_image(image, images).path.is_dir()
