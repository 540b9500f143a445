"""A cold start, as a process of its own: `python -m belayer_rollout.bench.cold MODEL ENGINE_ARGS` starts an
engine, generates one token, prints `token`, and ends. Whoever starts it holds the clock."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belayer_rollout.errors import WorkerGone

__all__ = ["cold_start_s"]

DEADLINE_S = 600.0


def cold_start_s(model: Path, engine_args: Mapping[str, Any]) -> float:
    """Seconds from the start of a fresh interpreter to the first token of a fresh engine: imports, loading,
    initialisation, and the first request, which compiles what is compiled lazily.

    Raises:
        WorkerGone: it ended without a token."""
    argv = [sys.executable, "-m", __name__, str(model), json.dumps(dict(engine_args))]
    began = time.monotonic()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line == "token\n":
                    took = time.monotonic() - began
                    # Let it end itself: it has children.
                    process.communicate(timeout=DEADLINE_S)
                    return took
            _, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            if process.poll() is None:
                process.terminate()
    raise WorkerGone(f"the cold engine gave no token: {errors[-500:]}")


async def _one_token(model: str, engine_args: Mapping[str, Any]) -> None:
    from belayer_rollout.engines.vllm import VllmWorker

    worker = VllmWorker(model, engine_args=engine_args)
    try:
        await worker.start()
        await worker.health()
        sys.stdout.write("token\n")
        sys.stdout.flush()
    finally:
        await worker.close()


if __name__ == "__main__":
    asyncio.run(_one_token(sys.argv[1], json.loads(sys.argv[2])))
