"""The Docker Engine runtime: the Engine makes and restores containers, CRIU is called directly to dump them.

    home/owner.json   whose it is (written by the store)     home/ch    the shell channel, a tmpfs of its own
    home/etc          hosts, hostname and resolv.conf, a tmpfs of its own     home/criu  CRIU's log of a dump
The container is named after the home, and so found again from the home alone (`sweep`).

What the Engine cannot restore is refused: a process of another user where root lacks CAP_SYS_RESOURCE, as
there is no user namespace; one that watches files by inotify, as overlay2 has no file handles; an open TCP
connection, a file lock or a unix socket without its peer, unless the host's /etc/criu/runc.conf allows them.
Without a user namespace the sandbox's root can also remove /belayer, and with it its shell: SandboxHung.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker
import tenacity

from belayer_env.disk import disk_errors
from belayer_env.errors import (
    BelayerError,
    EngineUnavailable,
    Fault,
    IncompatibleCheckpoint,
    RestoreFailed,
    RuntimeFailed,
    RuntimeUnavailable,
    SandboxGone,
)
from belayer_env.host.criu_find import find_criu
from belayer_env.sandbox import criu
from belayer_env.sandbox.base import ProcessInfo, Saved
from belayer_env.sandbox.cgroup import Cgroup
from belayer_env.sandbox.container import Container
from belayer_env.sandbox.docker_checkpoint import (
    CHECKPOINT_NAME,
    RestoreLog,
    find_bundle,
    install_images,
    read_externals,
    runc_restores,
)
from belayer_env.sandbox.docker_engine import Engine
from belayer_env.sandbox.docker_image import EngineImage, engine_image
from belayer_env.sandbox.layers import LayerStore
from belayer_env.sandbox.mounts import MS_NODEV, MS_NOEXEC, MS_NOSUID, mount, unmount, unmount_below
from belayer_env.sandbox.runc_spec import CAPABILITIES, process_env
from belayer_env.sandbox.seccomp import docker_profile
from belayer_env.sandbox.shell import CHANNEL_MOUNT, ChannelContents
from belayer_env.sandbox.tree import copy_tree
from belayer_env.spec import ExecResult, SandboxSpec, Tier

__all__ = ["DockerRuntime", "DockerSandbox"]

ID_LABEL, HOME_LABEL = "belayer.sandbox", "belayer.home"
_CHANNEL_OPTIONS = "size=32m,nr_inodes=4096,mode=755"
_ETC_OPTIONS = "size=1m,nr_inodes=16,mode=755"
_ETC = {
    "hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 sandbox\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
}
"""Docker binds these over the image's own, from a place that no layer snapshot holds; so we bring ours."""


