"""The daemonless runtime: runc, an overlay mount, and a home directory that holds all a sandbox has on the
host.

    home/owner.json   whose it is (written by the store)     home/ch       the shell channel, a tmpfs of its
    own home/layer        the writable layer (see layers)        home/rootfs   image + layer, mounted
    (overlayfs) home/config.json  the OCI bundle's configuration         home/runc     runc's own state
Cgroups are named after the home, so that the home alone is enough to remove everything (`sweep`).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from belayer_env.disk import disk_errors
from belayer_env.errors import (
    Fault,
    IncompatibleCheckpoint,
    RestoreFailed,
    RuntimeFailed,
    RuntimeUnavailable,
)
from belayer_env.host.command import which
from belayer_env.host.criu_find import find_criu
from belayer_env.sandbox import criu
from belayer_env.sandbox.base import ProcessInfo, Saved
from belayer_env.sandbox.cgroup import Cgroup, is_unified
from belayer_env.sandbox.container import Container
from belayer_env.sandbox.image import RootFs, resolve_image
from belayer_env.sandbox.layers import LayerStore
from belayer_env.sandbox.mounts import MS_NODEV, MS_NOSUID, mount, mount_overlay, unmount, unmount_below
from belayer_env.sandbox.procs import pids_naming
from belayer_env.sandbox.runc_spec import dump_externals, oci_config, restore_externals
from belayer_env.sandbox.shell import ChannelContents
from belayer_env.spec import ExecResult, SandboxSpec, Tier

__all__ = ["RuncRuntime", "RuncSandbox"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CHANNEL_OPTIONS = "size=32m,nr_inodes=4096,mode=755"
"""Room for a command of 16 MB twice; a bound on what a sandbox can write there."""
_UNMAPPED_ID = 100_000
_START_DEADLINE_S = 60.0


class RuncRuntime:
    """Makes sandboxes with runc. Needs root."""

    name = "runc"

    def __init__(self, layers: LayerStore, images_dir: Path, *, tier: Tier, tier_reason: str = "") -> None:
        """``layers`` is of the file system that the homes are on; ``tier`` is what the host was found to
        give.

        Raises:
            RuntimeUnavailable: no root, or no runc."""
        if os.geteuid() != 0:
            raise RuntimeUnavailable("the runc runtime needs root; run as root, or use runtime='docker'")
        runc = which("runc")
        if runc is None:
            raise RuntimeUnavailable("runc is not installed; run: belayer setup")
        self.tier = tier
        self.tier_reason = tier_reason
        self.layers = layers
        self.images_dir = images_dir
        self.runc = Path(runc)
        binary = find_criu()
        self.criu = binary.path if binary is not None else None
        self.criu_version = ".".join(map(str, binary.version)) if binary is not None else ""
        self.user_namespace = Path("/proc/self/ns/user").exists() and _max_user_namespaces() > 0
        self.swap_accounting = (
            is_unified() or (_CGROUP_ROOT / "memory/memory.memsw.limit_in_bytes").exists()
        )  # fmt: skip

    def create(self, spec: SandboxSpec, home: Path) -> RuncSandbox:
        """See `SandboxRuntime.create`."""
        image = resolve_image(spec.image, self.images_dir)
        self.layers.create(home / "layer")
        return self._start(spec, image, home, ChannelContents(), images=None)

    def restore(self, spec: SandboxSpec, saved_dir: Path, meta: Mapping[str, Any], home: Path) -> RuncSandbox:
        """See `SandboxRuntime.restore`."""
        image = resolve_image(spec.image, self.images_dir)
        if image.digest != meta["image_digest"]:
            raise IncompatibleCheckpoint(
                f"{spec.image} has changed since the checkpoint was made, and its files with it: "
                "bring the old image back, or begin a new episode"
            )
        full = meta["tier"] == Tier.FULL
        if full and self.criu is None:
            raise RuntimeUnavailable(
                "this checkpoint holds processes, and there is no CRIU here; run: belayer setup"
            )
        try:
            self.layers.clone(saved_dir / "layer", home / "layer")
            return self._start(
                spec,
                image,
                home,
                ChannelContents.from_json(meta, with_processes=full),
                images=saved_dir / "images" if full else None,
            )
        except RestoreFailed:
            raise
        except Fault as error:
            raise RestoreFailed(f"the checkpoint did not restore: {error}") from error

    def sweep(self, home: Path) -> None:
        """See `SandboxRuntime.sweep`."""
        # A runc or CRIU that outlived its client: at work on the home still, or waiting for a process that is
        # gone.
        for pid in pids_naming(f"{home}/", programs=("runc", "criu", "unshare", "sh")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cgroup = Cgroup.find(_cgroup_name(home.name))
        cgroup.kill_all()
        unmount_below(home)
        cgroup.remove()
        self.layers.drop(home / "layer")
        shutil.rmtree(home, ignore_errors=True)

    def _start(
        self,
        spec: SandboxSpec,
        image: RootFs,
        home: Path,
        contents: ChannelContents,
        *,
        images: Path | None,
    ) -> RuncSandbox:
        """Mount, configure and start (or, from ``images``, restore) the container; on failure nothing is
        left."""
        sandbox = RuncSandbox(self, spec, image, home)
        try:
            if spec.limits.disk_bytes is not None:
                self.layers.limit(home / "layer", spec.limits.disk_bytes)
            with disk_errors(f"starting the sandbox of {home}"):
                sandbox._mount(contents)
                sandbox._launch(images)
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox


class RuncSandbox:
    """One runc container. See `Sandbox`."""

    def __init__(self, runtime: RuncRuntime, spec: SandboxSpec, image: RootFs, home: Path) -> None:
        self.id = home.name
        self.spec = spec
        self.home = home
        self.image_digest = image.digest
        self._runtime = runtime
        self._image = image
        self._owner = _UNMAPPED_ID if runtime.user_namespace else 0
        self._container = Container(
            spec, Cgroup.find(_cgroup_name(self.id)), upper=lambda: home / "layer" / "upper"
        )
        self._config: dict[str, Any] = {}

    @property
    def init_pid(self) -> int:
        """Host pid of its init, for tools and fault drills; 0 before there is one."""
        return self._container.pid

    @property
    def tier(self) -> Tier:
        """See `Sandbox.tier`."""
        return self._runtime.tier

    # -- Sandbox

    def run(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """See `Sandbox.run`."""
        return self._container.run(command, timeout_s=timeout_s)

    def save(self, into: Path, *, previous: Path | None = None, with_fingerprint: bool = False) -> Saved:
        """See `Sandbox.save`."""
        layers, full = self._runtime.layers, self.tier is Tier.FULL
        return self._container.save(
            into,
            tier=self.tier,
            write=lambda: self._dump(into, previous) if full else self._snapshot(into, previous),
            discard=layers.drop,
            settle=lambda: layers.settle(self.home / "layer"),
            meta={"image_digest": self.image_digest, "criu_version": self._runtime.criu_version},
            with_fingerprint=with_fingerprint,
        )

    def processes(self) -> list[ProcessInfo]:
        """See `Sandbox.processes`."""
        return self._container.processes()

    def answers(self) -> bool:
        """See `Sandbox.answers`."""
        return self._container.answers()

    def fingerprint(self) -> str | None:
        """See `Sandbox.fingerprint`."""
        return self._container.fingerprint()

    def memory_bytes(self) -> int:
        """See `Sandbox.memory_bytes`."""
        return self._container.memory_bytes()

    def suspend(self) -> None:
        """See `Sandbox.suspend`."""
        self._container.suspend()

    def wake(self) -> None:
        """See `Sandbox.wake`."""
        self._container.wake()

    def is_alive(self) -> bool:
        """See `Sandbox.is_alive`."""
        return self._container.is_alive()

    def kill(self) -> None:
        """See `Sandbox.kill`."""
        self._container.kill()

    def destroy(self) -> None:
        """See `Sandbox.destroy`."""
        # By name: whatever half-made start left behind is found too.
        cgroup = Cgroup.find(_cgroup_name(self.id))
        with contextlib.suppress(Exception):
            cgroup.kill_all()
        self._container.close()
        unmount(self.home / "rootfs")
        unmount(self.home / "ch")
        with contextlib.suppress(OSError):
            cgroup.remove()
        with contextlib.suppress(Exception):
            self._runtime.layers.drop(self.home / "layer")
        shutil.rmtree(self.home, ignore_errors=True)

    # -- start and restore

    def _mount(self, contents: ChannelContents) -> None:
        for name in ("ch", "rootfs", "empty", "runc", "criu"):
            (self.home / name).mkdir(mode=0o755)
        channel = self.home / "ch"
        try:
            mount("tmpfs", channel, "tmpfs", flags=MS_NOSUID | MS_NODEV, options=_CHANNEL_OPTIONS)
        except OSError as error:
            raise RuntimeFailed(f"cannot mount the shell channel: {error}") from error
        self._container.open_channel(channel, contents, owner=self._owner)
        mount_overlay(self._image.path, self.home / "layer", self.home / "rootfs", flags=MS_NODEV)

    def _launch(self, images: Path | None) -> None:
        self._config = oci_config(
            self.spec,
            sandbox_id=self.id,
            rootfs=self.home / "rootfs",
            channel=self.home / "ch",
            empty_dir=self.home / "empty",
            image_env=self._image.env,
            machine=platform.machine(),
            user_namespace=self._runtime.user_namespace,
            swap_accounting=self._runtime.swap_accounting,
        )
        (self.home / "config.json").write_text(json.dumps(self._config))
        if images is None:
            _write_hosts(self.home / "rootfs")
            pid_file = ["--pid-file", str(self.home / "pid")]
            self._runc("run", "--detach", "--no-new-keyring", "--bundle", str(self.home), *pid_file, self.id)
        else:
            self._restore_processes(images)
        init = int((self.home / "pid").read_text())
        if images is None:
            self._container.attach(init)
            self._container.require().wait_ready()
            if not os.path.lexists(f"{self.home}/rootfs{self.spec.workdir}"):
                self._container.enter_workdir()
        else:
            self._container.attach(init, self._container.cgroup)
            self._container.greet_restored()

    def _restore_processes(self, images: Path) -> None:
        assert self._runtime.criu is not None
        script = self.home / "loopback.sh"
        script.write_text(resources.files(__package__).joinpath("loopback.sh").read_text())
        script.chmod(0o700)
        cgroup = self._container.cgroup = Cgroup.create(_cgroup_name(self.id))
        criu.restore(
            criu.RestoreRequest(
                criu=self._runtime.criu,
                root=self.home / "rootfs",
                images=images,
                work=self.home / "criu",
                pid_file=self.home / "pid",
                externals=restore_externals(self._config),
                cgroups=tuple(cgroup.paths.values()),
                action_script=script,
                ghost_bytes=self.spec.limits.ghost_bytes,
            )
        )
        # Only now: CRIU and its helpers were counted as well.
        limits = self.spec.limits
        cgroup.set_limits(memory_bytes=limits.memory_bytes, pids=limits.pids, cpus=limits.cpus)

    def _runc(self, *args: str) -> None:
        log = self.home / "runc.log"
        argv = [str(self._runtime.runc), "--root", str(self.home / "runc"), "--log", str(log), *args]
        try:
            code = criu.run_deadlined(argv, timeout_s=_START_DEADLINE_S)
        except TimeoutError as error:
            raise RuntimeFailed(f"runc {args[0]}: {error}") from error
        if code != 0:
            words = log.read_text(errors="replace").strip() if log.exists() else ""
            raise RuntimeFailed(f"runc {args[0]} failed: {words or f'exit status {code}'}")

    # -- checkpoint

    def _dump(self, into: Path, previous: Path | None) -> None:
        assert self._runtime.criu is not None
        images = into / "images"
        images.mkdir(mode=0o700)
        request = criu.DumpRequest(
            criu=self._runtime.criu,
            pid=self._container.pid,
            root=self.home / "rootfs",
            images=images,
            work=self.home / "criu",
            freezer=self._container.cgroup.freezer,
            externals=dump_externals(self._config),
            ghost_bytes=self.spec.limits.ghost_bytes,
            from_inside=True,
            plain_tmpfs=True,
        )
        criu.dump(request, lambda: self._snapshot(into, previous))

    def _snapshot(self, into: Path, previous: Path | None) -> None:
        earlier = previous / "layer" if previous is not None else None
        self._runtime.layers.snapshot(self.home / "layer", into / "layer", previous=earlier)


def _cgroup_name(sandbox_id: str) -> str:
    return f"belayer-{sandbox_id}"


def _write_hosts(rootfs: Path) -> None:
    """Names for the loopback and the sandbox itself, where the image brings none."""
    etc, hosts = rootfs / "etc", rootfs / "etc/hosts"
    # Not through a link: an image may point it anywhere on the host.
    if etc.is_dir() and not etc.is_symlink() and not os.path.lexists(hosts):
        hosts.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 sandbox\n")


def _max_user_namespaces() -> int:
    try:
        return int(Path("/proc/sys/user/max_user_namespaces").read_text())
    except (OSError, ValueError):
        return 0
