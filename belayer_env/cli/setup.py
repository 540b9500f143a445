"""`belayer setup`: what sandboxes need on this host, each part made once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from belayer_env import paths
from belayer_env.cli.doctor import print_tiers
from belayer_env.cli.progress import Progress
from belayer_env.errors import InvalidInput, SetupError
from belayer_env.host import criu_find, packages, probe
from belayer_env.host.command import which
from belayer_env.host.criu_install import good_criu, install_criu
from belayer_env.host.gather import gather_host
from belayer_env.host.root_images import make_busybox_image, make_test_image
from belayer_env.host.store_mount import ensure_mounted, make_store
from belayer_env.spec import GIB

__all__ = ["setup"]


def setup(
    docker: Annotated[
        bool, typer.Option("--docker", help="Also start a Docker Engine, if none answers.")
    ] = False,
    docker_stop: Annotated[
        bool, typer.Option("--docker-stop", help="Only stop the Docker Engine that --docker started.")
    ] = False,
    criu_mirror: Annotated[str, typer.Option(metavar="URL", help="Archive to take CRIU from.")] = "",
    criu_suite: Annotated[str, typer.Option(metavar="NAME", help="Suite of it to take CRIU from.")] = "",
    no_packages: Annotated[bool, typer.Option("--no-packages", help="Install no system packages.")] = False,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Make no images for demo and tests.")
    ] = False,
    no_store: Annotated[bool, typer.Option("--no-store", help="Make no btrfs for the store.")] = False,
    store_size: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Size of the store's btrfs (half of the free disk)."),
    ] = None,
) -> None:
    """Install what sandboxes need on this host; later runs skip what is there.

    System packages by apt, a CRIU for this kernel in a prefix of its own, two small images for demo and
    tests, and a btrfs for the store where the disk has no snapshots."""
    if store_size is not None and not store_size > 0:
        raise InvalidInput(f"--store-size must be positive, not {store_size}")
    if os.geteuid() != 0:
        raise SetupError(
            f"Setting up this host needs root: sudo {shutil.which('belayer') or 'belayer'} setup"
        )
    progress = Progress()
    with _only_one(progress):
        if docker_stop:
            from belayer_env.host.engine import stop_engine

            with progress.step("Docker Engine") as step:
                step.result = stop_engine()
            return
        _sweep_leftovers()
        _set_up_packages(progress, allowed=not no_packages)
        _set_up_criu(progress, criu_mirror, criu_suite)
        if not no_images:
            _set_up_images(progress)
        if not no_store:
            _set_up_store(progress, store_size)
        if docker:
            from belayer_env.host.engine import start_engine

            with progress.step("Docker Engine") as step:
                step.result = start_engine(report=step.report)
    probe.forget()
    criu_find.forget()
    print_tiers(gather_host())


def _set_up_packages(progress: Progress, *, allowed: bool) -> None:
    missing = packages.missing()
    names = " ".join(package.name for package in missing)
    if not missing:
        progress.done("System packages", "all there")
    elif not allowed:
        progress.done("System packages", f"left out by --no-packages: {names}")
    else:
        with progress.step("System packages") as step:
            step.report(f"installing {names}")
            packages.install(missing, on_line=step.line)
            step.result = f"installed {names}"


def _set_up_criu(progress: Progress, mirror: str, suite: str) -> None:
    if (there := good_criu()) is not None:
        progress.done("CRIU", f"{there}, criu check passes")
        return
    with progress.step("CRIU") as step:
        binary = install_criu(mirror=mirror, suite=suite, report=step.report)
        step.result = f"{binary}, criu check passes"


def _set_up_images(progress: Progress) -> None:
    for what, path, make in (
        ("Test image", paths.test_image(), make_test_image),
        ("Busybox image", paths.busybox_image(), make_busybox_image),
    ):
        if path.is_dir():
            progress.done(what, str(path))
        elif which("mmdebstrap") is None or which("apt-get") is None:
            progress.done(what, "left out: made by apt-get and mmdebstrap, which are not here")
        else:
            with progress.step(what) as step:
                step.result = str(make(on_line=step.line))


def _set_up_store(progress: Progress, size_gib: float | None) -> None:
    if ensure_mounted():
        progress.done("Store", f"btrfs on {paths.default_store()}")
        return
    with progress.step("Store") as step:
        step.result = make_store(wanted_bytes=None if size_gib is None else int(size_gib * GIB))


def _sweep_leftovers() -> None:
    """What a killed set-up left half-made; no other one runs, by the lock."""
    data = paths.data_dir()
    half_made = [*data.glob("criu.new-*"), *data.glob("criu.old-*"), *paths.images_dir().glob("*/new-*")]
    for path in half_made:
        shutil.rmtree(path, ignore_errors=True)
    paths.store_image().with_suffix(".new").unlink(missing_ok=True)


@contextmanager
def _only_one(progress: Progress) -> Iterator[None]:
    """One set-up at a time on this host; a second one waits, and then finds all done."""
    paths.data_dir().mkdir(parents=True, exist_ok=True)
    with (paths.data_dir() / "setup.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with progress.step("Waiting for another belayer setup"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
