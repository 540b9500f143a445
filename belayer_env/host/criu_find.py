"""Which CRIU this process uses: $BELAYER_CRIU, the one `belayer setup` installed, or the host's own."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from belayer_env import paths
from belayer_env.errors import SetupError
from belayer_env.host.command import run, which

__all__ = ["MINIMUM", "CriuBinary", "check_criu", "find_criu", "forget", "parse_version", "read_version"]

MINIMUM = (4, 2)
"""Older ones fail on current kernels: 3.x at the split vvar area, 4.1 at any IP socket since Linux 6.16."""

Version = tuple[int, ...]

CHECK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class CriuBinary:
    """A CRIU that starts. Whether this kernel serves it is `check_criu`'s answer."""

    path: Path
    version: Version

    @property
    def is_recent(self) -> bool:
        """Whether its version is at least `MINIMUM`."""
        return self.version >= MINIMUM

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))} ({self.path})"


def parse_version(text: str) -> Version | None:
    """(4, 2, 1) from ``criu --version`` or from a package's version; None where there is none."""
    found = re.search(r"(?:Version:\s*|^(?:\d+:)?)(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found.group(1).split(".")) if found else None


def read_version(path: Path) -> Version | None:
    """What the binary itself says; None when it does not start."""
    done = run([path, "--version"], timeout_s=CHECK_TIMEOUT_S)
    return parse_version(done.output) if done.ok else None


def check_criu(binary: CriuBinary) -> str:
    """Empty when ``criu check`` passes on this kernel; else its words. About 80 ms."""
    done = run([binary.path, "check"], timeout_s=CHECK_TIMEOUT_S)
    return "" if done.ok else (done.tail(4) or f"criu check exited with {done.exit_code}")


def find_criu() -> CriuBinary | None:
    """The first recent enough one in that order, else the first that starts at all, else None. Cached per
    process and per setting of $BELAYER_CRIU, PATH and the data directory, until `forget`.

    Raises:
        SetupError: $BELAYER_CRIU is set, and what it names does not start."""
    return _find(os.environ.get("BELAYER_CRIU", ""), paths.criu_prefix(), which("criu"))


def forget() -> None:
    """Look again at the next `find_criu`: a CRIU has been installed."""
    _find.cache_clear()


@functools.cache
def _find(named: str, prefix: Path, on_path: str | None) -> CriuBinary | None:
    if named:
        version = read_version(Path(named))
        if version is None:
            raise SetupError(
                f"BELAYER_CRIU={named} does not start: name a CRIU that does, or unset BELAYER_CRIU"
            )
        return CriuBinary(Path(named), version)
    first: CriuBinary | None = None
    for path in (prefix / "usr/sbin/criu", Path(on_path) if on_path else None):
        if path is None or not path.exists():
            continue
        version = read_version(path)
        if version is None:
            continue
        binary = CriuBinary(path, version)
        if binary.is_recent:
            return binary
        first = first or binary
    return first
