"""Programs checkpointed, killed, restored, and checked by what they do, in sandboxes of every runtime."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_env.errors import CheckpointRefused, Fault
from belayer_env.sandbox.base import Sandbox, SandboxRuntime
from belayer_env.sandbox.cgroup import is_unified
from belayer_env.sandbox.layers import LayerStore
from belayer_env.spec import GIB, MIB
from tests.sandboxes import Sandboxes
from tests.zoo import HEAVY, PRELUDE, PROGRAMS, Program

pytestmark = pytest.mark.usefixtures("full_runtime")


class Cage:
    """Several programs in one sandbox, restored once and twice.

    Where the lot cannot be restored as one, each test cages its program alone: failures have a name."""

    def __init__(self, sandboxes: Sandboxes, programs: tuple[Program, ...]) -> None:
        is_docker = sandboxes.runtime.name == "docker"
        self._caged = [program for program in programs if not (is_docker and program.docker)]
        try:
            first = sandboxes.reborn(start(sandboxes, *self._caged))
            self._generations: tuple[Sandbox, ...] = (first, sandboxes.restore(sandboxes.save(first)))
        except (Fault, AssertionError):
            self._generations = ()

    def restored(self, program: Program, generation: int, alone: Sandboxes) -> Sandbox:
        if self._generations and program in self._caged:
            return self._generations[generation - 1]
        sandbox = start(alone, program)
        for _ in range(generation):
            sandbox = alone.reborn(sandbox)
        return sandbox


def start(sandboxes: Sandboxes, *programs: Program) -> Sandbox:
    sandbox = sandboxes.create(memory_bytes=1 * GIB, pids=500)
    assert sandbox.run(PRELUDE).output == ""
    for program in programs:
        started = sandbox.run(program.start)
        assert (started.output, started.timed_out) == ("", False), f"{program.name} did not start"
    return sandbox


@pytest.fixture(scope="module")
def cage(shared_sandboxes: Sandboxes) -> Cage:
    return Cage(shared_sandboxes, PROGRAMS)


@pytest.fixture(scope="module")
def heavy_cage(runtime: SandboxRuntime, layers: LayerStore, store_dir: Path, image: str) -> Iterator[Cage]:
    sandboxes = Sandboxes(runtime, layers, store_dir, image)
    try:
        yield Cage(sandboxes, HEAVY)
    finally:
        sandboxes.close()


def check(sandbox: Sandbox, program: Program) -> None:
    done = sandbox.run(program.check)
    assert done.output.removesuffix("\n") == program.expect, program.name


def by_name(program: Program) -> str:
    return program.name


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS, ids=by_name)
def test_program_goes_on_after_restores(
    cage: Cage, program: Program, generation: int, sandboxes: Sandboxes
) -> None:
    if sandboxes.runtime.name == "docker" and program.docker == "no-ipv6":
        pytest.skip("Docker gives a container without a network no ::1")
    try:
        restored = cage.restored(program, generation, sandboxes)
    except CheckpointRefused as refused:
        # What the Engine's runc cannot restore is refused by its name, and nothing is lost.
        if (sandboxes.runtime.name, refused.cause) != ("docker", program.docker):
            raise
        return
    check(restored, program)


@pytest.mark.parametrize("program", HEAVY, ids=by_name)
def test_heavy_program_goes_on_after_restores(
    heavy_cage: Cage, program: Program, sandboxes: Sandboxes
) -> None:
    check(heavy_cage.restored(program, 2, sandboxes), program)


# -- programs that need a sandbox of their own

WATCHER = """
cat >/tmp/w.py <<'P'
import ctypes, os
l = ctypes.CDLL(None); fd = l.inotify_init(); os.makedirs('/tmp/w', exist_ok=True)
l.inotify_add_watch(fd, b'/tmp/w', 0x100); open('/tmp/w.up', 'w').close()
while os.read(fd, 4096): open('/tmp/ev', 'a').write('e')
P
python3 /tmp/w.py & until test -e /tmp/w.up; do sleep .02; done
"""


def test_inotify_watcher_goes_on_or_is_refused_by_name(sandboxes: Sandboxes) -> None:
    """Docker's overlay gives its files no handles, which CRIU needs for a watch."""
    sandbox = sandboxes.create()
    sandbox.run(WATCHER)
    if sandboxes.runtime.name == "docker":
        with pytest.raises(CheckpointRefused) as caught:
            sandboxes.save(sandbox)
        assert caught.value.cause == "inotify"
        assert sandbox.run("echo ok").output == "ok\n"
        return
    restored = sandboxes.reborn(sandbox)
    restored.run("touch /tmp/w/new; for i in {1..100}; do test -s /tmp/ev && break; sleep .05; done")
    assert restored.run("cat /tmp/ev").output == "e"


