"""What we change in what CRIU wrote: one bit of its inventory, and timers at rest; and that talks go on."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer_env.sandbox import criu
from belayer_env.sandbox.base import SandboxRuntime
from belayer_env.sandbox.criu_images import ImageUnknown, as_dumped_from_outside, with_timers_armed
from tests.sandboxes import Sandboxes

# Written by CRIU 4.2.1: img_version, fdinfo_per_id, root_ids (net_ns_id 3), ..., dump_uuid.
INVENTORY = bytes.fromhex(
    "163131584e000000080210011a18080110011801200128013003380340044806500758086005200128013000580262006a24"
    "38333362333962352d353661392d346265342d616639372d653739663332363136333832"
)
NET_NS_AT = 25

TALKERS = """\
import socket, sys, time
kind = sys.argv[1]
if kind == "tcp":
    server = socket.create_server(("127.0.0.1", 9000))
    one = socket.create_connection(("127.0.0.1", 9000))
    other, _ = server.accept()
elif kind == "abstract":
    server = socket.socket(socket.AF_UNIX)
    server.bind("\\0talk")
    server.listen()
    one = socket.socket(socket.AF_UNIX)
    one.connect("\\0talk")
    other, _ = server.accept()
else:
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind(("127.0.0.1", 9001))
    other.bind(("127.0.0.1", 9002))
    one.connect(("127.0.0.1", 9002))
said = 0
while True:
    said += 1
    one.send(b"%d" % said)
    heard = other.recv(100).decode()
    open(f"/tmp/{kind}.new", "w").write(heard)
    import os; os.rename(f"/tmp/{kind}.new", f"/tmp/{kind}")
    time.sleep(0.02)
