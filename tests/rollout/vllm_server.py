"""A real vLLM API server as a process, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

__all__ = ["VllmServer", "vllm_server"]

START_S = 500.0
"""Until it answers: 24 s on an idle core, minutes where other tests run."""


class VllmServer:
    """A running server; its process group holds its engine, too."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def metric(self, name: str) -> float:
        """One of its Prometheus gauges."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def kill(self) -> None:
        """SIGKILL for all of it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def vllm_server(model: Path, log: Path, *, max_model_len: int = 512) -> Iterator[VllmServer]:
    """Start one on a free port and wait until it answers; kill it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
    argv += [
        "--kv-cache-memory-bytes",
        "64M",
        "--max-num-seqs",
        "16",
        "--enforce-eager",
        "--served-model-name",
        "tiny",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
        )
    server = VllmServer(process, port)
    try:
        _wait_until_ready(server, log)
        yield server
    finally:
        server.kill()


def _wait_until_ready(server: VllmServer, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError) as exc:
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM does not serve: {log.read_text(errors='replace')[-3000:]}") from exc
            time.sleep(0.25)