class DockerRuntime:
    """Makes sandboxes with the Docker Engine. Needs root, and the Engine on this host."""

    name = "docker"

    def __init__(
        self,
        layers: LayerStore,
        images_dir: Path,
        *,
        tier: Tier,
        tier_reason: str = "",
        client: docker.DockerClient | None = None,
    ) -> None:
        """``layers`` is of the file system that checkpoints are on; ``tier`` is what the host was found to
        give; ``client``: None for that of the environment.

        Raises:
            RuntimeUnavailable: no root, or no Engine that can do it."""
        if os.geteuid() != 0:
            raise RuntimeUnavailable("the docker runtime reaches into containers and needs root; run as root")
        self.tier = tier
        self.tier_reason = tier_reason
        self.layers = layers
        self.images_dir = images_dir
        self.engine = Engine(client)
        binary = find_criu()
        self.criu = binary.path if binary is not None else None
        self.criu_version = ".".join(map(str, binary.version)) if binary is not None else ""

    def create(self, spec: SandboxSpec, home: Path) -> DockerSandbox:
        """See `SandboxRuntime.create`."""
        self.engine.await_answering()
        image = engine_image(self.engine, spec.image, self.images_dir)
        sandbox = DockerSandbox(self, spec, image, home)
        try:
            with disk_errors(f"starting the sandbox of {home}"):
                sandbox._make(ChannelContents(), etc=None)
                sandbox._start()
            sandbox._container.enter_workdir()
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def restore(
        self, spec: SandboxSpec, saved_dir: Path, meta: Mapping[str, Any], home: Path
    ) -> DockerSandbox:
        """See `SandboxRuntime.restore`.

        Raises:
            EngineUnavailable: nobody to restore it; the checkpoint was not tried."""
        self.engine.await_answering()
        image = self._image_of(spec, meta)
        full = meta["tier"] == Tier.FULL
        if full and (missing := set(meta["criu_options"]) - set(runc_restores())):
            words = ", ".join(sorted(missing))
            raise IncompatibleCheckpoint(
                f"the checkpoint was made while /etc/criu/runc.conf said {words}, and it no longer does: "
                "without it CRIU drops file locks silently; put it back"
            )
        sandbox = DockerSandbox(self, spec, image, home)
        try:
            contents = ChannelContents.from_json(meta, with_processes=full)
            with disk_errors(f"starting the sandbox of {home}"):
                sandbox._make(contents, etc=saved_dir / "layer/etc")
                sandbox._fill(saved_dir / "layer/upper")
                if full:
                    sandbox._start_from(saved_dir / "images", meta.get("bundles"))
                else:
                    sandbox._start()
        except BaseException as error:
            sandbox.destroy()
            if isinstance(error, Fault) and not isinstance(error, (RestoreFailed, EngineUnavailable)):
                raise RestoreFailed(f"the checkpoint did not restore: {error}") from error
            raise
        return sandbox

    def sweep(self, home: Path) -> None:
        """See `SandboxRuntime.sweep`.

        Raises:
            EngineUnavailable: the container could not be removed; the home stays."""
        for container in (*self.engine.find(belayer_home=str(home)), _container_name(home.name)):
            # Its owner may have died in mid-checkpoint. The Engine knows nothing of that freeze, and what it
            # kills would not die.
            with contextlib.suppress(SandboxGone, ProcessLookupError):
                if pid := int(self.engine.inspect(container)["State"]["Pid"]):
                    Cgroup.of_pid(pid).kill_all()
            self.engine.remove(container)
        unmount_below(home)
        shutil.rmtree(home, ignore_errors=True)

    def _image_of(self, spec: SandboxSpec, meta: Mapping[str, Any]) -> EngineImage:
        """The image that a checkpoint was made on: its files are only what differs from that."""
        image = engine_image(self.engine, spec.image, self.images_dir)
        if image.digest == meta["image_digest"]:
            return image
        try:
            # A tag may have moved on while the Engine still has what it named.
            engine_image(self.engine, meta["engine_image"], self.images_dir)
        except BelayerError as error:
            raise IncompatibleCheckpoint(
                f"{spec.image} has changed since the checkpoint was made, and its files with it: "
                "bring the old image back, or begin a new episode"
            ) from error
        return EngineImage(id=meta["engine_image"], digest=meta["image_digest"], env=meta["image_env"])


