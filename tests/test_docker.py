"""The Docker runtime against a real Engine: what is Docker's own. (The contract is in the shared tests.)"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest

from belayer_env.errors import (
    CheckpointRefused,
    EngineUnavailable,
    Fault,
    ImageNotFound,
    IncompatibleCheckpoint,
    RestoreFailed,
    RuntimeUnavailable,
    SandboxFrozen,
    SandboxGone,
    SandboxOOM,
)
from belayer_env.host.criu_find import find_criu
from belayer_env.host.probe import runtime_tier
from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.docker import DockerRuntime
from belayer_env.sandbox.docker_checkpoint import engine_externals, runc_restores
from belayer_env.sandbox.docker_engine import Engine
from belayer_env.sandbox.layers import LayerStore
from belayer_env.spec import MIB, Tier
from tests.sandboxes import Sandboxes

pytestmark = pytest.mark.docker

NO_ENGINE = "no Docker Engine: belayer setup --docker"


@pytest.fixture(scope="session")
def runtime(store_dir: Path, layers: LayerStore) -> DockerRuntime:
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    tier, reason = runtime_tier("docker")
    if tier is None:
        pytest.skip(f"{NO_ENGINE} ({reason})")
    return DockerRuntime(layers, store_dir / "images", tier=tier, tier_reason=reason)


@pytest.fixture(autouse=True)
def no_container_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if "runtime" not in request.fixturenames:
        yield
        return
    engine: Engine = request.getfixturevalue("runtime").engine
    directory: Path = request.getfixturevalue("store_dir")
    before = set(containers_below(engine, directory))
    yield
    assert set(containers_below(engine, directory)) <= before


@pytest.fixture
def full(runtime: DockerRuntime, sandboxes: Sandboxes) -> Sandboxes:
    if runtime.tier is not Tier.FULL:
        pytest.skip(f"the Engine gives only files here: {runtime.tier_reason}")
    return sandboxes


def containers_below(engine: Engine, directory: Path) -> list[str]:
    """Homes of the containers of this session: others may be using the same Engine."""
    with engine.client("listing") as client:
        found = client.containers.list(all=True, filters={"label": "belayer.home"}, ignore_removed=True)
        homes = [str(container.labels["belayer.home"]) for container in found]
    return [home for home in homes if home.startswith(f"{directory}/")]


def docker_cli(runtime: DockerRuntime, sandbox: Sandbox, verb: str) -> None:
    """What somebody at a terminal would do to the container."""
    with runtime.engine.client(verb) as client:
        container = client.containers.get(f"belayer-{sandbox.id}")
        {
            "kill": container.kill,
            "rm -f": lambda: container.remove(force=True),
            "pause": container.pause,
            "unpause": container.unpause,
        }[verb]()


def init_of(runtime: DockerRuntime, sandbox: Sandbox) -> int:
    return int(runtime.engine.inspect(f"belayer-{sandbox.id}")["State"]["Pid"])


def start_python(sandbox: Sandbox, script: str) -> None:
    """In the background; returns once it has printed its first line."""
    sandbox.run(f"cat >/tmp/p.py <<'END'\n{script}\nEND")
    sandbox.run("python3 /tmp/p.py >/tmp/p.log 2>&1 &")
    assert sandbox.run(
        "for i in $(seq 100); do [ -s /tmp/p.log ] && break; sleep .05; done; cat /tmp/p.log"
    ).output


FORK_ALL_IT_CAN = """
import os, signal, time
children = []
try:
    while len(children) < 200:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        children.append(pid)
except BlockingIOError:
    pass
for pid in children:
    os.kill(pid, signal.SIGKILL)