def test_tail_f_goes_on_or_is_refused_by_name(sandboxes: Sandboxes) -> None:
    """It watches by inotify, or polls where that does not work."""
    sandbox = sandboxes.create()
    sandbox.run("echo 1 >/tmp/log; tail -f /tmp/log >/tmp/followed & sleep .2")
    try:
        restored = sandboxes.reborn(sandbox)
    except CheckpointRefused as refused:
        if (sandboxes.runtime.name, refused.cause) != ("docker", "inotify"):
            raise
        return
    restored.run("echo 2 >>/tmp/log; for i in {1..100}; do grep -q 2 /tmp/followed && break; sleep .05; done")
    assert restored.run("cat /tmp/followed").output == "1\n2\n"


def test_io_uring_is_denied_and_checkpoints_work(sandboxes: Sandboxes) -> None:
    """Case A04."""
    sandbox = sandboxes.create()
    program = (
        "import ctypes, time\nL = ctypes.CDLL(None, use_errno=True); b = ctypes.create_string_buffer(120)\n"
        "print(L.syscall(425, 8, b), ctypes.get_errno(), flush=True); time.sleep(900)"
    )
    sandbox.run(f"cat >/tmp/p.py <<'P'\n{program}\nP\npython3 /tmp/p.py >/tmp/p.log 2>&1 & echo $! >/tmp/pid")
    sandbox.run("until test -s /tmp/p.log; do sleep .02; done")
    assert sandbox.run("cat /tmp/p.log").output == "-1 38\n"
    for _ in range(3):
        sandboxes.save(sandbox)


@pytest.mark.parametrize(
    "debugger",
    [
        "python3 -c 'import ctypes, os, time\n"
        "if os.fork() == 0: ctypes.CDLL(None).ptrace(0, 0, 0, 0)\ntime.sleep(900)' &",
        "strace -f -o /tmp/t sleep 900 &",
    ],
    ids=["ptrace", "strace"],
)
def test_traced_process_is_refused_quickly_and_by_name(sandboxes: Sandboxes, debugger: str) -> None:
    """Case A05. The sandbox goes on, and once the debugger is gone it can be checkpointed."""
    sandbox = sandboxes.create()
    sandbox.run(f"{debugger} sleep .5")
    asked = time.monotonic()
    with pytest.raises(CheckpointRefused) as caught:
        sandboxes.save(sandbox)
    assert time.monotonic() - asked < 3
    assert caught.value.cause == "traced"
    assert "python3" in caught.value.culprit or "sleep 900" in caught.value.culprit
    assert Path(f"/proc/{caught.value.pid}").exists()
    assert sandbox.run("echo ok").output == "ok\n"
    sandbox.run("pkill -9 strace; pkill -9 python3; pkill -9 sleep; sleep .1")
    sandboxes.save(sandbox)


def test_posix_lock_on_a_mapped_file_is_refused_by_name(sandboxes: Sandboxes) -> None:
    """CRIU would restore it without the lock. SQLite's WAL mode holds one as long as a connection is open."""
    sandbox = sandboxes.create()
    program = (
        "import sqlite3, time; c = sqlite3.connect('/root/wal.db', isolation_level=None); "
        "c.execute('pragma journal_mode=wal'); c.execute('create table t(x)'); c.execute('begin'); "
        "c.execute('insert into t values (1)'); open('/root/up', 'w').close(); time.sleep(900)"
    )
    sandbox.run(f'python3 -c "{program}" & until test -e /root/up; do sleep .05; done')
    with pytest.raises(CheckpointRefused, match=r"wal\.db-shm") as caught:
        sandboxes.save(sandbox)
    assert caught.value.cause == "locked-mapping"
    sandbox.run("pkill python3; wait")
    assert sandboxes.reborn(sandbox).run("ls /root/up").output == "/root/up\n"