class DockerSandbox:
    """One container of the Docker Engine. See `Sandbox`."""

    def __init__(self, runtime: DockerRuntime, spec: SandboxSpec, image: EngineImage, home: Path) -> None:
        self.id = home.name
        self.spec = spec
        self.home = home
        self.image_digest = image.digest
        self._runtime = runtime
        self._engine = runtime.engine
        self._image = image
        self._name = _container_name(self.id)
        self._upper = Path()
        self._merged = Path()
        self._container_id = ""
        self._container = Container(spec, Cgroup({}), upper=lambda: self._upper, was_oom=self._engine_saw_oom)

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
        """See `Sandbox.save`. The files are copied each time: they come from the Engine's file system."""
        self._container.require()
        full, allow = self.tier is Tier.FULL, runc_restores()
        bundle = find_bundle(self._container.pid) if full and self.is_alive() else Path()
        return self._container.save(
            into,
            tier=self.tier,
            write=lambda: self._dump(into, bundle, allow) if full else self._snapshot(into),
            discard=self._runtime.layers.drop,
            settle=lambda: None,  # the copy reads what is dirty from memory as well
            meta={
                "image_digest": self.image_digest,
                "criu_version": self._runtime.criu_version,
                "engine_image": self._image.id,
                "image_env": dict(self._image.env),
                "bundles": str(bundle.parent),
                "criu_options": list(allow),
            },
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
        """See `Sandbox.destroy`. Where the Engine does not come back to remove the container, the home stays,
        for a later `sweep`."""
        removed = False
        with contextlib.suppress(Exception):
            self._container.close()
        with contextlib.suppress(Exception):
            self._engine.await_answering()
            # By name: a container whose making was interrupted is found too.
            self._engine.remove(self._name)
            removed = True
        unmount(self.home / "ch")
        unmount(self.home / "etc")
        if removed:
            shutil.rmtree(self.home, ignore_errors=True)

    # -- start and restore

    def _make(self, contents: ChannelContents, *, etc: Path | None) -> None:
        """A container that is not started yet, and the host's side of its channel."""
        for name in ("ch", "etc", "criu"):
            (self.home / name).mkdir(mode=0o755)
        channel, etc_dir = self.home / "ch", self.home / "etc"
        try:
            mount("tmpfs", channel, "tmpfs", flags=MS_NOSUID | MS_NODEV, options=_CHANNEL_OPTIONS)
            mount("tmpfs", etc_dir, "tmpfs", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC, options=_ETC_OPTIONS)
        except OSError as error:
            raise RuntimeFailed(f"cannot mount the shell channel: {error}") from error
        self._container.open_channel(channel, contents, owner=0)
        with disk_errors("filling /etc"):
            for name, text in _ETC.items():
                if etc is not None:
                    shutil.copy2(etc / name, etc_dir / name)
                else:
                    (etc_dir / name).write_text(text)
                    (etc_dir / name).chmod(0o644)
        self._create_container(channel, etc_dir)
        found = self._engine.inspect(self._container_id)["GraphDriver"]["Data"]
        self._upper, self._merged = Path(found["UpperDir"]), Path(found["MergedDir"])

    def _create_container(self, channel: Path, etc_dir: Path) -> None:
        limits = self.spec.limits
        binds = {str(channel): {"bind": CHANNEL_MOUNT, "mode": "rw"}}
        binds |= {str(etc_dir / name): {"bind": f"/etc/{name}", "mode": "rw"} for name in _ETC}
        options: dict[str, Any] = {}
        if limits.cpus is not None:
            options["nano_cpus"] = int(limits.cpus * 1e9)
        if limits.disk_bytes is not None:
            options["storage_opt"] = {"size": str(limits.disk_bytes)}
        try:
            with self._engine.client("making the sandbox's container") as client:
                made = client.containers.create(
                    self._image.id,
                    name=self._name,
                    entrypoint=["/bin/sh", f"{CHANNEL_MOUNT}/init.sh"],
                    environment=process_env(self.spec, self._image.env),
                    working_dir="/",
                    user="0:0",
                    hostname="sandbox",
                    labels={ID_LABEL: self.id, HOME_LABEL: str(self.home)},
                    tty=False,
                    stop_signal="SIGKILL",  # a shell as init ignores SIGTERM: dockerd would wait 10 s for it
                    network_mode="none",
                    ipc_mode="private",  # then /dev/shm is the container's own, and CRIU carries it
                    volumes=binds,
                    cap_drop=["ALL"],
                    cap_add=CAPABILITIES,
                    security_opt=["no-new-privileges:true", f"seccomp={_seccomp()}"],
                    mem_limit=limits.memory_bytes,
                    memswap_limit=limits.memory_bytes,
                    pids_limit=limits.pids + _CRIU_PIDS,
                    # An image's health check runs as a process that no checkpoint could hold.
                    healthcheck={"test": ["NONE"]},
                    log_config=docker.types.LogConfig(type="none"),
                    **options,
                )
        except RuntimeFailed as error:
            if limits.disk_bytes is not None and "storage-opt" in str(error):
                raise RuntimeUnavailable(
                    "Limits.disk_bytes needs the Engine's storage on XFS with pquota. Leave disk_bytes out, "
                    "or use runtime='runc' with a store on btrfs: belayer setup"
                ) from error
            raise
        self._container_id = str(made.id)

    def _fill(self, upper: Path) -> None:
        """Make the saved files the container's own."""
        with disk_errors("copying the saved files to the Engine"):
            self._upper.rmdir()
            copy_tree(upper, self._upper, reflink=True)

    def _start(self) -> None:
        self._engine.start(self._container_id)
        self._attach()
        self._container.require().wait_ready()

    def _start_from(self, images: Path, bundles: str | None) -> None:
        container_dir = self._engine.root / "containers" / self._container_id
        install_images(images, container_dir)
        with RestoreLog(Path(bundles) if bundles else None, self._container_id) as log:
            try:
                _RETRYING.copy()(self._engine.start, self._container_id, checkpoint=CHECKPOINT_NAME)
            except RuntimeFailed as error:
                raise log.failure(error) from error
        shutil.rmtree(container_dir / "checkpoints", ignore_errors=True)
        self._attach()
        self._container.greet_restored()

    def _attach(self) -> None:
        state = self._engine.inspect(self._container_id)["State"]
        if not state["Running"] or not state["Pid"]:
            raise SandboxGone(
                f"the sandbox's init ended as it started, with {state['ExitCode']}; if that is 2 or 127, the "
                f"Engine does not see {self.home / 'ch'}: is it in another mount namespace?"
            )
        self._container.attach(int(state["Pid"]))
        # Only now: a restore's CRIU and its helpers were counted as well.
        limits = self.spec.limits
        self._container.cgroup.set_limits(
            memory_bytes=limits.memory_bytes, pids=limits.pids, cpus=limits.cpus
        )

    # -- checkpoint

    def _dump(self, into: Path, bundle: Path, allow: tuple[str, ...]) -> None:
        assert self._runtime.criu is not None
        images = into / "images"
        images.mkdir(mode=0o700)
        request = criu.DumpRequest(
            criu=self._runtime.criu,
            pid=self._container.pid,
            root=self._merged,
            images=images,
            work=self.home / "criu",
            freezer=self._container.cgroup.freezer,
            externals=read_externals(self._container.pid, bundle),
            ghost_bytes=self.spec.limits.ghost_bytes,
            manage_cgroups="soft",  # as runc restores: it maps the old cgroup to the new container's
            allow=allow,
        )
        criu.dump(request, lambda: self._snapshot(into))
        # What runc restore asks for: where the first process's stdio led.
        (images / "descriptors.json").write_text('["/dev/null","/dev/null","/dev/null"]')

    def _snapshot(self, into: Path) -> None:
        layer = into / "layer"
        with disk_errors("copying the sandbox's files"):
            layer.mkdir(mode=0o755)
            copy_tree(self._upper, layer / "upper", reflink=True)
            copy_tree(self.home / "etc", layer / "etc")

    # -- private

    def _engine_saw_oom(self) -> bool:
        try:
            return bool(self._engine.inspect(self._container_id)["State"]["OOMKilled"])
        except Fault:
            return False


_CRIU_PIDS = 64
"""What a restore needs beyond the sandbox's own processes."""

# containerd takes a checkpoint's images into its content store, by their hash: two restores of one checkpoint
# at once, as in a fork, and the later one is told that they are there already.
_RETRYING = tenacity.Retrying(
    retry=tenacity.retry_if_exception(lambda error: "already exists" in str(error)),
    stop=tenacity.stop_after_attempt(40),
    wait=tenacity.wait_random(0.05, 0.5),
    reraise=True,
)


def _container_name(sandbox_id: str) -> str:
    return f"belayer-{sandbox_id}"


def _seccomp() -> str:
    return json.dumps(docker_profile(platform.machine()))
