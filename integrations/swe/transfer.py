"""Files into and out of a sandbox by its shell alone: the image needs `tar`, `base64`, `head` and `tail`."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from belayer_env.errors import InvalidInput
from belayer_env.sandbox.base import Sandbox

__all__ = ["read_bytes", "unpack_command"]

_LEFT_OUT = frozenset({"__pycache__", ".git", ".pytest_cache"})
_LINE = 76
_LONG_AGO_S = 946684800
"""2000-01-01: one time for all files; not 0, as zip files know no year before 1980."""


def unpack_command(folder: Path, into: str = ".") -> str:
    """A shell command that makes a copy of ``folder``'s files in ``into``. The same folder gives the same
    command: names in order, one time for all, no owners.

    Raises:
        InvalidInput: there is no such folder."""
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no folder")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, path in _files(folder):
            entry = tarfile.TarInfo(str(name))
            entry.size = path.stat().st_size
            entry.mtime = _LONG_AGO_S
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as content:
                tar.addfile(entry, content)
    text = base64.b64encode(buffer.getvalue()).decode()
    lines = "\n".join(text[start : start + _LINE] for start in range(0, len(text), _LINE))
    return f"mkdir -p {into} && base64 -d <<'FILES' | tar -x -f - -C {into}\n{lines}\nFILES"


def read_bytes(sandbox: Sandbox, path: str, *, most_bytes: int = 16 * 1024 * 1024) -> bytes:
    """What a file in the sandbox holds, up to ``most_bytes``; nothing where there is no such file.

    It goes out in slices that fit the longest observation that the sandbox's limits allow, as base64."""
    slice_bytes = max(48, (sandbox.spec.limits.output_bytes // 2) * 3 // 4)
    parts: list[bytes] = []
    start = 0
    while start < most_bytes:
        found = sandbox.run(
            f"tail -c +{start + 1} {path} 2>/dev/null | head -c {slice_bytes} | base64 | tr -d '\\n'"
        )
        part = base64.b64decode(found.output)
        parts.append(part)
        start += len(part)
        if len(part) < slice_bytes:
            break
    return b"".join(parts)[:most_bytes]


def _files(folder: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not _LEFT_OUT & set(name.parts):
            yield PurePosixPath(*name.parts), path