def test_stopped_process_stays_so_or_is_refused_quickly_and_by_name(sandboxes: Sandboxes) -> None:
    """A v1 freezer holds a stopped process so fast that CRIU cannot seize it."""
    sandbox = sandboxes.create()
    sandbox.run("sleep 4321 & sleep .2; kill -STOP $!; until grep -q stopped /proc/$!/status; do :; done")
    stopped = "ps -o stat= -p $(pgrep -fx 'sleep 4321')"
    if is_unified():
        assert sandboxes.reborn(sandbox).run(stopped).output == "T\n"
        return
    asked = time.monotonic()
    with pytest.raises(CheckpointRefused) as caught:
        sandboxes.save(sandbox)
    assert time.monotonic() - asked < 3
    assert (caught.value.cause, caught.value.culprit) == ("stopped", "sleep 4321")
    assert sandbox.run(stopped).output == "T\n"
    sandbox.run("pkill -CONT sleep; sleep .1")
    assert sandboxes.reborn(sandbox).run(stopped).output == "S\n"


def test_terminal_that_dash_holds_open_is_refused_by_name(sandboxes: Sandboxes) -> None:
    """CRIU ties /dev/tty to the master's end by session; interactive dash keeps it open, bash does not."""
    sandbox = sandboxes.create()
    sandbox.run(
        "python3 -c 'import os, pty, time; pid, fd = pty.fork()\n"
        'if pid == 0: os.execvp("dash", ["dash", "-i"])\ntime.sleep(900)\' &\n'
        "until ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q /dev/tty; do sleep .05; done"
    )
    with pytest.raises(CheckpointRefused) as caught:
        sandboxes.save(sandbox)
    assert caught.value.cause == "terminal"
    assert sandbox.run("pkill python3; sleep .2; echo ok").output.endswith("ok\n")
    sandboxes.save(sandbox)


def test_chain_of_checkpoints_loses_nothing(sandboxes: Sandboxes) -> None:
    """Case A07."""
    sandbox = sandboxes.create()
    chain = []
    for i in range(6):
        sandbox.run(f"N=$((N+1)); touch /root/f{i}; rm -f /root/f{i - 2}")
        chain.append(sandboxes.save(sandbox))
        sandbox.kill()
        sandbox.destroy()
        sandbox = sandboxes.restore(chain[-1])
    assert sandbox.run("echo $N; ls /root").output == "6\nf4\nf5\n"
    older = sandboxes.restore(chain[2])
    assert older.run("echo $N; ls /root").output == "3\nf1\nf2\n"
    again = sandboxes.restore(chain[2])
    assert again.run("echo $N; ls /root").output == "3\nf1\nf2\n"