"""


def message(size: int) -> bytes:
    return struct.pack("<II", 0x58313116, size)


def test_one_bit_of_the_network_namespace_changes_and_nothing_else() -> None:
    changed = as_dumped_from_outside(INVENTORY)
    differing = [at for at, (a, b) in enumerate(zip(INVENTORY, changed, strict=True)) if a != b]
    assert differing == [NET_NS_AT]
    assert (INVENTORY[NET_NS_AT], changed[NET_NS_AT]) == (3, 2)


def test_a_number_of_two_bytes_keeps_its_length() -> None:
    body = bytes([0x1A, 3, 0x30, 0x80 | 5, 1])  # root_ids { net_ns_id: 133 }
    assert as_dumped_from_outside(message(len(body)) + body)[-2:] == bytes([0x80 | 4, 1])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        bytes([0x08, 2]),  # no root_ids
        bytes([0x18, 2]),  # root_ids, and no message
        bytes([0x1A, 2, 0x08, 1]),  # root_ids without a net_ns_id
        bytes([0x1A, 4, 0x30, 1, 0x30, 2]),  # with two
        bytes([0x1A, 9, 0x30, 1]),  # cut short
        bytes([0x1A, 1, 0x30]),
        bytes([0x1B, 2, 0x30, 1]),  # a group
    ],
)
def test_what_is_laid_out_otherwise_is_refused(body: bytes) -> None:
    with pytest.raises(ImageUnknown):
        as_dumped_from_outside(message(len(body)) + body)


def test_another_header_is_refused() -> None:
    for wrong in (INVENTORY[:4], INVENTORY[1:], INVENTORY + b"\0", b"\0" + INVENTORY[1:]):
        with pytest.raises(ImageUnknown):
            as_dumped_from_outside(wrong)


def test_only_a_periodic_timer_at_rest_is_armed() -> None:
    def itimer(isec: int, iusec: int, vsec: int, vusec: int) -> bytes:
        return bytes([0x08, isec, 0x10, iusec, 0x18, vsec, 0x20, vusec])

    def framed(timers: bytes) -> bytes:
        task = bytes([0x3A, len(timers)]) + timers  # task_core_entry.timers
        core = bytes([0x08, 1, 0x1A, len(task)]) + task  # core_entry.mtype and .tc
        return struct.pack("<III", 0x54564319, 0x55053847, len(core)) + core

    off, ticking, at_rest = itimer(0, 0, 0, 0), itimer(0, 5, 0, 3), itimer(1, 0, 0, 0)
    posix = bytes([0x38, 0, 0x40, 9, 0x48, 0, 0x50, 0])
    tags = (0x0A, 0x12, 0x1A, 0x22)
    before = framed(
        b"".join(
            bytes([tag, len(t)]) + t for tag, t in zip(tags, (off, ticking, at_rest, posix), strict=True)
        )
    )
    after = with_timers_armed(before)
    assert [(i, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [
        (before.index(at_rest) + 7, 1),
        (before.index(posix) + 7, 1),
    ]
    assert with_timers_armed(after) == after
    for broken in (before[:-1], b"", before[4:], before + b"\x01"):
        with pytest.raises(ImageUnknown):
            with_timers_armed(broken)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_change_of_one_bit_or_a_refusal(body: bytes) -> None:
    data = message(len(body)) + body
    try:
        changed = as_dumped_from_outside(data)
    except ImageUnknown:
        return
    assert sum((a ^ b).bit_count() for a, b in zip(data, changed, strict=True)) == 1


@pytest.mark.parametrize("kind", ["tcp", "abstract", "udp"])
def test_a_talk_under_way_goes_on_after_a_restore(
    full_runtime: SandboxRuntime, sandboxes: Sandboxes, kind: str
) -> None:
    sandbox = sandboxes.create()
    sandbox.run(f"cat >/tmp/talk.py <<'END'\n{TALKERS}END")
    begun = f"until [ -s /tmp/{kind} ]; do sleep 0.01; done"
    sandbox.run(f"python3 /tmp/talk.py {kind} >/tmp/log 2>&1 & {begun}")
    if full_runtime.name == "docker" and kind == "tcp":
        pytest.skip("the Engine restores no TCP connection; tests/test_docker.py says so")
    restored = sandboxes.reborn(sandbox)
    heard = restored.run(
        f"was=$(cat /tmp/{kind}); sleep 0.3; is=$(cat /tmp/{kind}); cat /tmp/log; echo $was $is"
    )
    was, now = map(int, heard.output.split())
    assert now > was > 0


@pytest.mark.criu
class TestFromInside:
    def test_the_network_namespace_is_not_in_the_images(
        self, runtime: SandboxRuntime, sandboxes: Sandboxes
    ) -> None:
        if runtime.name != "runc":
            pytest.skip("the runc runtime's way")
        saved = sandboxes.save(sandboxes.create())
        images = saved.directory / "images"
        assert (images / "inventory.img").exists()
        assert not list(images.glob("netns*"))

    def test_an_inventory_that_is_not_understood_is_dumped_from_outside(
        self, runtime: SandboxRuntime, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if runtime.name != "runc":
            pytest.skip("the runc runtime's way")

        def refuse(inventory: bytes) -> bytes:
            raise ImageUnknown

        monkeypatch.setattr(criu, "as_dumped_from_outside", refuse)
        sandbox = sandboxes.create()
        sandbox.run("kept=1")
        restored = sandboxes.reborn(sandbox)
        assert restored.run("echo $kept").output == "1\n"

    def test_shared_memory_is_kept_uncompressed_and_comes_back(
        self, runtime: SandboxRuntime, sandboxes: Sandboxes
    ) -> None:
        if runtime.name != "runc":
            pytest.skip("the runc runtime's way")
        sandbox = sandboxes.create()
        written = "mkdir /dev/shm/d && ln -s d /dev/shm/l && yes | head -c 3000000 >/dev/shm/d/zeros"
        looked = "ls -lR --time-style=+ /dev/shm; sha256sum /dev/shm/l/zeros"
        before = sandbox.run(f"{written}; {looked}")
        checkpoint = sandboxes.save(sandbox)
        sandbox.destroy()
        assert sandboxes.restore(checkpoint).run(looked).output == before.output
        archives = (checkpoint.directory / "images").glob("tmpfs-*")
        assert max(archive.stat().st_size for archive in archives) > 3_000_000


def test_only_a_dump_from_inside_enters_the_namespace(tmp_path: Path) -> None:
    outside = criu.DumpRequest(
        criu=Path("/criu"), pid=7, root=tmp_path, images=tmp_path, work=tmp_path, freezer=tmp_path,
        externals=(), ghost_bytes=1,
    )  # fmt: skip
    inside = dataclasses.replace(outside, from_inside=True)
    assert outside.argv()[0] == "/criu"
    assert inside.argv() == ["nsenter", "--net=/proc/7/ns/net", *outside.argv()]


TICKERS = """\
import ctypes, os, select, signal, struct
libc, counts = ctypes.CDLL(None), [0, 0, 0]
def tick(i):
    counts[i] += 1
    open(f"/root/t{i}", "w").write(str(counts[i]))
signal.signal(signal.SIGALRM, lambda *_: tick(0))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
often = struct.pack("qqqq", 0, 20_000_000, 0, 20_000_000)
fd = libc.timerfd_create(1, 0o4000)
libc.timerfd_settime(fd, 0, often, None)
signal.signal(signal.SIGUSR1, lambda *_: tick(2))
timer = ctypes.c_void_p()
libc.timer_create(1, struct.pack("Qii48x", 0, signal.SIGUSR1, 0), ctypes.byref(timer))
libc.timer_settime(timer, 0, often, None)
while True:
    try:
        if select.select([fd], [], [], 1)[0]:
            os.read(fd, 8)
            tick(1)
    except (InterruptedError, BlockingIOError):
        pass
"""


def test_periodic_timers_that_ran_out_in_the_pause_go_on(sandboxes: Sandboxes) -> None:
    sandbox = sandboxes.create()
    sandbox.run(
        f"cat >/root/p.py <<'E'\n{TICKERS}E\npython3 /root/p.py & until test -s /root/t2; do sleep .1; done"
    )
    for _ in range(3):
        sandbox = sandboxes.reborn(sandbox)
        moved = (
            "a=$(cat /root/t$i); for n in {1..50}; do sleep .1; test $(cat /root/t$i) -gt $a && break; done"
        )
        result = sandbox.run(f"for i in 0 1 2; do {moved}; echo $n; done")
        assert "50" not in result.output.split()
