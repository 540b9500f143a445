"""Starts a scripted engine server as a process, and takes it down again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any, Self

__all__ = ["ScriptedServer"]

ANSWER_S = 30.0


class ScriptedServer:
    """A server process on a free port of this host, ready when the constructor returns. Leaving the context
    kills it, in whatever state it is. Settings: see `scripted_script.Settings`."""

    def __init__(self, *, port: int = 0, **settings: Any) -> None:
        argv = [sys.executable, "-m", "belayer_rollout.bench.scripted_server", "--port", str(port)]
        self._process = subprocess.Popen(
            [*argv, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        word, _, ready = self._process.stdout.readline().partition(" ")
        if word != "ready":
            self.kill()
            raise RuntimeError("the scripted server did not start: see its standard error")
        self.port = int(ready)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def control(self, **settings: Any) -> None:
        """Change settings; ``faults`` replaces those still to come."""
        self._ask("/control", json.dumps(settings).encode())

    def log(self) -> dict[str, Any]:
        """What was asked of it: `requests` (prompt, max_tokens, min_tokens, request_id), `tokens`, `running`,
        `aborted`."""
        answer: dict[str, Any] = json.loads(self._ask("/control/log"))
        return answer

    def hang(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for its end. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, data=body, timeout=ANSWER_S) as answer:
            data: bytes = answer.read()
        return data
