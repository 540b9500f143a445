"""The owner as a real process: what it holds outlives who filled it, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from belayer_rollout.errors import Misuse, OwnerDamaged, OwnerGone, UpdateFailed
from belayer_rollout.memory.client import Draft, OwnerClient
from belayer_rollout.memory.launch import OwnerProcess
from belayer_rollout.memory.layout import Layout, TensorSpec, plan_layout
from belayer_rollout.memory.memfd import HostMapper, bytes_at
from belayer_rollout.memory.orphans import USER

LAYOUT = plan_layout([TensorSpec("w", (700, 1000), "float32"), TensorSpec("b", (3,), "int8", "buffer")])
MAPPER = HostMapper()
SLEEP = shutil.which("sleep")


@pytest.fixture
def owner() -> Iterator[OwnerProcess]:
    process = OwnerProcess()
    try:
        yield process
    finally:
        process.close()
        assert not process.directory.exists()
        assert not Path(f"/proc/{process.pid}").exists()


def contents(seed: int) -> bytes:
    return random.Random(seed).randbytes(LAYOUT.num_bytes)


def write(draft: Draft, data: bytes) -> None:
    address = MAPPER.map(draft.handle, draft.num_bytes, "write")
    bytes_at(address, draft.num_bytes)[:] = list(data)
    MAPPER.unmap(address, draft.num_bytes)


def publish(client: OwnerClient, version: int, data: bytes, root: str | None = None) -> str:
    draft = client.begin(LAYOUT.num_bytes)
    try:
        write(draft, data)
        return client.commit(draft, version, LAYOUT, root)
    finally:
        os.close(draft.handle)


def in_force(client: OwnerClient) -> tuple[int, bytes, Layout]:
    attached = client.attach()
    try:
        return attached.version, os.pread(attached.handle, attached.num_bytes, 0), attached.layout
    finally:
        os.close(attached.handle)


def wait_ended(pid: int, timeout_s: float = 20.0) -> bool:
    """Whether the process (not necessarily a child) ends."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def test_what_is_published_is_what_everyone_attaches(owner: OwnerProcess) -> None:
    data = contents(1)
    root = publish(owner.client, 7, data)
    with OwnerClient(owner.path) as other:
        assert in_force(other) == (7, data, LAYOUT)
        assert other.verify() == other.verify(sample=10**6)
        assert other.health().version == 7
    assert len(root) == 64


def test_nothing_is_there_before_the_first_publication(owner: OwnerProcess) -> None:
    assert owner.client.health().version is None
    with pytest.raises(OwnerDamaged, match="nothing was published"):
        owner.client.attach()
    with pytest.raises(OwnerDamaged, match="nothing was published"):
        owner.client.verify()


def test_weights_in_force_cannot_be_written_by_anyone(owner: OwnerProcess) -> None:
    draft = owner.client.begin(LAYOUT.num_bytes)
    write(draft, contents(1))
    owner.client.commit(draft, 1, LAYOUT)
    with pytest.raises(PermissionError):
        MAPPER.map(draft.handle, draft.num_bytes, "write")
    with pytest.raises(PermissionError):
        os.pwrite(draft.handle, b"x", 0)
    os.close(draft.handle)
    attached = owner.client.attach()
    with pytest.raises(PermissionError):
        MAPPER.map(attached.handle, attached.num_bytes, "write")
    os.close(attached.handle)


def test_a_draft_still_mapped_for_writing_is_not_committed(owner: OwnerProcess) -> None:
    publish(owner.client, 1, contents(1))
    draft = owner.client.begin(LAYOUT.num_bytes)
    address = MAPPER.map(draft.handle, draft.num_bytes, "write")
    with pytest.raises(OwnerDamaged, match="still maps"):
        owner.client.commit(draft, 2, LAYOUT)
    assert owner.client.health().version == 1
    MAPPER.unmap(address, draft.num_bytes)
    owner.client.commit(draft, 2, LAYOUT)
    os.close(draft.handle)
    assert owner.client.health().version == 2


def test_a_draft_that_is_not_what_its_filler_wrote_is_refused(owner: OwnerProcess) -> None:
    publish(owner.client, 1, contents(1))
    with pytest.raises(OwnerDamaged, match="its filler wrote"):
        publish(owner.client, 2, contents(2), root="0" * 64)
    assert in_force(owner.client)[:2] == (1, contents(1))


def test_versions_only_go_forward(owner: OwnerProcess) -> None:
    publish(owner.client, 5, contents(1))
    for version in (5, 4):
        with pytest.raises(UpdateFailed):
            publish(owner.client, version, contents(2))
    assert in_force(owner.client)[:2] == (5, contents(1))


