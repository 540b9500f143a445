from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.cgroup import Cgroup
from belayer_env.sandbox.changes import (
    InDoubt,
    SandboxFacts,
    baseline,
    digest,
    fingerprint,
    gather,
    normal_state,
)
from belayer_env.sandbox.procs import read_procs
from belayer_env.sandbox.runc import RuncSandbox
from tests.sandboxes import Sandboxes

runc = pytest.mark.parametrize("runtime", [pytest.param("runc", marks=pytest.mark.criu)], indirect=True)

SETUP = """
touch /tmp/mine
mkdir -p /srv/repo && cd /srv/repo && git init -q . && git config user.email a@b.c && git config user.name a
printf 'def test_it():\\n    assert 1\\n' > test_it.py && printf 'one\\ntwo\\n' > file && ln -s file link
git add . && git commit -qm first && sleep 1.1 && git status
cat > mapped.py <<'END'
import mmap, sys
with open(sys.argv[1], 'r+b') as file, mmap.mmap(file.fileno(), 0) as memory:
    before = memory[0]
    memory[0:1] = b'X' if before != 88 else b'Y'
END
printf 'data' > /dev/shm/data
cat > sysv.py <<'END'
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(4711, 4096, 0o1600))
END
cat > waits.py <<'END'
import signal
signal.signal(signal.SIGUSR1, lambda *_: None)
while True:
    signal.pause()
END
export PYTHONDONTWRITEBYTECODE=1
f() { echo f; }
set -- first
"""


class Watched:
    """A sandbox and its fingerprints, taken by what its home holds."""

    def __init__(self, sandbox: Sandbox) -> None:
        assert isinstance(sandbox, RuncSandbox)
        self.sandbox = sandbox

    def run(self, command: str) -> None:
        self.sandbox.run(command)

    def facts(self) -> SandboxFacts:
        pids, init_pid = self._pids()
        home = self.sandbox.home
        return gather(
            init_pid=init_pid,
            pids=pids,
            upper=home / "layer/upper",
            shell_state=(home / "ch/state").read_bytes(),
        )

    def fingerprint(self, *, alone: bool = False) -> str | None:
        pids, init_pid = self._pids()
        home = self.sandbox.home
        state = (home / "ch/state").read_bytes()
        return fingerprint(
            init_pid=init_pid, pids=pids, upper=home / "layer/upper", shell_state=state, alone=alone
        )

    def known(self) -> str:
        """Doubt is always allowed, and passes: something ended while it was looked at, say."""
        for _ in range(20):
            if (found := self.fingerprint()) is not None:
                return found
        self.facts()  # says why
        raise AssertionError("a file of the future")

    def _pids(self) -> tuple[list[int], int]:
        pids = Cgroup.find(f"belayer-{self.sandbox.id}").pids()
        return pids, next(proc.pid for proc in read_procs(pids) if proc.ns_pid == 1)


@pytest.fixture(scope="module")
def long_lived(shared_sandboxes: Sandboxes) -> Watched:
    """One sandbox that many cases change in turn."""
    watched = Watched(shared_sandboxes.create())
    watched.run(SETUP)
    return watched


@pytest.fixture
def box(long_lived: Watched) -> Iterator[Watched]:
    long_lived.run("cd /srv/repo")
    yield long_lived
    long_lived.run("exec 5<&- 6<&- 7<&-; kill -9 $(jobs -p); wait; ulimit -S -n hard; rm -f pipe; true")


@runc
@pytest.mark.parametrize(
    "command",
    [
        "ls -la /work /etc /dev/shm",
        "cat file link /etc/passwd",
        "grep -rn one . | sort | head -1",
        "pwd; echo hello; printf x >/dev/null; [ -e file ]; true",
        "git status; git log; git diff",
        "echo x > /tmp/gone; rm /tmp/gone",
        "python3 -c 'print(sum(range(10**6)))'",
        "find / -xdev -name nothing 2>/dev/null; true",
        "(cd /; export X=1; umask 0; exit 0)",
        "f | cat; x=1 true",
        "sleep 0.1 | cat",
    ],
)
def test_a_command_that_only_looks_leaves_it_equal(box: Watched, command: str) -> None:
    box.run(command)
    before = box.known()
    box.run(command)
    assert box.known() == before


