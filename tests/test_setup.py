"""`belayer setup`: what it decides, by hosts made by hand; what it makes, where that needs no network."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from belayer_env import paths
from belayer_env.cli.main import Settings, make_app
from belayer_env.cli.progress import Progress
from belayer_env.errors import InvalidInput, SetupError
from belayer_env.host import criu_find, engine, packages, store_mount
from belayer_env.host.apt import (
    Distribution,
    PrivateApt,
    Source,
    archive_sources,
    host_sources,
    parse_deb822,
    parse_list,
    parse_os_release,
)
from belayer_env.host.command import NOT_FOUND, TIMED_OUT, run, which
from belayer_env.host.criu_find import CriuBinary, find_criu, parse_version
from belayer_env.host.criu_install import candidate_suites
from belayer_env.host.packages import NEEDED, Package, missing
from belayer_env.host.store_mount import StoreDisk, ensure_mounted, file_system_of, make_store, store_size
from belayer_env.spec import GIB

DEBIAN = Distribution("debian", "bookworm", "Debian 12")
UBUNTU = Distribution("ubuntu", "noble", "Ubuntu 24.04")
MIRROR = "http://mirror.example/debian"
KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"

DEBIAN_SOURCES = f"""\
Types: deb
# a comment
URIs: {MIRROR}
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: {KEY}

Types: deb deb-src
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: {KEY}

Types: deb
URIs: http://third.example/node
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/third.gpg

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""

UBUNTU_SOURCES = """\
Types: deb
URIs: http://ports.example/ubuntu-ports/
Suites: noble noble-updates noble-backports
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""

EMBEDDED_KEY = """\
Types: deb
URIs: http://third.example/apt
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 aGFuZC1tYWRl
 -----END PGP PUBLIC KEY BLOCK-----
"""

ONE_LINE_SOURCES = f"""
# deb http://off.example/debian bookworm main
deb {MIRROR} bookworm main  # the mirror
deb-src {MIRROR} bookworm main
deb {MIRROR} bookworm-updates main
deb [arch=amd64 signed-by=/etc/apt/keyrings/third.gpg] http://third.example/linux bookworm main
deb http://third.example/apt cloud-sdk-bookworm main
deb http://third.example/flat ./
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data and state directories of this test alone."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("BELAYER_CRIU", raising=False)
    criu_find.forget()
    return tmp_path