def test_many_sandboxes_from_one_checkpoint_share_nothing(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.run("K=1; echo k >/dev/shm/k; echo f >/root/f")
    checkpoint = sandboxes.save(sandbox)
    clones = [sandboxes.restore(checkpoint) for _ in range(4)]
    for number, clone in enumerate(clones):
        clone.run(f"K={number}; echo {number} >/dev/shm/k; echo {number} >/root/f")
    for number, clone in enumerate(clones):
        assert clone.run("echo $K; cat /dev/shm/k /root/f").output == f"{number}\n" * 3
    assert sandbox.run("echo $K; cat /dev/shm/k /root/f").output == "1\nk\nf\n"


def test_limits_hold_after_a_restore(sandboxes: Sandboxes) -> None:
    """Case A09."""
    bounded = sandboxes.runtime.name == "runc" and sandboxes.layers.kind == "btrfs"
    disk_bytes = 200 * MIB if bounded else None
    sandbox = sandboxes.reborn(sandboxes.create(pids=64, memory_bytes=256 * MIB, disk_bytes=disk_bytes))
    eaten = sandbox.run("python3 -c 'bytearray(400_000_000)'; echo rc=$?").output
    assert "rc=137" in eaten or "MemoryError" in eaten
    if bounded:
        done = sandbox.run("head -c 400M /dev/zero >/root/big; echo rc=$?; rm /root/big")
        assert "rc=1" in done.output
    # A Python that forks: bash would wait longer and longer between its tries.
    forks = (
        "import os, time\nn = 0\n"
        "try:\n  for _ in range(200):\n    if os.fork() == 0: time.sleep(60)\n    n += 1\n"
        "except OSError as e: print(n < 64, e.errno)\nos.killpg(0, 9)"
    )
    assert sandbox.run(f'setsid python3 -uc "{forks}"').output.startswith("True 11\n")
    assert sandbox.run("echo ok").output == "ok\n"


def test_tmpfs_comes_back(sandboxes: Sandboxes) -> None:
    """Case A11."""
    sandbox = sandboxes.create()
    sandbox.run("mkdir -p /run/a; echo r >/run/a/r; echo k >/dev/shm/k; chmod 640 /dev/shm/k")
    sandbox.run(
        "python3 -c 'from multiprocessing import shared_memory as m; import time; "
        's=m.SharedMemory("z",1,4096); s.buf[0]=9; time.sleep(900)\' & '
        "until test -e /dev/shm/z; do sleep .02; done; sleep .2"
    )
    restored = sandboxes.reborn(sandbox)
    done = restored.run("cat /run/a/r /dev/shm/k; stat -c %a /dev/shm/k; od -An -tu1 -N1 /dev/shm/z")
    assert done.output.split() == ["r", "k", "640", "9"]


def test_deleted_file_over_the_limit_is_refused_by_name(sandboxes: Sandboxes) -> None:
    """Case A02: the documented cap is Limits.ghost_bytes."""
    sandbox = sandboxes.create(ghost_bytes=1 * MIB)
    sandbox.run("exec 7<>/root/big; head -c 5M /dev/zero >&7; rm /root/big")
    with pytest.raises(CheckpointRefused) as caught:
        sandboxes.save(sandbox)
    assert caught.value.cause == "ghost-too-big"
    assert "Limits.ghost_bytes" in str(caught.value)
    assert sandbox.run("exec 7>&-; echo ok").output == "ok\n"
    sandboxes.save(sandbox)


def test_background_output_under_way_survives_a_restore(sandboxes: Sandboxes) -> None:
    """A job's output FIFO is still read in its next life, so that it does not block."""
    sandbox = sandboxes.create()
    sandbox.run("(n=0; while :; do n=$((n+1)); echo tick $n; echo $n >>/tmp/n; sleep .01; done) &")
    restored = sandboxes.reborn(sandbox)
    before = int(restored.run("wc -l </tmp/n").output)
    # More than a pipe would hold without a reader.
    restored.run(
        "(head -c 200000 /dev/zero; echo past >/tmp/past) & until test -s /tmp/past; do sleep .1; done"
    )
    assert restored.run("cat /tmp/past").output == "past\n"
    assert int(restored.run("wc -l </tmp/n").output) > before


def test_shell_without_bash_goes_on(sandboxes: Sandboxes, busybox_image: str) -> None:
    sandbox = sandboxes.create(image=busybox_image)
    sandbox.run("cd /tmp; V=3; f() { echo fn$V; }; sleep 4321 & echo k >/tmp/k")
    restored = sandboxes.reborn(sandbox)
    assert restored.run("pwd; f; cat k; kill %1 && echo killed").output == "/tmp\nfn3\nk\nkilled\n"


@pytest.mark.parametrize("words", ["", "x" * 100_000])
def test_a_job_that_has_its_own_step_open_goes_on(sandboxes: Sandboxes, words: str) -> None:
    """As one that a shell other than bash has just forked, and that has not run yet."""
    sandbox = sandboxes.create()
    sandbox.run(f"sleep 4321 8</belayer/step & # {words}")
    restored = sandboxes.reborn(sandbox)
    assert restored.run("head -c 10 /proc/$!/fd/8; kill %1 && echo killed").output == "sleep 4321killed\n"


def test_checkpoint_with_a_busy_background_and_timed_out_past(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.run("K=1; while :; do :; done", timeout_s=0.5)
    restored = sandboxes.reborn(sandbox)
    done = restored.run("while :; do :; done", timeout_s=0.5)
    assert (done.timed_out, done.shell_restarted) == (True, False)
    assert restored.run("echo $K").output == "1\n"
    assert restored.run("exit 3").shell_restarted
    assert restored.run("echo $K").output == "1\n"