@runc
def test_a_test_run_that_caches_nothing_leaves_it_equal(box: Watched) -> None:
    command = "python3 -m pytest -q -p no:cacheprovider test_it.py"
    if box.sandbox.run("python3 -m pytest --version").exit_code != 0:
        command = "python3 -m unittest test_it"
    box.run(command)
    before = box.known()
    box.run(command)
    assert box.known() == before


@runc
def test_time_alone_changes_nothing(box: Watched) -> None:
    box.run("sleep 100 & python3 waits.py & sleep 0.3")
    before = box.known()
    time.sleep(0.5)
    assert box.known() == before


@runc
@pytest.mark.parametrize(
    "command",
    [
        # files
        "touch new", "touch file", "chmod 600 file", "chown 1:1 file", "mv file moved && mv moved file",
        "rm new", "printf more >> file", "python3 mapped.py file", "truncate -s 1 file", "ln -sfn moved link",
        "ln file hard", "mkfifo pipe", "mkdir -p a/b/c", "rm /etc/debian_version", "touch /etc/passwd",
        "mkdir d", "chmod 700 d", "touch -d '2001-01-01' d", "chown 1 d", "rmdir d && mkdir d",
        "touch -d '2001-01-01' file", "setfattr -n user.a -v 1 file || touch file", "printf one > file",
        # files in memory
        "touch /dev/shm/new", "printf DATA > /dev/shm/data", "python3 mapped.py /dev/shm/data",
        "touch /dev/new", "rm /dev/shm/new",
        # the shell
        "v=1", "v=2", "unset v", "export v", "declare -A m=([a]=1)", "f() { echo g; }", "unset -f f",
        "set -o pipefail", "set +o pipefail", "shopt -s extglob", "cd /", "cd /etc", "umask 077", "umask 022",
        "alias ll='ls -l'", "unalias ll", "trap 'echo bye' USR2", "trap 'echo BYE' USR2", "trap - USR2",
        "set -- a 'b c'", "set -- a b c", "shift", "pushd -n /tmp", "dirs -c", "enable -n kill",
        "enable kill", "complete -W 'a b' mine", "ulimit -S -n 100", "false", "(exit 3)",
        "renice -n 1 $$", "renice -n 3 $$",
        "echo $RANDOM", "RANDOM=42", "echo $SECONDS", "SECONDS=1000", "exec 5<file", "read -r line <&5",
        "exec 6>>file", "set -u", "set +u", "set -f", "set +f", "true & wait",
    ],
)  # fmt: skip
def test_each_kind_of_change_shows(box: Watched, command: str) -> None:
    # From a known exit code; and `$?` is a change of its own where a command fails.
    box.run("exec 5<file 6>>file; true" if "&5" in command else "true")
    before = box.known()
    box.run(command if command in ("false", "(exit 3)") else f"{command}\ntrue")
    assert box.known() != before


@runc
def test_a_lock_on_an_open_file_shows(box: Watched) -> None:
    box.run("exec 7>lock")
    before = box.known()
    box.run("flock 7")
    assert box.known() != before


@runc
def test_a_background_job_shows_when_it_starts_works_or_ends(box: Watched) -> None:
    found = [box.known()]
    for command in (
        "python3 waits.py & sleep 0.3",
        "kill -USR1 $!; sleep 0.1",  # it wakes for some microseconds
        "kill -STOP $!; sleep 0.1",
        "kill -USR1 $!; sleep 0.1",  # pending
        "renice -n 5 $! >/dev/null",
        "kill -9 $!; wait",
    ):
        box.run(f"{command}\ntrue")
        found.append(box.known())
    assert len(set(found)) == len(found)