print(len(children))
"""


class TestFaults:
    @pytest.mark.parametrize("verb", ["kill", "rm -f"])
    def test_death_between_steps_is_told_before_anything_runs(
        self, runtime: DockerRuntime, sandboxes: Sandboxes, tmp_path: Path, verb: str
    ) -> None:
        sandbox = sandboxes.create()
        docker_cli(runtime, sandbox, verb)
        with pytest.raises(SandboxGone) as caught:
            sandbox.run("echo never")
        assert not caught.value.begun
        assert not isinstance(caught.value, SandboxOOM)
        assert not sandbox.is_alive()
        with pytest.raises(SandboxGone):
            sandbox.save(tmp_path / "nothing")

    @pytest.mark.parametrize("verb", ["kill", "rm -f"])
    def test_death_in_mid_command_is_noticed_at_once(
        self, runtime: DockerRuntime, sandboxes: Sandboxes, verb: str
    ) -> None:
        sandbox = sandboxes.create()
        threading.Timer(0.3, docker_cli, (runtime, sandbox, verb)).start()
        started = time.monotonic()
        with pytest.raises(SandboxGone) as caught:
            sandbox.run("sleep 20")
        assert caught.value.begun
        assert time.monotonic() - started < 10
        sandbox.destroy()

    def test_pause_by_somebody_is_told_and_passes(
        self, runtime: DockerRuntime, sandboxes: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = sandboxes.create()
        docker_cli(runtime, sandbox, "pause")
        with pytest.raises(SandboxFrozen):
            sandbox.run("echo hi")
        with pytest.raises(SandboxFrozen):
            sandbox.save(tmp_path / "nothing")
        assert sandbox.is_alive()
        docker_cli(runtime, sandbox, "unpause")
        sandbox.destroy()

    def test_paused_sandbox_can_be_destroyed(self, runtime: DockerRuntime, sandboxes: Sandboxes) -> None:
        sandbox = sandboxes.create()
        docker_cli(runtime, sandbox, "pause")
        started = time.monotonic()
        sandbox.destroy()
        assert time.monotonic() - started < 5

    def test_oom_kill_of_init_is_told_from_other_deaths(
        self, runtime: DockerRuntime, sandboxes: Sandboxes
    ) -> None:
        sandbox = sandboxes.create(memory_bytes=96 * MIB)
        Path(f"/proc/{init_of(runtime, sandbox)}/oom_score_adj").write_text("1000")
        # Two halves: neither of them outweighs init, whose handicap is as large as the limit.
        hog = "python3 -c 'import time; b = bytearray(60_000_000); time.sleep(5)'"
        with pytest.raises(SandboxOOM):
            sandbox.run(f"{hog} & {hog}; sleep 5")

    def test_oom_kill_of_a_command_is_its_exit_code(self, sandboxes: Sandboxes) -> None:
        sandbox = sandboxes.create(memory_bytes=96 * MIB)
        assert sandbox.run("python3 -c 'bytearray(400_000_000)'; echo rc=$?").output.endswith("rc=137\n")
        sandbox.kill()
        with pytest.raises(SandboxGone) as caught:
            sandbox.run("true")
        assert not isinstance(caught.value, SandboxOOM)

    def test_destroy_is_idempotent_and_survives_what_others_removed(
        self, runtime: DockerRuntime, sandboxes: Sandboxes
    ) -> None:
        sandbox = sandboxes.create()
        docker_cli(runtime, sandbox, "rm -f")
        sandbox.destroy()
        sandbox.destroy()
        with pytest.raises(SandboxGone):
            sandbox.run("true")


class TestFull:
    def test_processes_files_and_memory_come_back(self, full: Sandboxes) -> None:
        sandbox = full.create()
        sandbox.run("X=41; f() { echo $((X+1)); }; cd /srv; sleep 500 & mkdir -p /run/a; echo r >/run/a/r")
        sandbox.run("echo k >/dev/shm/k; chmod 640 /dev/shm/k; rm -rf /usr/share/zoneinfo /etc/motd")
        sandbox.run(
            "echo 10.1.1.1 other >>/etc/hosts; cd / && (python3 -m http.server 8000 >/dev/null 2>&1 &)"
        )
        sandbox.run("cd /srv; exec 5>/tmp/gone; echo held >&5; rm /tmp/gone; mknod /root/pipe p")
        again = full.reborn(sandbox)
        assert again.run("f; pwd; jobs | wc -l; cat /run/a/r /dev/shm/k; stat -c %a /dev/shm/k").output == (
            "42\n/srv\n1\nr\nk\n640\n"
        )
        assert (
            again.run("ls /usr/share/zoneinfo /etc/motd 2>/dev/null; grep -c other /etc/hosts").output
            == "1\n"
        )
        get = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').status)"
        assert again.run(f'python3 -c "{get}"; cat /proc/$$/fd/5').output == "200\nheld\n"

    def test_shared_memory_goes_on(self, full: Sandboxes) -> None:
        sandbox = full.create()
        start_python(
            sandbox,
            "from multiprocessing import shared_memory as m, resource_tracker\nimport time\n"
            "s = m.SharedMemory('z', True, 4096)\ns.buf[0] = 9\nprint('up', flush=True)\n"
            "while True:\n    s.buf[1] = (s.buf[1] + 1) % 250\n    time.sleep(.02)",
        )
        again = full.reborn(sandbox)
        first, second = (again.run("sleep .1; od -An -tu1 -N2 /dev/shm/z").output.split() for _ in range(2))
        assert first[0] == second[0] == "9"
        assert first[1] != second[1]

    def test_limits_hold_after_a_restore(self, full: Sandboxes) -> None:
        again = full.reborn(full.create(memory_bytes=256 * MIB, pids=64, cpus=0.5))
        count = again.run(f"python3 -c '{FORK_ALL_IT_CAN}'")
        assert 0 < int(count.output) < 64
        assert "rc=137" in again.run("python3 -c 'bytearray(400_000_000)'; echo rc=$?").output
        status = again.run("grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/self/status").output.split()
        assert int(status[1], 16) & 1 << 21 == 0  # CAP_SYS_ADMIN
        assert status[3::2] == ["1", "2"]

    def test_chain_of_checkpoints_keeps_every_link(self, full: Sandboxes) -> None:
        sandbox = full.create()
        links = []
        for i in range(3):
            sandbox.run(f"N=$((N+1)); touch /root/f{i}; rm -f /root/f{i - 1}")
            links.append(full.save(sandbox))
            sandbox.destroy()
            sandbox = full.restore(links[-1])
        assert sandbox.run("echo $N; ls /root").output == "3\nf2\n"
        sandbox.destroy()
        assert full.restore(links[1]).run("echo $N; ls /root").output == "2\nf1\n"

    def test_checkpoint_restores_several_times_while_the_original_lives(self, full: Sandboxes) -> None:
        sandbox = full.create()
        sandbox.run("V=1; echo s >/dev/shm/k")
        checkpoint = full.save(sandbox)
        one, two = full.restore(checkpoint), full.restore(checkpoint)
        one.run("V=2; echo one >/dev/shm/k; echo one >/root/k")
        assert two.run("echo $V; cat /dev/shm/k /root/k 2>/dev/null").output == "1\ns\n"
        assert sandbox.run("echo $V; cat /dev/shm/k").output == "1\ns\n"

    def test_file_kept_by_a_removed_link_comes_back(self, full: Sandboxes) -> None:
        sandbox = full.create()
        start_python(
            sandbox,
            "import os, time\nf = open('/root/a', 'w+')\nf.write('kept')\nf.flush()\n"
            "os.link('/root/a', '/root/b')\n"
            "os.unlink('/root/a')\nprint('up', flush=True)\n"
            "while True:\n    f.seek(0)\n    open('/root/seen', 'w').write(f.read())\n    time.sleep(.05)",
        )
        again = full.reborn(sandbox)
        assert again.run("rm -f /root/seen; sleep .4; cat /root/seen; ls /root").output == "keptb\nseen\n"

    def test_inotify_is_refused_by_name_and_the_sandbox_goes_on(
        self, full: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = full.create()
        start_python(
            sandbox,
            "import ctypes, time\nc = ctypes.CDLL(None)\nn = c.inotify_init1(0)\n"
            "c.inotify_add_watch(n, b'/root', 0xfff)\nprint('up', flush=True)\ntime.sleep(900)",
        )
        assert refusal(sandbox, tmp_path).cause == "inotify"
        sandbox.run("pkill -f p.py; sleep .1")
        full.save(sandbox)

    def test_tcp_connection_is_refused_unless_the_engine_restores_it(
        self, full: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = full.create()
        start_python(
            sandbox,
            "import socket, time\ns = socket.create_server(('127.0.0.1', 7000))\n"
            "c = socket.create_connection(('127.0.0.1', 7000))\na, _ = s.accept()\nprint('up', flush=True)\n"
            "while True:\n    c.send(b'x')\n    open('/root/n', 'wb').write(a.recv(1))\n    time.sleep(.05)",
        )
        if "tcp-established" in runc_restores():
            assert full.reborn(sandbox).run("rm -f /root/n; sleep .4; cat /root/n").output == "x"
        else:
            refused = refusal(sandbox, tmp_path)
            assert refused.cause == "tcp-connection"
            assert "/etc/criu/runc.conf" in str(refused)

    def test_file_lock_is_refused_unless_the_engine_restores_it(
        self, full: Sandboxes, tmp_path: Path
    ) -> None:
        sandbox = full.create()
        start_python(
            sandbox,
            "import fcntl, time\nf = open('/root/lock', 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
            "print('up', flush=True)\ntime.sleep(900)",
        )
        if "file-locks" in runc_restores():
            again = full.reborn(sandbox)
            assert again.run("flock -n /root/lock echo free || echo held").output == "held\n"
        else:
            refused = refusal(sandbox, tmp_path)
            assert refused.cause == "file-lock"
            assert "/etc/criu/runc.conf" in str(refused)

    def test_process_of_another_user_comes_back_or_is_refused_by_name(self, full: Sandboxes) -> None:
        sandbox = full.create()
        start_python(sandbox, "import os, time\nos.setuid(1000)\nprint('up', flush=True)\ntime.sleep(900)")
        try:
            again = full.reborn(sandbox)
        except CheckpointRefused as refused:
            assert refused.cause == "foreign-user"  # noqa: PT017
            assert sandbox.run("echo on").output == "on\n"
        else:
            assert "1000" in again.run("stat -c %u /proc/[0-9]*").output

    def test_damaged_images_tell_what_criu_said(self, full: Sandboxes) -> None:
        checkpoint = full.save(full.create())
        core = checkpoint.directory / "images/core-1.img"
        core.write_bytes(core.read_bytes()[:-40])
        with pytest.raises(RestoreFailed) as caught:
            full.restore(checkpoint)
        assert "Engine" not in str(caught.value), "the words are CRIU's"

    def test_many_threads_share_one_runtime(self, full: Sandboxes) -> None:
        def life(n: int) -> str:
            sandbox = full.create()
            sandbox.run(f"N={n}")
            return full.reborn(sandbox).run("echo $N").output

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(life, range(4))) == [f"{n}\n" for n in range(4)]


def refusal(sandbox: Sandbox, into_dir: Path) -> CheckpointRefused:
    """What a checkpoint is refused with, quickly, the sandbox answering afterwards and nothing written."""
    into = into_dir / "refused"
    started = time.monotonic()
    with pytest.raises(CheckpointRefused) as caught:
        sandbox.save(into)
    assert time.monotonic() - started < 5
    assert not into.exists()
    assert sandbox.run("echo ok").output == "ok\n"
    return caught.value


class TestFiles:
    def test_files_and_shell_state_come_back_without_processes(
        self, runtime: DockerRuntime, layers: LayerStore, store_dir: Path, image: str, no_container_left: None
    ) -> None:
        files = DockerRuntime(layers, store_dir / "images", tier=Tier.FILES, tier_reason="for this test")
        with contextlib.closing(Sandboxes(files, layers, store_dir, image)) as sandboxes:
            sandbox = sandboxes.create()
            sandbox.run(
                "cd /srv; V=3; g() { echo g$V; }; echo data >f; rm /etc/motd; sleep 100 & echo s >/dev/shm/s"
            )
            checkpoint = sandboxes.save(sandbox)
            assert checkpoint.saved.tier is Tier.FILES
            assert not (checkpoint.directory / "images").exists()
            sandbox.kill()
            again = sandboxes.restore(checkpoint)
            assert (
                again.run("pwd; g; cat f; ls /etc/motd /dev/shm/s 2>/dev/null; jobs").output
                == "/srv\ng3\ndata\n"
            )
            assert len(again.processes()) == 2


def import_image(runtime: DockerRuntime, rootfs: str, name: str, *changes: str) -> None:
    packed = subprocess.run(
        ["tar", "-C", rootfs.removeprefix("rootfs:"), "-c", "."], capture_output=True, timeout=60, check=True
    )
    repository, _, tag = name.partition(":")
    with runtime.engine.client("importing") as client:
        client.api.import_image_from_data(packed.stdout, repository, tag, changes=list(changes))


def remove_images(runtime: DockerRuntime, *names: str) -> None:
    with runtime.engine.client("removing") as client:
        for name in names:
            client.images.remove(name, force=True)


class TestImages:
    def test_image_configuration_cannot_break_a_sandbox(
        self, runtime: DockerRuntime, sandboxes: Sandboxes, busybox_image: str
    ) -> None:
        name = "belayer/test-config:1"
        changes = ["VOLUME /data", "USER nobody", "ENV A=b", 'ENTRYPOINT ["/bin/false"]', "WORKDIR /nowhere"]
        import_image(runtime, busybox_image, name, *changes)
        try:
            sandbox = sandboxes.create(image=name)
            sandbox.run("mkdir -p /data; echo kept >/data/f")
            assert sandbox.run("id -u; echo $A; pwd").output == "0\nb\n/root\n"
            if runtime.tier is Tier.FULL:
                assert sandboxes.reborn(sandbox).run("cat /data/f").output == "kept\n"
        finally:
            sandboxes.close()
            remove_images(runtime, name)

    def test_checkpoint_of_a_name_that_moved_on_is_restored_on_what_it_was_made_of(
        self, runtime: DockerRuntime, sandboxes: Sandboxes, busybox_image: str
    ) -> None:
        name = "belayer/test-moves:1"
        import_image(runtime, busybox_image, name, "ENV WHICH=old")
        try:
            sandbox = sandboxes.create(image=name)
            checkpoint = sandboxes.save(sandbox)
            sandbox.destroy()
            import_image(runtime, busybox_image, name, "ENV WHICH=new")
            assert sandboxes.create(image=name).run("echo $WHICH").output == "new\n"
            assert sandboxes.restore(checkpoint).run("echo $WHICH").output == "old\n"
        finally:
            sandboxes.close()
            remove_images(runtime, name, str(checkpoint.saved.meta["engine_image"]))
        import_image(runtime, busybox_image, name, "ENV WHICH=new")
        try:
            with pytest.raises(IncompatibleCheckpoint, match="has changed"):
                runtime.restore(
                    checkpoint.spec, checkpoint.directory, checkpoint.saved.meta, sandboxes.new_home()
                )
        finally:
            remove_images(runtime, name)
            sandboxes.homes_left()[0].rmdir()

    def test_unknown_name_says_what_to_do(self, sandboxes: Sandboxes) -> None:
        with pytest.raises(ImageNotFound, match="docker pull"):
            sandboxes.create(image="belayer.invalid/no-such:image")
        sandboxes.homes_left()[0].rmdir()

    def test_disk_limit_that_the_engine_cannot_keep_is_refused(self, sandboxes: Sandboxes) -> None:
        try:
            sandboxes.create(disk_bytes=200 * MIB)
        except RuntimeUnavailable as error:
            assert "disk_bytes" in str(error)  # noqa: PT017


class TestSweep:
    @pytest.mark.parametrize("moment", ["running", "half-made", "mid-checkpoint"])
    def test_what_a_killed_client_left_is_found_from_its_home(
        self, runtime: DockerRuntime, sandboxes: Sandboxes, image: str, moment: str
    ) -> None:
        home = sandboxes.new_home()
        # "half-made": killed as soon as the Engine has the container, before the client has heard of it.
        script = f"""
