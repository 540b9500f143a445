"""What processes share, found and removed."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from belayer_rollout.shared_memory import remove_shared_memory, shared_memory_of

CHILD = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print(segment.name, lock._semlock.name, flush=True)
time.sleep(600)
"""


def test_it_is_found_by_who_maps_it() -> None:
    segment = SharedMemory(create=True, size=4096)
    try:
        assert segment.name in shared_memory_of(["self"])
        assert segment.name in shared_memory_of([os.getpid()])
        remove_shared_memory([segment.name])  # which is in use here
        assert Path("/dev/shm", segment.name).exists()
    finally:
        segment.close()
        segment.unlink()
    assert segment.name not in shared_memory_of(["self"])


def test_what_a_killed_process_shared_is_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        segment, semaphore = child.stdout.readline().split()
        names = shared_memory_of([child.pid])
        # Its tracker would clean up after it; here it is killed as well, as by a container's end.
        subprocess.run(["pkill", "-9", "-P", str(child.pid)], check=True)
        child.kill()
    assert names == {segment, f"sem.{semaphore.removeprefix('/')}"}
    assert all(Path("/dev/shm", name).exists() for name in names)
    remove_shared_memory(names)
    remove_shared_memory(names)
    assert not any(Path("/dev/shm", name).exists() for name in names)