@runc
def test_a_connection_that_a_sleeping_server_has_not_taken_shows(box: Watched) -> None:
    server = "import socket, time\ns = socket.create_server(('127.0.0.1', 8080))\ntime.sleep(100)"
    listening = "grep -q ':1F90 .* 0A ' /proc/net/tcp"
    box.run(f'python3 -c "{server}" & until {listening}; do sleep 0.05; done; sleep 0.1')
    before = box.known()
    assert box.known() == before
    box.run("exec 3<>/dev/tcp/127.0.0.1/8080; exec 3<&-")
    assert box.known() != before


@runc
def test_a_shell_that_was_replaced_shows(box: Watched) -> None:
    before = box.known()
    box.run("exit 0")
    assert box.known() != before
    box.run("set -- first")


@runc
@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python3 -c 'while 1: pass' & sleep 0.2", "is running"),
        ("mkfifo pipe; exec 5<>pipe", "cannot be told"),
        ("exec 5<>gone; rm gone", "unlinked"),
        ("mkfifo pipe; sleep 100 <>pipe & sleep 0.2", "named pipe"),
        ("head -c 5000000 /dev/zero > /dev/shm/big", "in memory"),
    ],
)
def test_what_cannot_be_told_is_doubt(box: Watched, command: str, why: str) -> None:
    box.run(command)
    with pytest.raises(InDoubt, match=why):
        box.facts()
    assert box.fingerprint() is None
    box.run("exec 5<&-; kill -9 $(jobs -p); wait; rm -f pipe /dev/shm/big")
    box.known()


@runc
def test_any_process_is_doubt_where_the_shell_must_be_alone(box: Watched) -> None:
    assert box.fingerprint(alone=True) == box.known()
    box.run("sleep 100 &")
    assert box.fingerprint(alone=True) is None


@runc
def test_sysv_ipc_is_doubt(sandboxes: Sandboxes) -> None:
    box = Watched(sandboxes.create())
    box.run(SETUP)
    box.known()
    box.run("python3 sysv.py")
    with pytest.raises(InDoubt, match="SysV"):
        box.facts()


@runc
def test_a_sandbox_that_is_gone_or_has_not_run_yet_is_doubt(sandboxes: Sandboxes) -> None:
    box = Watched(sandboxes.create())
    assert box.fingerprint() is None
    pids, init_pid = box._pids()
    box.run("true")
    home = box.sandbox.home
    box.sandbox.kill()
    state = (home / "ch/state").read_bytes()
    assert fingerprint(init_pid=init_pid, pids=pids, upper=home / "layer/upper", shell_state=state) is None


