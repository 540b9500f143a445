"""The root file systems that `belayer setup` makes: a small one of the host's distribution, and busybox."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from belayer_env import paths
from belayer_env.errors import SetupError
from belayer_env.host.apt import (
    Distribution,
    PrivateApt,
    Source,
    archive_sources,
    host_distribution,
    host_sources,
)
from belayer_env.host.command import run

__all__ = ["make_busybox_image", "make_test_image"]

# What the demo, the tests and the benches run in a sandbox.
TEST_PACKAGES = (
    "python3", "python3-pytest", "git", "procps", "psmisc", "tmux", "sqlite3", "iproute2", "less", "vim-tiny",
    "strace", "util-linux", "bash", "busybox",
)  # fmt: skip

# Nothing in a sandbox reads them, and they are a third of the size.
LEFT_OUT = (
    "/usr/share/man/*",
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
)

BOOTSTRAP_TIMEOUT_S = 900.0


def make_test_image(*, on_line: Callable[[str], None] | None = None) -> Path:
    """`paths.test_image()`, made of the host's own archive: about 250 MB, 30 s. Atomic.

    Raises:
        SetupError: not root, no archive known, or mmdebstrap failed."""
    distribution, sources = _own_archive()
    if os.geteuid() != 0:
        raise SetupError("Only root makes the test image: run `sudo belayer setup`")
    argv = [
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory",
        f"--include={','.join(TEST_PACKAGES)}",
        "--aptopt=Acquire::Languages \"none\"", "--aptopt=Acquire::Retries \"2\"",
        "--dpkgopt=force-unsafe-io", *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
    ]  # fmt: skip
    lines = "\n".join(line for source in sources for line in source.lines())
    with _aside(paths.test_image()) as fresh:
        run(
            [*argv, distribution.codename, fresh, "-"],
            timeout_s=BOOTSTRAP_TIMEOUT_S,
            stdin=lines.encode() + b"\n",
            on_line=on_line,
        ).require("Making the test image")
        for pattern in (
            "var/lib/apt/lists/*",
            "var/cache/apt/*.bin",
            "var/cache/apt/archives/*.deb",
            "var/log/*.log",
        ):
            for file in fresh.glob(pattern):
                if file.is_file():
                    file.unlink()
    return paths.test_image()


def make_busybox_image(*, on_line: Callable[[str], None] | None = None) -> Path:
    """`paths.busybox_image()`: a static busybox under every name it answers to. 2 MB, a few seconds. Atomic.

    Raises:
        SetupError: no archive known, or it has no busybox."""
    _, sources = _own_archive()
    with _aside(paths.busybox_image()) as fresh:
        apt = PrivateApt(fresh.parent / "apt", sources)
        apt.update().require("Fetching the archive's lists")
        unpacked = fresh.parent / "unpacked"
        for file in apt.download(["busybox-static"], on_line=on_line):
            if file.name.startswith("busybox-static_"):
                run(["dpkg", "-x", file, unpacked], timeout_s=60).require(f"Unpacking {file.name}")
        binary = next((path for path in unpacked.glob("**/bin/busybox") if not path.is_symlink()), None)
        if binary is None:
            raise SetupError("The package busybox-static holds no bin/busybox")
        for name in (
            "bin",
            "sbin",
            "usr/bin",
            "usr/sbin",
            "etc",
            "proc",
            "sys",
            "dev",
            "root",
            "tmp",
            "run",
            "var/tmp",
        ):
            (fresh / name).mkdir(parents=True, exist_ok=True)
        shutil.copy2(binary, fresh / "bin/busybox")
        for name in ("tmp", "var/tmp"):
            (fresh / name).chmod(0o1777)
        (fresh / "root").chmod(0o700)
        (fresh / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (fresh / "etc/group").write_text("root:x:0:\n")
        applets = run([binary, "--list-full"], timeout_s=30).require("Asking busybox for its applets")
        for applet in applets.output.split():
            path = fresh / applet
            if path.parent.is_dir() and not path.exists():
                path.symlink_to("/bin/busybox")
        if not (fresh / "bin/sh").is_symlink():
            (fresh / "bin/sh").symlink_to("/bin/busybox")
    return paths.busybox_image()


def _own_archive() -> tuple[Distribution, list[Source]]:
    distribution = host_distribution()
    sources = archive_sources(host_sources(), distribution)
    if not sources:
        raise SetupError(
            f"apt's sources on this host ({distribution.name}) name no archive of the distribution itself. "
            "The tests and the demo need root file systems; make them by hand as directories and put them at "
            f"{paths.test_image()} and {paths.busybox_image()}"
        )
    return distribution, [
        source
        if source.signed_by
        else Source(source.uri, source.suites, source.components, _keyring(distribution))
        for source in sources
    ]


def _keyring(distribution: Distribution) -> str:
    return str(distribution.keyring) if distribution.keyring else ""


@contextmanager
def _aside(final: Path) -> Iterator[Path]:
    """A directory beside ``final`` to build in; it becomes ``final`` when the block ends well."""
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=parent, ignore_cleanup_errors=True) as aside:
        fresh = Path(aside) / "rootfs"
        fresh.mkdir()
        yield fresh
        fresh.chmod(0o755)
        fresh.rename(final)
