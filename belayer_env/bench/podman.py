"""podman in the checkpoint bench: `podman container checkpoint -R -e` and `restore -i`."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from belayer_env.bench.contender import DIRTY, SERVER, LeftOut, Sample
from belayer_env.bench.root_tar import packed
from belayer_env.bench.timing import PeerFailed, timed, words_of
from belayer_env.host.command import search_path, which
from belayer_env.host.criu_find import find_criu
from belayer_env.sandbox.mounts import unmount_below

__all__ = ["Podman"]

_IMAGE = "belayer-bench:latest"
_FIRST, _SECOND = "first", "second"

# The same three processes that a sandbox of ours has: an init, a shell that waits, a server.
INIT = f"mkfifo /tmp/in; {SERVER} bash --noprofile --norc <>/tmp/in; wait"

OPTIONS = (
    "--network", "none",
    # Root without CAP_SYS_RESOURCE may not raise them to podman's defaults.
    "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096",
)  # fmt: skip


class Podman:
    """A podman with storage of its own, away from the user's."""

    name = "podman"

    def __init__(self, root: Path) -> None:
        """``root``: the root file system, a directory."""
        self.version = ""
        self._root = root
        self._home = Path()
        self._env: dict[str, str] = {}

    def start(self) -> None:
        """See `Contender.start`."""
        if which("podman") is None:
            raise LeftOut("podman is not installed")
        criu = find_criu()
        if criu is None:
            raise LeftOut("no CRIU; run: belayer setup")
        self._env = {**os.environ, "PATH": f"{criu.path.parent}:{search_path()}"}
        self._home = Path(tempfile.mkdtemp(prefix="belayer-podman-"))
        try:
            self.version = words_of(["podman", "--version"], env=self._env).split()[-1]
            with packed(self._root) as archive:
                timed(self._podman("import", "-", _IMAGE), env=self._env, stdin=archive)
            timed(
                self._podman("run", "-d", "--name", _FIRST, *OPTIONS, _IMAGE, "sh", "-c", INIT), env=self._env
            )
            self._exec(_FIRST, "true")
        except PeerFailed as failed:
            self.close()
            raise LeftOut(str(failed)) from failed

    def round(self) -> Sample:
        """See `Contender.round`. The pause is the whole command: it does not say how much of it is."""
        saved = self._home / "checkpoint.tar"
        self._exec(_FIRST, DIRTY)
        checkpoint_s = self._timed(
            "container", "checkpoint", "-R", "-e", str(saved), "--compress", "none", _FIRST
        )
        try:
            restore_s = self._timed("container", "restore", "-i", str(saved), "--name", _SECOND)
            restore_s += self._timed("exec", _SECOND, "true")
        finally:
            with contextlib.suppress(PeerFailed):
                self._timed("rm", "-f", "-t", "0", _SECOND)
        step_s = self._timed("exec", _FIRST, "true")
        return Sample(pause_s=checkpoint_s, checkpoint_s=checkpoint_s, restore_s=restore_s, step_s=step_s)

    def close(self) -> None:
        """See `Contender.close`."""
        if self._home == Path():
            return
        for words in (("rm", "-f", "-a", "-t", "0"), ("rmi", "-f", _IMAGE)):
            with contextlib.suppress(PeerFailed, OSError):
                self._timed(*words)
        unmount_below(self._home)
        shutil.rmtree(self._home, ignore_errors=True)
        self._home = Path()

    def _exec(self, container: str, command: str) -> None:
        self._timed("exec", container, "sh", "-c", command)

    def _timed(self, *words: str) -> float:
        return timed(self._podman(*words), env=self._env)

    def _podman(self, *words: str) -> Sequence[str]:
        return [
            "podman", "--root", str(self._home / "root"), "--runroot", str(self._home / "run"),
            "--tmpdir", str(self._home / "tmp"), "--runtime", "runc", "--cgroup-manager", "cgroupfs",
            "--events-backend", "file", "--storage-driver", "overlay", *words,
        ]  # fmt: skip