@runc
def test_a_new_shell_starts_without_what_only_the_host_compares(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.run("v=kept; g() { echo g; }; trap 'echo trapped' EXIT USR2; set -- a b; cd /tmp; pushd -n /etc")
    sandbox.run("kill -9 $$")
    answer = sandbox.run('echo "$v $(g) $PWD $#"; trap -p USR2')
    assert (answer.output, answer.exit_code) == ("kept g /tmp 0\n", 0)


@runc
def test_a_file_changed_again_in_the_same_tick_shows(box: Watched) -> None:
    upper = box.sandbox.home / "layer/upper/srv/repo"
    for _ in range(20):
        (upper / "racy").write_text("a")
        before = box.known()
        (upper / "racy").write_text("b")
        assert box.known() != before


@runc
def test_a_checkpoint_leaves_a_lone_shell_equal(sandboxes: Sandboxes) -> None:
    box = Watched(sandboxes.create())
    box.run(SETUP)
    box.run("exec 5<file; read -r line <&5; trap 'echo bye' USR2")
    box.sandbox.run("echo ok")
    before = box.facts()
    sandboxes.save(box.sandbox)
    assert box.known() == baseline(before, box.facts())
    reborn = Watched(sandboxes.reborn(box.sandbox))
    restored = reborn.fingerprint(alone=True)
    assert restored is not None
    reborn.run("ls; cat file")
    assert reborn.known() == restored
    reborn.run("touch new")
    assert reborn.known() != restored


@runc
def test_a_job_that_sleeps_through_a_checkpoint_keeps_its_baseline(sandboxes: Sandboxes) -> None:
    box = Watched(sandboxes.create())
    box.run(SETUP)
    box.run("python3 waits.py & sleep 0.5\necho ok")
    before = box.facts()
    sandboxes.save(box.sandbox)
    time.sleep(0.1)
    found = baseline(before, box.facts())
    assert found is not None
    box.run("ls; echo ok")
    assert box.known() == found
    box.run("kill -USR1 $!; sleep 0.1; echo ok")
    assert box.known() != found


@runc
def test_a_job_that_goes_on_after_the_dump_leaves_no_baseline(sandboxes: Sandboxes) -> None:
    box = Watched(sandboxes.create())
    box.run(SETUP)
    box.run("{ sleep 1; : > late; exec sleep 100; } & sleep 0.2; echo ok")
    before = box.facts()
    sandboxes.save(box.sandbox)
    time.sleep(1)
    assert baseline(before, box.facts()) is None


@runc
def test_it_takes_milliseconds_and_gives_up_on_large_layers(sandboxes: Sandboxes) -> None:
    box = Watched(sandboxes.create())
    box.run("true")
    time.sleep(0.05)
    empty_ms = min(_timed_ms(box) for _ in range(10))
    box.run("mkdir -p /many && cd /many && mkdir d{0..9} && touch d{0..9}/{1..490}; true")
    time.sleep(0.05)
    full_ms = min(_timed_ms(box) for _ in range(10))
    box.run("touch d{0..9}/{500..520}")
    with pytest.raises(InDoubt, match="files"):
        box.facts()
    assert box.fingerprint() is None
    print(f"fingerprint: {empty_ms:.1f} ms on an empty layer, {full_ms:.1f} ms on 4,911 entries")  # noqa: T201
    assert empty_ms < 50
    assert full_ms < 500


def _timed_ms(box: Watched) -> float:
    started = time.perf_counter()
    box.known()
    return (time.perf_counter() - started) * 1000


# -- pure


def test_only_the_run_number_is_taken_out_of_the_state() -> None:
    state = (
        b'declare -- A="x"\ndeclare -- __belayer_code="0"\ndeclare -- __belayer_n="%d"\ndeclare -x _="y"\n'
    )
    assert normal_state(state % 1) == normal_state(state % 22)
    assert normal_state(state % 1) != normal_state((state % 1).replace(b'code="0"', b'code="1"'))
    assert normal_state(state % 1) != normal_state((state % 1).replace(b'"x"', b'"z"'))


@pytest.mark.parametrize("state", [b"", b"HOME='/root'\n", b"__belayer_n='5'\n"])
def test_the_state_of_another_shell_is_doubt(state: bytes) -> None:
    with pytest.raises(InDoubt):
        normal_state(state)


def test_a_digest_tells_where_one_fact_ends_and_the_next_begins() -> None:
    def facts(*, files: tuple[bytes, ...] = (), processes: tuple[bytes, ...] = ()) -> SandboxFacts:
        return SandboxFacts(
            shell_state=b"", files=files, processes=processes, activity=(), sockets=(), newest_ns=0
        )

    assert digest(facts(files=(b"ab",))) != digest(facts(files=(b"a", b"b")))
    assert digest(facts(files=(b"a",))) != digest(facts(processes=(b"a",)))


def test_nobody_at_home_is_doubt(tmp_path: Path) -> None:
    state = b'declare -- A="x"\n'
    assert fingerprint(init_pid=1 << 30, pids=[1 << 30], upper=tmp_path, shell_state=state) is None