def test_a_mapping_goes_over_to_the_next_weights_at_its_address(owner: OwnerProcess) -> None:
    publish(owner.client, 1, contents(1))
    first = owner.client.attach()
    address = MAPPER.map(first.handle, first.num_bytes, "read")
    view = bytes_at(address, LAYOUT.num_bytes)
    publish(owner.client, 2, contents(2))
    # Who did not follow yet has the old ones, whole.
    assert bytes(view) == contents(1)
    second = owner.client.attach()
    assert MAPPER.map(second.handle, second.num_bytes, "read", at=address) == address
    assert bytes(view) == contents(2)
    MAPPER.unmap(address, LAYOUT.num_bytes)
    for attached in (first, second):
        os.close(attached.handle)


def test_a_client_killed_in_mid_update_leaves_the_old_weights_in_force(owner: OwnerProcess) -> None:
    publish(owner.client, 1, contents(1))
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from belayer_rollout.memory.client import OwnerClient\n"
        "from belayer_rollout.memory.memfd import HostMapper, bytes_at\n"
        "client = OwnerClient(Path(sys.argv[1])); n = int(sys.argv[2]); draft = client.begin(n)\n"
        "bytes_at(HostMapper().map(draft.handle, n, 'write'), n)[0] = 1\n"
        "print('half', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(owner.path), str(LAYOUT.num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as filler:
        assert filler.stdout is not None
        assert filler.stdout.readline() == "half\n"
        assert owner.client.health().filling
        with pytest.raises(UpdateFailed, match="another client"):
            owner.client.begin(LAYOUT.num_bytes)
        filler.kill()
    while owner.client.health().filling:
        pass  # each turn is a call to the owner, which notices within a few
    assert in_force(owner.client)[:2] == (1, contents(1))
    assert owner.client.verify() > 0
    publish(owner.client, 2, contents(2))
    assert in_force(owner.client)[:2] == (2, contents(2))


def test_32_clients_attach_at_once_while_weights_change(owner: OwnerProcess) -> None:
    publish(owner.client, 0, contents(0))
    start = threading.Barrier(33)

    def attach_often(_: int) -> set[int]:
        seen = set()
        with OwnerClient(owner.path, timeout_s=60.0) as client:
            start.wait()
            for _ in range(5):
                version, data, layout = in_force(client)
                assert data == contents(version)
                assert layout == LAYOUT
                seen.add(version)
        return seen

    with ThreadPoolExecutor(32) as pool:
        results = [pool.submit(attach_often, n) for n in range(32)]
        start.wait()
        publish(owner.client, 1, contents(1))
        assert all(result.result() <= {0, 1} for result in results)


def test_an_older_epoch_may_not_act(owner: OwnerProcess) -> None:
    first = owner.client.fence(0)
    os.close(owner.client.activate(first, 1 << 20))
    with OwnerClient(owner.path) as successor:
        second = successor.fence(first)
        handle = successor.activate(second, 1 << 20)
    with pytest.raises(OwnerDamaged, match="may not act"):
        owner.client.activate(first, 1 << 20)
    with pytest.raises(OwnerDamaged, match="may not act"):
        owner.client.fence(first)
    assert os.fstat(handle).st_size == 1 << 20
    os.close(handle)


def test_the_arena_outlives_the_worker_that_wrote_it(owner: OwnerProcess) -> None:
    handle = owner.client.activate(0, 4096)
    os.pwrite(handle, b"kv", 100)
    os.close(handle)
    handle = owner.client.activate(owner.client.fence(0), 4096)
    assert os.pread(handle, 2, 100) == b"kv"
    os.close(handle)
    with pytest.raises(OwnerDamaged, match="bytes"):
        owner.client.activate(1, 8192)


def test_a_changed_byte_of_the_weights_is_detected() -> None:
    # Without seals: with them nobody can change one.
    owner = OwnerProcess(memory="host-unsealed")
    try:
        draft = owner.client.begin(LAYOUT.num_bytes)
        write(draft, contents(1))
        owner.client.commit(draft, 1, LAYOUT)
        assert owner.client.verify(8) > 0
        os.pwrite(draft.handle, bytes([contents(1)[-1] ^ 1]), LAYOUT.num_bytes - 1)
        os.close(draft.handle)
        # The last chunk is in every sample.
        with pytest.raises(OwnerDamaged, match="not what was published"):
            owner.client.verify(2)
        with pytest.raises(OwnerDamaged, match="not what was published"):
            owner.client.verify()
    finally:
        owner.close()