def fake_criu(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Version: {version}'\n")
    path.chmod(0o755)
    return path


# The host's own archive


def test_debians_own_archive_is_found_in_deb822_form() -> None:
    own = archive_sources(parse_deb822(DEBIAN_SOURCES), DEBIAN)
    assert own == [
        Source(MIRROR, ("bookworm", "bookworm-updates"), ("main", "contrib"), KEY),
        Source("http://mirror.example/debian-security", ("bookworm-security",), ("main",), KEY),
    ]
    assert own[0].lines()[0] == f"deb [signed-by={KEY}] {MIRROR} bookworm main contrib"


def test_ubuntus_own_archive_is_found() -> None:
    (own,) = archive_sources(parse_deb822(UBUNTU_SOURCES), UBUNTU)
    assert own.uri == "http://ports.example/ubuntu-ports/"
    assert own.suites == ("noble", "noble-updates")


def test_own_archive_is_found_in_list_form_and_third_parties_stay_out() -> None:
    own = archive_sources(parse_list(ONE_LINE_SOURCES), DEBIAN)
    assert [(source.uri, source.suites) for source in own] == [
        (MIRROR, ("bookworm",)),
        (MIRROR, ("bookworm-updates",)),
    ]


def test_a_line_for_each_component_makes_one_archive() -> None:
    lines = (
        "deb http://u.example/u noble universe",
        "deb http://u.example/u noble main",
        "deb http://p.example noble x",
    )
    own = archive_sources(parse_list("\n".join(lines)), UBUNTU)
    assert [source.components for source in own] == [("main",), ("universe",)]


def test_the_main_archive_comes_first_whatever_the_order() -> None:
    security = Source("http://a.example/security", ("bookworm-security",), ("main",))
    archive = Source(MIRROR, ("bookworm",), ("main",))
    assert archive_sources([security, archive], DEBIAN) == [archive, security]


def test_a_third_party_with_an_embedded_key_stays_out() -> None:
    (source,) = parse_deb822(EMBEDDED_KEY)
    assert source.uri == "http://third.example/apt"
    assert archive_sources([source], DEBIAN) == []


def test_both_forms_are_read_from_the_hosts_directories(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(f"deb {MIRROR} bookworm main\n")
    (tmp_path / "sources.list.d" / "a.sources").write_text(UBUNTU_SOURCES)
    (tmp_path / "sources.list.d" / "b.list.save").write_text("deb http://old.example/ x main\n")
    assert [source.uri for source in host_sources(tmp_path)] == [MIRROR, "http://ports.example/ubuntu-ports/"]


def test_os_release_of_both_distributions() -> None:
    text = 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nVERSION_CODENAME=noble\nID=ubuntu\n'
    assert parse_os_release(text) == Distribution("ubuntu", "noble", "Ubuntu 24.04.1 LTS")
    assert parse_os_release("ID=alpine\n").codename == ""


def test_private_apt_leaves_the_hosts_state_alone(tmp_path: Path) -> None:
    PrivateApt(tmp_path / "apt", [Source(MIRROR, ("testing",), ("main",), KEY)])
    settings = (tmp_path / "apt" / "apt.conf").read_text()
    for option in ("Dir::State::Lists", "Dir::State::status", "Dir::Cache", "Dir::Etc::sourcelist"):
        assert f'{option} "{tmp_path}/apt' in settings
    assert (tmp_path / "apt" / "status").read_text() == ""


# CRIU


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version: 4.2.1\nGitID: v4.2.1\n", (4, 2, 1)),
        ("Version: 3.17.1", (3, 17, 1)),
        ("4.2-1ubuntu1", (4, 2)),
        ("1:4.10-1", (4, 10)),
        ("command not found", None),
        ("", None),
    ],
)
def test_criu_versions_are_read(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_versions_compare_by_number_not_by_letter() -> None:
    assert CriuBinary(Path("x"), (4, 10)).is_recent
    assert CriuBinary(Path("x"), (4, 2)).is_recent
    assert not CriuBinary(Path("x"), (4, 1, 1)).is_recent


def test_criu_is_looked_for_in_variable_prefix_and_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = fake_criu(home / "bin" / "criu", "4.3")
    monkeypatch.setenv("PATH", f"{on_path.parent}:{os.environ['PATH']}")
    assert find_criu() == CriuBinary(on_path, (4, 3))
    criu_find.forget()
    ours = fake_criu(paths.criu_prefix() / "usr/sbin/criu", "4.2.1")
    assert find_criu() == CriuBinary(ours, (4, 2, 1))
    named = fake_criu(home / "named", "4.4")
    monkeypatch.setenv("BELAYER_CRIU", str(named))
    assert find_criu() == CriuBinary(named, (4, 4))
    monkeypatch.setenv("BELAYER_CRIU", str(home / "absent"))
    with pytest.raises(SetupError, match="BELAYER_CRIU"):
        find_criu()


def test_an_old_criu_of_ours_gives_way_to_a_recent_one_of_the_host(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_criu(paths.criu_prefix() / "usr/sbin/criu", "4.1.1")
    recent = fake_criu(home / "bin" / "criu", "4.2")
    monkeypatch.setenv("PATH", f"{recent.parent}:{os.environ['PATH']}")
    assert find_criu() == CriuBinary(recent, (4, 2))


def test_a_criu_that_does_not_start_counts_as_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_criu(paths.criu_prefix() / "usr/sbin/criu", "4.2").write_text("#!/nonexistent/loader\n")
    monkeypatch.setattr(criu_find, "which", lambda name: None)
    assert find_criu() is None


def test_criu_is_looked_for_in_newer_suites_of_the_hosts_own_archive() -> None:
    archive = Source(MIRROR, ("bookworm", "bookworm-updates"), ("main", "contrib"), KEY)
    suites = candidate_suites(DEBIAN, archive)
    assert [source.suites for source in suites][:2] == [("stable",), ("testing",)]
    assert all((s.uri, s.components, s.signed_by) == (MIRROR, ("main",), KEY) for s in suites)
    ubuntu = Source("http://u.example/ubuntu", ("noble",), ("main", "universe"), "/k.gpg")
    assert candidate_suites(UBUNTU, ubuntu)[0].components == ("main", "universe")


def test_a_named_mirror_and_suite_win() -> None:
    archive = Source(MIRROR, ("bookworm",), ("main",), "/some/other.gpg")
    keyring = Path(KEY)
    if not keyring.exists():
        with pytest.raises(SetupError, match="debian-archive-keyring"):
            candidate_suites(DEBIAN, archive, mirror="http://near.example/debian", suite="sid")
        return
    (only,) = candidate_suites(DEBIAN, archive, mirror="http://near.example/debian", suite="sid")
    assert only == Source("http://near.example/debian", ("sid",), ("main",), KEY)


def test_without_archive_and_mirror_the_remedy_is_named() -> None:
    with pytest.raises(SetupError, match="--criu-mirror"):
        candidate_suites(Distribution("arch", "", "Arch Linux"), None)


# System packages


def test_packages_are_missing_by_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"mkfs.btrfs", "ip"}
    monkeypatch.setattr(packages, "which", lambda name: f"/bin/{name}" if name in there else None)
    assert [p.name for p in missing()] == [p.name for p in NEEDED if p.name != "iproute2"]
    there.add("btrfs")
    assert "btrfs-progs" not in [p.name for p in missing()]


def test_without_apt_the_needed_commands_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "which", lambda name: None)
    with pytest.raises(SetupError, match=r"no apt-get.*\n.*runc: for the runc runtime"):
        packages.install([NEEDED[0]])


