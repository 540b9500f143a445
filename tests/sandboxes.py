"""Sandboxes for the tests: made, saved, restored, and what they may not leave on the host. Bytes, seconds."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer_env.sandbox.base import Sandbox, SandboxRuntime, Saved
from belayer_env.sandbox.layers import LayerStore
from belayer_env.spec import MIB, Limits, SandboxSpec

__all__ = ["Checkpoint", "Sandboxes", "traces"]

_CGROUPS = Path("/sys/fs/cgroup")
_COUNT = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a sandbox saved, and what it was made from."""

    directory: Path
    saved: Saved
    spec: SandboxSpec


class Sandboxes:
    """Makes sandboxes of one runtime below one directory; `close` is owed and removes whatever is left.

    Every home is named after the directory, so that `traces` can tell our things from other people's."""

    def __init__(self, runtime: SandboxRuntime, layers: LayerStore, directory: Path, image: str) -> None:
        self.runtime = runtime
        self.image = image
        self.layers = layers
        self._directory = directory

        self._made: list[Sandbox] = []
        self._homes: list[Path] = []

    def new_home(self) -> Path:
        home = self._directory / f"{self._directory.name}-{os.getpid()}-{next(_COUNT)}"
        home.mkdir()
        self._homes.append(home)
        return home

    def spec(self, *, image: str | None = None, workdir: str = "/root", **limits: Any) -> SandboxSpec:
        given = {
            "memory_bytes": 512 * MIB,
            "pids": 256,
            "step_timeout_s": 30.0,
            "kill_grace_s": 0.5,
            **limits,
        }
        return SandboxSpec(image=image or self.image, workdir=workdir, limits=Limits(**given))

    def create(self, *, image: str | None = None, workdir: str = "/root", **limits: Any) -> Sandbox:
        spec = self.spec(image=image, workdir=workdir, **limits)
        sandbox = self.runtime.create(spec, self.new_home())
        self._made.append(sandbox)
        return sandbox

    def save(self, sandbox: Sandbox) -> Checkpoint:
        """A checkpoint; the sandbox has proven that it goes on."""
        into = self._directory / f"saved-{os.getpid()}-{next(_COUNT)}"
        saved = sandbox.save(into)
        checkpoint = Checkpoint(into, saved, sandbox.spec)
        answer = sandbox.run("echo ok")
        assert (answer.output, answer.exit_code) == ("ok\n", 0)
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> Sandbox:
        home = self.new_home()
        sandbox = self.runtime.restore(checkpoint.spec, checkpoint.directory, checkpoint.saved.meta, home)
        self._made.append(sandbox)
        return sandbox

    def reborn(self, sandbox: Sandbox) -> Sandbox:
        """Saved, killed, removed, and restored."""
        checkpoint = self.save(sandbox)
        sandbox.kill()
        sandbox.destroy()
        return self.restore(checkpoint)

    def close(self) -> None:
        for sandbox in self._made:
            sandbox.destroy()
        self._made.clear()
        for path in self._directory.glob("saved-*"):
            self.layers.drop(path)

    def homes_left(self) -> list[Path]:
        return [home for home in self._homes if home.exists()]


def traces(directory: Path) -> frozenset[str]:
    """All that the sandboxes below this directory have on the host now, one line a thing."""
    tag = directory.name
    found = {f"mount {line.split()[4]}" for line in _lines(Path("/proc/self/mountinfo")) if tag in line}
    found |= {f"cgroup {path}" for path in _CGROUPS.glob(f"*belayer*{tag}*")}
    found |= {f"cgroup {path}" for path in _CGROUPS.glob(f"*/*belayer*{tag}*")}
    found |= {f"file {path}" for path in directory.glob("*") if path.name != "images"}
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if f"/{tag}/" in (text := backing.read_text()):
                found.add(f"loop device of {text.strip()}")
    found |= {f"process {line}" for line in _processes(tag)}
    found |= {f"descriptor of {line}" for line in _descriptors(tag)}
    return frozenset(found)


def _processes(tag: str) -> Iterator[str]:
    """Whoever has our directory in its command line: runc, CRIU and what starts them. (The processes inside
    are seen by their cgroup.)"""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"/{tag}/" in argv and process.name != str(os.getpid()):
                yield f"{process.name} {argv}"


def _descriptors(tag: str) -> Iterator[str]:
    """This process's own, by the home that they lead into; pidfds lead nowhere and are counted."""
    pidfds = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if f"/{tag}/" in target:
                yield target.partition(f"/{tag}/")[2].partition("/")[0]
            pidfds += target == "anon_inode:[pidfd]"
    yield f"pidfd, {pidfds} times"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