def test_a_killed_owner_is_gone_for_every_call_and_leaves_nothing(owner: OwnerProcess) -> None:
    publish(owner.client, 1, contents(1))
    attached = owner.client.attach()
    os.kill(owner.pid, signal.SIGKILL)
    assert wait_ended(owner.pid)
    for call in (owner.client.health, owner.client.attach, owner.client.verify):
        with pytest.raises(OwnerGone):
            call()
    with pytest.raises(OwnerGone):
        OwnerClient(owner.path)
    assert not owner.is_alive
    # Who maps its memory keeps it.
    assert os.pread(attached.handle, 16, 0) == contents(1)[:16]
    os.close(attached.handle)


def test_a_stopped_owner_misses_the_deadline(owner: OwnerProcess) -> None:
    with OwnerClient(owner.path, timeout_s=0.2) as client:
        assert client.health().pid == owner.pid
        os.kill(owner.pid, signal.SIGSTOP)
        with pytest.raises(OwnerGone, match="in time"):
            client.health()
        os.kill(owner.pid, signal.SIGCONT)
        # Its late answer must not be taken for that of another call.
        with pytest.raises(OwnerGone):
            client.health()


def start_elsewhere(linger_s: float) -> tuple[subprocess.Popen[str], int, Path]:
    """An owner started by another process, which then waits to be killed."""
    script = (
        "import sys\n"
        "from belayer_rollout.memory.launch import OwnerProcess\n"
        f"owner = OwnerProcess(linger_s={linger_s})\n"
        "print(owner.pid, owner.path, flush=True); sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid, path = starter.stdout.readline().split()
    return starter, int(pid), Path(path)


def end(starter: subprocess.Popen[str]) -> None:
    with starter:
        starter.kill()


def test_an_owner_ends_with_its_killed_starter_and_removes_its_socket() -> None:
    starter, pid, path = start_elsewhere(0.0)
    assert path.exists()
    end(starter)
    assert wait_ended(pid)
    assert not path.parent.exists()


@pytest.mark.parametrize("is_killed", [True, False])
def test_engines_of_a_killed_user_end_and_those_of_a_living_one_do_not(is_killed: bool) -> None:
    starter, pid, _ = start_elsewhere(0.0)
    as_engine = [sys.executable, "-c", "import multiprocessing.spawn, time; time.sleep(100)"]
    # In its handshake it waits under a title, where its own end is minutes away.
    titled = ["VLLM::EngineCore", "100"]
    engines = [
        subprocess.Popen(argv, env={USER: str(user)}, executable=SLEEP if argv is titled else None)
        for argv, user in (
            (as_engine, starter.pid),
            (titled, starter.pid),
            (as_engine, os.getpid()),
            (["sleep", "100"], starter.pid),
        )
    ]
    try:
        if is_killed:
            end(starter)
        else:
            os.kill(pid, signal.SIGTERM)
        assert wait_ended(pid)
        assert engines[2].poll() is engines[3].poll() is None
        assert engines[0].poll() == engines[1].poll() == (-signal.SIGKILL if is_killed else None)
    finally:
        end(starter)
        for engine in engines:
            engine.kill()
            engine.wait()


def test_an_owner_that_may_linger_is_taken_over_by_the_next_lease() -> None:
    starter, pid, path = start_elsewhere(60.0)
    end(starter)
    with OwnerClient(path) as client:
        client.lease()
        assert client.health().pid == pid
        client.stop()
    assert wait_ended(pid)
    assert not path.parent.exists()


def test_nonsense_ends_the_connection_that_sent_it_and_no_other(owner: OwnerProcess) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(owner.path))
        sock.send(b"\xff nonsense")
        sock.settimeout(20.0)
        assert sock.recv(100) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(owner.path))
        for message in (b'{"op": "no such"}', b'{"op": "begin"}', b'{"op": "begin", "num_bytes": -1}'):
            sock.send(message)
            assert b"misuse" in sock.recv(1000)
    with pytest.raises(Misuse):
        owner.client.begin(0)
    assert owner.client.health().epoch == 0


def test_only_its_user_can_reach_the_socket(owner: OwnerProcess) -> None:
    assert owner.directory.stat().st_mode & 0o777 == 0o700


def test_closing_twice_raises_nothing(owner: OwnerProcess) -> None:
    owner.close()
    owner.close()
    with contextlib.suppress(OwnerGone):
        owner.client.health()