def test_without_root_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(packages, "which", lambda name: "/usr/bin/apt-get")
    with pytest.raises(SetupError, match="sudo apt-get install some-package"):
        packages.install([Package("some-package", ("some",), "a test")])


# The store's file system


def test_store_takes_half_of_the_free_disk_within_bounds() -> None:
    assert store_size(100 * GIB) == 50 * GIB
    assert store_size(1000 * GIB) == 64 * GIB
    assert store_size(8 * GIB) == 4 * GIB
    assert store_size(7 * GIB) == 0
    assert store_size(100 * GIB, 10 * GIB) == 10 * GIB
    assert store_size(100 * GIB, 200 * GIB) == 0


def test_file_system_is_the_one_of_the_last_mount_at_or_above() -> None:
    mounts = (
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        "2 1 0:30 / /srv rw - xfs /dev/sdb rw\n"
        "3 2 0:31 / /srv/my\\040store rw - btrfs /dev/loop0 rw\n"
        "4 2 0:32 / /srv rw - tmpfs tmpfs rw\n"
    )
    assert file_system_of(Path("/srv/my store/x"), mounts) == "btrfs"
    assert file_system_of(Path("/srv/else"), mounts) == "tmpfs"
    assert file_system_of(Path("/srvx"), mounts) == "ext4"


def test_an_image_made_for_another_store_is_not_mounted_here(home: Path) -> None:
    assert ensure_mounted() is False
    paths.data_dir().mkdir(parents=True)
    paths.store_image().write_bytes(b"")
    assert ensure_mounted() is False
    paths.store_image().with_suffix(".mountpoint").write_text("/somewhere/else\n")
    assert ensure_mounted() is False
    assert not paths.default_store().exists()


def test_a_store_with_checkpoints_in_it_is_not_hidden_by_a_mount(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = StoreDisk(home, "ext4", False, 100 * GIB)
    monkeypatch.setattr(store_mount, "read_store_disk", lambda store: disk)
    monkeypatch.setattr(store_mount, "which", lambda name: "/sbin/mkfs.btrfs")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (paths.default_store() / "checkpoints").mkdir(parents=True)
    assert "copies" in make_store()
    assert not paths.store_image().exists()


def test_a_disk_with_reflinks_needs_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StoreDisk(home, "xfs", True, 100 * GIB)
    monkeypatch.setattr(store_mount, "read_store_disk", lambda store: disk)
    assert "nothing to make" in make_store()
    assert not paths.store_image().exists()


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists() or which("mkfs.btrfs") is None,
    reason="needs root, loop devices and btrfs-progs",
)
def test_a_store_is_made_and_comes_back_after_a_reboot(home: Path) -> None:
    store = paths.default_store()
    disk = store_mount.read_store_disk(store)
    if disk.reflink or not store_size(disk.free_bytes, 4 * GIB):
        pytest.skip(f"{disk} needs or allows no store of its own")
    try:
        said = make_store(wanted_bytes=4 * GIB)
        if "copies" in said:
            pytest.skip(said)
        assert store_mount.read_store_disk(store).file_system == "btrfs"
        assert store.stat().st_mode & 0o777 == 0o700
        (store / "checkpoint").write_text("kept")
        run(["umount", store], timeout_s=30).require("Unmounting")
        assert not (store / "checkpoint").exists()
        assert ensure_mounted()
        assert (store / "checkpoint").read_text() == "kept"
        assert make_store() == f"btrfs on {store}"
    finally:
        run(["umount", store], timeout_s=30)
    assert str(home) not in Path("/proc/self/mountinfo").read_text()