import os, signal
from pathlib import Path
from belayer_env.sandbox import docker
from belayer_env.sandbox.layers import open_layers
from belayer_env.spec import SandboxSpec, Tier
store = Path({str(home.parent)!r})
runtime = docker.DockerRuntime(open_layers(store), store / "images", tier=Tier.FILES)
if {moment!r} == "half-made":
    runtime.engine.inspect = lambda container: os.kill(os.getpid(), signal.SIGKILL)
sandbox = runtime.create(SandboxSpec(image={image!r}), Path({str(home)!r}))
sandbox.run("sleep 100 &")
if {moment!r} == "mid-checkpoint":
    docker.copy_tree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    sandbox.save(store / "saved-never")
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        assert len(runtime.engine.find(belayer_home=str(home))) == 1
        started = time.monotonic()
        runtime.sweep(home)
        assert time.monotonic() - started < 5
        assert not home.exists()
        assert not runtime.engine.find(belayer_home=str(home))
        runtime.sweep(home)


class TestEngine:
    def test_no_engine_names_the_remedy(
        self, layers: LayerStore, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{store_dir}/no.sock")
        with pytest.raises(RuntimeUnavailable, match="belayer setup --docker"):
            DockerRuntime(layers, store_dir / "images", tier=Tier.FULL)

    @pytest.mark.slow
    def test_restart_of_the_engine_is_a_death_and_the_next_restore_waits_for_it(
        self, layers: LayerStore, store_dir: Path, busybox_image: str, tmp_path: Path
    ) -> None:
        if not runtime_tier("docker")[0]:
            pytest.skip(NO_ENGINE)
        with PrivateEngine(tmp_path) as engine:
            client = docker.DockerClient(engine.host, timeout=60)
            tier = Tier.FULL if find_criu() else Tier.FILES
            runtime = DockerRuntime(layers, store_dir / "images", tier=tier, client=client)
            with (
                contextlib.closing(client),
                contextlib.closing(Sandboxes(runtime, layers, store_dir, busybox_image)) as sandboxes,
            ):
                sandbox = sandboxes.create()
                sandbox.run("V=7")
                checkpoint = sandboxes.save(sandbox)
                engine.stop()
                with pytest.raises(SandboxGone):
                    sandbox.run("echo hi")
                threading.Timer(1.0, engine.start).start()
                again = sandboxes.restore(checkpoint)
                assert again.run("echo $V").output == "7\n"
                again.destroy()
                sandbox.destroy()
                assert containers_below(runtime.engine, store_dir) == []

    @pytest.mark.slow
    def test_an_engine_that_stays_away_is_a_fault_and_the_home_waits_for_a_sweep(
        self,
        layers: LayerStore,
        store_dir: Path,
        busybox_image: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if not runtime_tier("docker")[0]:
            pytest.skip(NO_ENGINE)
        monkeypatch.setattr("belayer_env.sandbox.docker_engine.COMES_BACK_S", 1.0)
        with PrivateEngine(tmp_path) as engine:
            client = docker.DockerClient(engine.host, timeout=60)
            runtime = DockerRuntime(layers, store_dir / "images", tier=Tier.FILES, client=client)
            with contextlib.closing(client):
                sandboxes = Sandboxes(runtime, layers, store_dir, busybox_image)
                sandbox = sandboxes.create()
                home = store_dir / sandbox.id
                engine.stop()
                with pytest.raises(EngineUnavailable):
                    runtime.create(sandbox.spec, sandboxes.new_home())
                sandbox.destroy()
                assert home.exists()
                with pytest.raises(Fault):
                    runtime.sweep(home)
                engine.start()
                for left in sandboxes.homes_left():
                    runtime.sweep(left)
                assert containers_below(runtime.engine, store_dir) == []
                assert not sandboxes.homes_left()


class PrivateEngine:
    """A dockerd of our own below a directory, so that the shared one is never touched."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.host = f"unix://{directory}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivateEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        criu = find_criu()
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        where = {"data-root": "data", "exec-root": "exec", "pidfile": "d.pid"}
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["dockerd", "--experimental", "--bridge=none", "--iptables=false", f"--host={self.host}",
                 *(f"--{option}={self._directory / name}" for option, name in where.items())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PATH": f"{criu.path.parent}:{path}" if criu else path},
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            # The SDK leaks the socket of a connection that is refused: knock first.
            with contextlib.suppress(OSError), contextlib.closing(socket.socket(socket.AF_UNIX)) as knock:
                knock.connect(self.host.removeprefix("unix://"))
                with contextlib.closing(docker.DockerClient(self.host, timeout=30)) as client:
                    client.ping()
                return
            time.sleep(0.1)
        pytest.fail(f"dockerd does not come up: {(self._directory / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            finally:
                self._process.kill()
                self._process.wait()
                self._process = None


def test_the_engine_is_left_no_connection_however_many_containers_are_asked_after(
    runtime: DockerRuntime,
) -> None:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for number in range(30):
        with pytest.raises(SandboxGone):
            runtime.engine.inspect(f"belayer-none-{number}")
    assert len(list(descriptors.iterdir())) <= before


def test_externals_name_every_mount_from_outside_as_runc_does() -> None:
    config = {
        "mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/belayer", "type": "bind"},
            {"destination": "/sys/fs/cgroup", "type": "cgroup"},
        ],
        "linux": {"maskedPaths": ["/proc/keys", "/proc/acpi"]},
    }
    mountinfo = (
        "83 82 0:51 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "84 83 0:29 /docker/x /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
    )
    assert engine_externals(config, mountinfo, is_file=lambda path: path == "/proc/keys") == (
        "mnt[/belayer]:/belayer",
        "mnt[/sys/fs/cgroup/cpu]:/sys/fs/cgroup/cpu",
        "mnt[/proc/keys]:/dev/null",
    )


@pytest.mark.parametrize(
    ("text", "restored"),
    [
        ("tcp-established\nfile-locks\n", ("tcp-established", "file-locks")),
        ("# tcp-established is off\nlink-remap\n", ()),
        (None, ()),
    ],
)
def test_runc_restores_only_what_the_host_says(
    tmp_path: Path, text: str | None, restored: tuple[str, ...]
) -> None:
    options = tmp_path / "runc.conf"
    if text is not None:
        options.write_text(text)
    assert runc_restores(options) == restored
