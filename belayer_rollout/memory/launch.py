"""Starting an owner, and ending it without a trace."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from belayer_rollout.errors import OwnerGone
from belayer_rollout.memory.client import OwnerClient

__all__ = ["OwnerProcess"]

START_TIMEOUT_S = 30.0
"""It imports no torch: 0.3 s on an idle machine, and this on a very busy one."""

END_TIMEOUT_S = 5.0


class OwnerProcess:
    """An owner that this process started, and leases until `close`. ``client`` is the lease's connection.

    ``memory`` is "host", "host-unsealed" (kernels without seals) or "cuda:N". ``linger_s`` is how long the
    owner stays once this process is gone, waiting for another one's `OwnerClient.lease`.

    Raises:
        OwnerGone: it did not come up."""

    def __init__(
        self, *, memory: str = "host", linger_s: float = 0.0, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        # mkdtemp makes it 0700: nobody else can reach the socket.
        self.directory = Path(tempfile.mkdtemp(prefix="belayer-owner-"))
        self.path = self.directory / "owner.sock"
        self._closed = False
        try:
            self._process, ours = self._spawn(memory, linger_s)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self.pid = self._process.pid
        self.client = OwnerClient(ours, timeout_s=timeout_s)
        try:
            self.generation = self.client.health().generation
        except BaseException:
            self.close()
            raise
        self.client = OwnerClient(ours)

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def pidfd(self) -> int:
        """A new descriptor that becomes readable when the owner ends; the caller closes it.

        Raises:
            OwnerGone: it has ended."""
        try:
            return os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise OwnerGone(f"the owner {self.pid} has ended") from error

    def close(self) -> None:
        """End it and remove its directory. Idempotent, never raises."""
        if self._closed:
            return
        self._closed = True
        # Its lease ends with the connection; a process that does not go then is made to.
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _spawn(self, memory: str, linger_s: float) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Listening before it starts: a client may connect at once, and is answered when the owner is up.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, theirs:
            listener.bind(os.fspath(self.path))
            listener.listen(128)
            fds = (listener.fileno(), theirs.fileno())
            command = [sys.executable, "-m", "belayer_rollout.memory.owner"]
            command += ["--listen-fd", str(fds[0]), "--lease-fd", str(fds[1])]
            command += ["--memory", memory, "--linger-s", str(linger_s)]
            try:
                # A session of its own: Ctrl-C is for the one who started it.
                process = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
        return process, ours
