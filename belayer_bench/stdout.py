"""A report's standard output, kept clean of what others write."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stdout_to_stderr"]


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Within, what this process and its children write to standard output goes to standard error. Engines
    and trainers log to the former, which is for the report."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
