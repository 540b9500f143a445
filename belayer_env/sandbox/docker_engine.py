"""Calls to the Docker Engine: each with a deadline, each with its errors told as ours. Seconds."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import requests
import tenacity
from docker.errors import APIError, DockerException, NotFound
from docker.utils import parse_host

from belayer_env.errors import (
    EngineUnavailable,
    Fault,
    RuntimeFailed,
    RuntimeUnavailable,
    SandboxGone,
    StoreFull,
)

__all__ = ["COMES_BACK_S", "ENGINE_TIMEOUT_S", "Engine"]

ENGINE_TIMEOUT_S = 60
"""Longest silence in one call. The longest of ours, a start from a checkpoint, takes well below a second."""
COMES_BACK_S = 20.0
"""How long a restarting Engine is waited for."""
_PROBE_TIMEOUT_S = 5
_REMOVE_DEADLINE_S = 30.0
_REMEDY = "run: belayer setup --docker"


class Engine:
    """One Docker Engine on this host. Safe to use from many threads: a client of the SDK, which is not
    documented to be, is lent to one of them at a time."""

    def __init__(self, client: docker.DockerClient | None = None) -> None:
        """With ``client`` given, that one serves all threads in turn.

        Raises:
            RuntimeUnavailable: no Engine answers, or not one that can hold sandboxes of this host."""
        self._idle: queue.LifoQueue[docker.DockerClient] = queue.LifoQueue()
        self._makes_more = client is None
        # Runtimes are never closed: with the last reference to this one, or with the process, go its sockets.
        weakref.finalize(self, _close_all, self._idle)
        if client is not None:
            self._idle.put(client)
            self._socket = getattr(client.api.get_adapter(str(client.api.base_url)), "socket_path", "")
        else:
            host = str(parse_host(os.environ.get("DOCKER_HOST") or None))
            self._socket = host.removeprefix("http+unix://") if host.startswith("http+unix://") else ""
        if not self._socket:
            raise RuntimeUnavailable(
                "the Engine is not on this host, and a sandbox's shell is reached by files; "
                f"unset DOCKER_HOST, or {_REMEDY}"
            )
        try:
            with self.client("asking the Engine what it is") as asked:
                info: dict[str, Any] = asked.info()
        except Fault as error:
            raise RuntimeUnavailable(f"no Docker Engine answers ({error}); {_REMEDY}") from error
        if info.get("Driver") != "overlay2":
            raise RuntimeUnavailable(
                f"the Engine stores layers by {info.get('Driver')!r}, where a sandbox's files cannot be "
                "reached; set its storage-driver to overlay2"
            )
        self.root = Path(info["DockerRootDir"])

    @contextlib.contextmanager
    def client(self, doing: str) -> Iterator[docker.DockerClient]:
        """A client for the time of the block; what goes wrong in there is told as ours.

        Raises:
            EngineUnavailable: it does not answer.
            SandboxGone: the container spoken of is no more.
            StoreFull: the Engine's disk is full.
            RuntimeFailed: it refuses, in its own words."""
        with _translated(doing):
            # The SDK leaks the socket of a connection that is refused.
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as knock:
                knock.settimeout(_PROBE_TIMEOUT_S)
                knock.connect(self._socket)
            lent = self._lend()
            try:
                yield lent
            finally:
                # The SDK keeps a connection for each of the last 25 URLs, and every container has its own.
                lent.close()
                self._idle.put(lent)

    def await_answering(self) -> None:
        """Wait for an Engine that is being restarted.

        Raises:
            EngineUnavailable: it did not come back in time."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(EngineUnavailable),
            stop=tenacity.stop_after_delay(COMES_BACK_S),
            wait=tenacity.wait_fixed(0.2),
            reraise=True,
        )
        retrying(self._ping)

    def start(self, container: str, *, checkpoint: str = "") -> None:
        """Start a container, from a checkpoint in its directory if one is named: the SDK cannot."""
        params = {"checkpoint": checkpoint} if checkpoint else {}
        with self.client("starting the sandbox") as client:
            api = client.api
            url = f"{api.base_url}/v{api.api_version}/containers/{container}/start"
            response = api.post(url, params=params, timeout=ENGINE_TIMEOUT_S)
            if response.status_code >= 400:
                message = _message(response)
                raise APIError(message, response=response, explanation=message)

    def inspect(self, container: str) -> dict[str, Any]:
        """What the Engine knows of a container; answers at once or not at all."""
        with self.client("inspecting the sandbox") as client:
            api = client.api
            url = f"{api.base_url}/v{api.api_version}/containers/{container}/json"
            response = api.get(url, timeout=_PROBE_TIMEOUT_S)
            if response.status_code == 404:
                raise NotFound(_message(response), response=response)
            response.raise_for_status()
            found: dict[str, Any] = response.json()
            return found

    def remove(self, container: str) -> None:
        """Remove a container, running or not, and what it had; returns once it is gone. Idempotent."""
        deadline = time.monotonic() + _REMOVE_DEADLINE_S
        while True:
            try:
                with self.client("removing the sandbox") as client:
                    client.api.remove_container(container, force=True, v=True)
            except SandboxGone:
                return
            except RuntimeFailed:
                # Somebody else is removing it, or its death is still being worked on.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def find(self, **labels: str) -> list[str]:
        """Ids of the containers that have all these labels (with "_" for "."), running or not."""
        wanted = [f"{name.replace('_', '.')}={value}" for name, value in labels.items()]
        with self.client("looking for sandboxes") as client:
            # The list inspects each one, and one may go meanwhile.
            listed = client.containers.list(all=True, filters={"label": wanted}, ignore_removed=True)
            return [str(found.id) for found in listed]

    def _ping(self) -> None:
        with self.client("waiting for the Engine") as client:
            client.ping()

    def _lend(self) -> docker.DockerClient:
        if not self._makes_more:
            try:
                return self._idle.get(timeout=2 * ENGINE_TIMEOUT_S)
            except queue.Empty as error:
                raise EngineUnavailable("the only client to the Engine is busy in other threads") from error
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return docker.from_env(timeout=ENGINE_TIMEOUT_S)


def _close_all(clients: queue.LifoQueue[docker.DockerClient]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            clients.get_nowait().close()


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except NotFound as error:
        raise SandboxGone(f"{doing}: {error.explanation or error}") from error
    except APIError as error:
        words = str(error.explanation or error)
        if "no space left" in words.lower():
            raise StoreFull(f"{doing}: the Engine's disk is full: {words}") from error
        raise RuntimeFailed(f"{doing}: the Engine refuses: {words}") from error
    except (DockerException, requests.RequestException, OSError) as error:
        raise EngineUnavailable(f"{doing}: the Docker Engine does not answer: {error}") from error


def _message(response: requests.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text or f"status {response.status_code}"
