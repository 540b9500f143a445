"""The Docker Engine: what it says of itself, and one of our own where none runs. Seconds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import psutil
import requests
from docker.errors import DockerException

from belayer_env import paths
from belayer_env.errors import SetupError
from belayer_env.host.command import search_path, which
from belayer_env.host.criu_find import CriuBinary, check_criu, find_criu, read_version
from belayer_env.host.facts import EngineFacts

__all__ = ["connection_refusal", "gather_engine", "start_engine", "stop_engine"]

LOCAL = "unix://"
DEFAULT_SOCKET = f"{LOCAL}/var/run/docker.sock"
ENGINE_TIMEOUT_S = 10
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0

# Without a bridge there are no rules to write. Sandboxes have no network, so nothing of ours is lost by it.
WITHOUT_BRIDGE = ("--iptables=false", "--bridge=none")


def gather_engine() -> EngineFacts:
    """What the Docker Engine says of itself, and the CRIU that it would find."""
    host = _address()
    installed = which("dockerd") is not None
    if refusal := connection_refusal():
        return EngineFacts(installed=installed, refusal=refusal)
    try:
        client = docker.from_env(timeout=ENGINE_TIMEOUT_S)
        try:
            info: dict[str, Any] = client.info()
        finally:
            client.close()
    except (DockerException, requests.RequestException, OSError) as error:
        return EngineFacts(installed=installed, refusal=str(error) or type(error).__name__)
    is_local = host.startswith(LOCAL)
    path = _engine_path(Path(host.removeprefix(LOCAL))) if is_local else None
    criu = _criu_on(path) if path is not None else None
    return EngineFacts(
        installed=installed,
        version=str(info.get("ServerVersion", "")),
        experimental=bool(info.get("ExperimentalBuild", False)),
        driver=str(info.get("Driver", "")),
        is_local=is_local,
        knows_criu=path is not None,
        criu=criu,
        criu_refusal=check_criu(criu) if criu is not None and criu.is_recent else "",
    )


def connection_refusal() -> str:
    """Why nobody listens at the Engine's local address; empty where somebody does, or on another host.

    To be asked before a client of the Docker SDK is made: one that cannot connect leaves its socket open."""
    host = _address()
    if not host.startswith(LOCAL):
        return ""
    try:
        _connect(Path(host.removeprefix(LOCAL))).close()
    except OSError as error:
        return f"{host}: {error.strerror or error}"
    return ""


def start_engine(*, report: Callable[[str], None] = lambda _: None) -> str:
    """See that an Engine answers: start one in experimental mode, detached, unless there is one. No
    configuration of the host is written. Says in a sentence what came of it.

    Raises:
        SetupError: there is no dockerd, or it does not come up; ends with its log's last lines."""
    facts = gather_engine()
    if facts.answers:
        return f"Docker Engine {facts.version} already answers"
    if which("dockerd") is None:
        raise SetupError(
            "There is no dockerd on this host: run `belayer setup` as root, or apt-get install docker.io"
        )
    if os.geteuid() != 0:
        raise SetupError("Only root starts the Docker Engine: sudo belayer setup --docker")
    words = ""
    for options in ((), WITHOUT_BRIDGE):
        report("starting dockerd " + " ".join(options))
        words = _start(options)
        if not words:
            version = gather_engine().version
            return f"Docker Engine {version} started in experimental mode {' '.join(options)}".rstrip()
    raise SetupError(f"dockerd does not come up:\n{words}\nIts whole log: {_log_path()}")


def stop_engine() -> str:
    """End the Engine that `start_engine` started; any other is left alone. Says what came of it."""
    process = _ours()
    if process is None:
        _record_path().unlink(missing_ok=True)
        return "no Docker Engine of ours is running"
    _end(process)
    _record_path().unlink(missing_ok=True)
    return "Docker Engine stopped"


def _start(options: tuple[str, ...]) -> str:
    """Empty when it answers; else the last lines of its log, and nothing of it is left."""
    log = _log_path()
    log.parent.mkdir(parents=True, exist_ok=True)
    criu = find_criu()
    # containerd and runc look for `criu` on the PATH that they inherit from dockerd.
    path = f"{criu.path.parent}:{search_path()}" if criu is not None else search_path()
    with log.open("wb") as sink:
        started = subprocess.Popen(
            ["dockerd", "--experimental", *options],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PATH": path},
            cwd="/",
        )
    process = psutil.Process(started.pid)
    record = {"pid": process.pid, "create_time": process.create_time()}
    try:
        _record_path().write_text(json.dumps(record))
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and started.poll() is None:
            if gather_engine().answers:
                return ""
            time.sleep(0.2)
    except BaseException:
        _end(process)
        raise
    _end(process)
    _record_path().unlink(missing_ok=True)
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-6:]) or "it wrote no log"


def _ours() -> psutil.Process | None:
    """The dockerd we started, if it still runs. The pid may be another's by now: the start time must fit."""
    try:
        record = json.loads(_record_path().read_text())
        process = psutil.Process(record["pid"])
        return process if abs(process.create_time() - record["create_time"]) < 0.01 else None
    except (FileNotFoundError, ValueError, KeyError, psutil.NoSuchProcess):
        return None


def _end(process: psutil.Process) -> None:
    """SIGTERM, by which dockerd ends its containers and containerd; after the deadline SIGKILL for both."""
    try:
        family = [process, *(child for child in process.children() if child.name() == "containerd")]
        process.terminate()
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=5)


def _log_path() -> Path:
    return paths.data_dir() / "dockerd.log"


def _record_path() -> Path:
    return paths.data_dir() / "dockerd.json"


def _address() -> str:
    return os.environ.get("DOCKER_HOST") or DEFAULT_SOCKET


def _connect(listening: Path) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(ENGINE_TIMEOUT_S)
        connected.connect(str(listening))
    except BaseException:
        connected.close()
        raise
    return connected


def _engine_path(listening: Path) -> str | None:
    """PATH of the process that starts runc for the Engine: its containerd; None where it cannot be read.

    The one who listens on the Engine's socket is dockerd, or systemd on its behalf; a containerd of its own
    is its child, and a system-wide one has a PATH of its own."""
    try:
        with _connect(listening) as probe:
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        listener = struct.unpack("3i", credentials)[0]
        containerds = [p for p in psutil.process_iter(["name", "ppid"]) if p.info["name"] == "containerd"]
        own = [process for process in containerds if process.info["ppid"] == listener]
        for process in own or containerds:
            return process.environ().get("PATH", os.defpath)
    except (OSError, psutil.Error):
        return None
    return None


def _criu_on(path: str) -> CriuBinary | None:
    found = shutil.which("criu", path=path)
    version = read_version(Path(found)) if found else None
    return CriuBinary(Path(found), version) if found and version is not None else None
