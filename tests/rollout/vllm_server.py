"""A real vLLM API server as a process, for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["VllmServer", "vllm_server"]

START_S = 500.0
"""Until it answers: 24 s on an idle core, minutes where other tests run."""


class VllmServer:
    """A running server and the engine processes below it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def metric(self, name: str) -> float:
        """One of its Prometheus gauges."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def kill(self) -> None:
        """SIGKILL for all of it, and nothing left in shared memory. Idempotent."""
        if self.process.poll() is not None:
            return
        server = psutil.Process(self.process.pid)
        family = [server, *server.children(recursive=True)]
        segments = set().union(*(_shared_memory_of(process.pid) for process in family))
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family[1:])
        self.process.wait()
        for segment in segments:
            segment.unlink(missing_ok=True)


def _shared_memory_of(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(f"/dev/shm/psm_{line.rpartition('/psm_')[2]}") for line in lines if "/dev/shm/psm_" in line}


@contextlib.contextmanager
def vllm_server(
    model: Path, log: Path, *, max_model_len: int = 512, dtype: str = "auto"
) -> Iterator[VllmServer]:
    """Start one on a free port and wait until it answers; kill it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len)]
    argv += [
        "--dtype",
        dtype,
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
            env={
                **os.environ,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
                "TMPDIR": str(log.parent),
            },
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