# Commands


def test_a_command_past_its_deadline_is_ended_with_all_it_started() -> None:
    began = time.monotonic()
    lines: list[str] = []
    done = run(["sh", "-c", "sleep 600 & echo $!; wait"], timeout_s=0.5, on_line=lines.append)
    assert done.exit_code == TIMED_OUT
    assert time.monotonic() - began < 5
    started = int(lines[0])
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE


def test_a_daemon_that_keeps_the_pipe_does_not_hold_the_caller() -> None:
    began = time.monotonic()
    done = run(["sh", "-c", "sleep 5 & echo started"], timeout_s=60)
    assert done.ok
    assert done.output == "started\n"
    assert time.monotonic() - began < 4


def test_a_failure_says_what_was_done_the_command_and_the_remedy() -> None:
    with pytest.raises(
        SetupError, match=r"(?s)Trying failed: `sh -c 'echo no; exit 3'` exited with 3\nno\nDo it"
    ):
        run(["sh", "-c", "echo no; exit 3"], timeout_s=10).require("Trying", remedy="Do it")


def test_an_absent_command_and_bad_bytes_are_results() -> None:
    assert run(["/no/such/command"], timeout_s=1).exit_code == NOT_FOUND
    assert run(["printf", r"\377x"], timeout_s=10).output == "\\xffx"
    assert run(["cat"], timeout_s=10, stdin=b"given").output == "given"


def test_an_interrupt_ends_the_command() -> None:
    def interrupt() -> None:
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    marker = f"61.{os.getpid()}"
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(["sleep", marker], timeout_s=60)
    thread.join()
    assert not any(marker in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


# The command itself


def test_setup_without_root_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    answer = CliRunner().invoke(make_app(Settings()), ["setup"])
    assert isinstance(answer.exception, SetupError)
    assert "sudo" in str(answer.exception)


def test_a_store_size_that_is_not_positive_is_refused() -> None:
    answer = CliRunner().invoke(make_app(Settings()), ["setup", "--store-size", "-1"])
    assert isinstance(answer.exception, InvalidInput)


def test_only_an_engine_of_ours_is_stopped(home: Path) -> None:
    assert engine.stop_engine() == "no Docker Engine of ours is running"
    # The pid of a living process, of another start time: it is somebody else's by now.
    paths.data_dir().mkdir(parents=True)
    (paths.data_dir() / "dockerd.json").write_text(f'{{"pid": {os.getpid()}, "create_time": 1.0}}')
    assert engine.stop_engine() == "no Docker Engine of ours is running"
    assert not (paths.data_dir() / "dockerd.json").exists()


def test_progress_without_a_terminal_is_plain_lines() -> None:
    now = [0.0]
    out = io.StringIO()
    progress = Progress(Console(file=out, width=40, highlight=False), clock=lambda: now[0])
    with progress.step("Image") as step:
        step.line("not yet due")
        now[0] = 6.0
        step.line("still [here]")
        step.report("unpacking")
        step.result = "made"
    assert out.getvalue().splitlines() == [
        "  Image ...",
        "    still [here]",
        "    unpacking",
        "✓ Image: made (6.0 s)",
    ]


def test_an_error_in_a_step_is_not_reported_as_done() -> None:
    out = io.StringIO()
    with pytest.raises(SetupError), Progress(Console(file=out)).step("Image"):
        raise SetupError("no")
    assert "✓" not in out.getvalue()
