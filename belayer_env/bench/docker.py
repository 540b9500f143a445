"""The Docker Engine in the checkpoint bench: its own checkpoint, and the writable layer copied by hand."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from belayer_env.bench.contender import DIRTY, LeftOut, Sample
from belayer_env.bench.podman import INIT
from belayer_env.bench.root_tar import packed
from belayer_env.bench.timing import PeerFailed, timed, words_of
from belayer_env.host.command import which

__all__ = ["Docker"]


class Docker:
    """Containers of the Engine that answers here; see `belayer setup --docker`."""

    name = "docker"

    def __init__(self, root: Path) -> None:
        """``root``: the root file system, a directory."""
        self.version = ""
        self._root = root
        token = secrets.token_hex(4)
        self._image = f"belayer-bench:{token}"
        self._label = f"belayer-bench={token}"
        self._options = ("--network", "none", "--label", self._label)
        self._env = dict(os.environ)
        self._home = Path()
        self._engine_root = Path()
        self._first = ""
        self._upper = Path()
        self._count = 0

    def start(self) -> None:
        """See `Contender.start`."""
        if which("docker") is None:
            raise LeftOut("the docker command is not installed")
        # Imported here: the SDK costs 0.2 s that a run without Docker need not pay.
        from belayer_env.host.engine import gather_engine

        engine = gather_engine()
        if not engine.answers:
            raise LeftOut(f"no Docker Engine answers; run: belayer setup --docker ({engine.refusal})")
        if not engine.experimental:
            raise LeftOut("the Docker Engine is not in experimental mode, and has no checkpoints")
        if not engine.is_local or engine.driver != "overlay2":
            raise LeftOut(
                "the Docker Engine's writable layers cannot be reached (not local, or not overlay2)"
            )
        self._home = Path(tempfile.mkdtemp(prefix="belayer-docker-"))
        self.version = engine.version
        try:
            self._engine_root = Path(self._words("info", "--format", "{{.DockerRootDir}}"))
            with packed(self._root) as archive:
                timed(["docker", "import", "-", self._image], env=self._env, stdin=archive)
            self._first = self._words("run", "-d", *self._options, self._image, "sh", "-c", INIT)
            self._upper = self._upper_of(self._first)
            self._timed("exec", self._first, "true")
            self.round()  # a CRIU that the Engine cannot use shows here
        except PeerFailed as failed:
            self.close()
            raise LeftOut(str(failed)) from failed

    def round(self) -> Sample:
        """See `Contender.round`. Its container runs on while the layer is copied, so the two halves are not
        of one instant; a caller who wants them to be would have to stop it for both."""
        self._count += 1
        name, saved = f"c{self._count}", self._home / "upper"
        shutil.rmtree(saved, ignore_errors=True)
        self._timed("exec", self._first, "sh", "-c", DIRTY)
        checkpoint_s = self._timed("checkpoint", "create", "--leave-running", self._first, name)
        checkpoint_s += timed(["cp", "-a", str(self._upper), str(saved)], env=self._env)
        restore_s = self._restore(name, saved)
        self._timed("checkpoint", "rm", self._first, name)
        step_s = self._timed("exec", self._first, "true")
        return Sample(pause_s=checkpoint_s, checkpoint_s=checkpoint_s, restore_s=restore_s, step_s=step_s)

    def close(self) -> None:
        """See `Contender.close`."""
        if self._home == Path():
            return
        with contextlib.suppress(PeerFailed, OSError):
            # By label: an interrupted `docker create` has told nobody the name of what it made.
            for container in self._words("ps", "-aq", "--filter", f"label={self._label}").split():
                self._timed("rm", "-f", "-v", container)
        with contextlib.suppress(PeerFailed, OSError):
            self._timed("rmi", "-f", self._image)
        shutil.rmtree(self._home, ignore_errors=True)
        self._home = Path()

    def _restore(self, name: str, saved: Path) -> float:
        """Into a new container, the one way there is: layer and images put where the Engine looks."""
        images = self._engine_root / "containers" / self._first / "checkpoints" / name
        started = time.monotonic()
        second = self._words("create", *self._options, self._image, "sh", "-c", INIT)
        try:
            place = self._engine_root / "containers" / second / "checkpoints"
            place.mkdir(parents=True, exist_ok=True)
            timed(["cp", "-a", f"{saved}/.", str(self._upper_of(second))], env=self._env)
            timed(["cp", "-a", str(images), str(place)], env=self._env)
            self._timed("start", "--checkpoint", name, second)
            self._timed("exec", second, "true")
            return time.monotonic() - started
        finally:
            with contextlib.suppress(PeerFailed):
                self._timed("rm", "-f", "-v", second)

    def _upper_of(self, container: str) -> Path:
        layers = json.loads(self._words("inspect", "--format", "{{json .GraphDriver.Data}}", container))
        return Path(layers["UpperDir"])

    def _words(self, *words: str) -> str:
        return words_of(["docker", *words], env=self._env)

    def _timed(self, *words: str) -> float:
        return timed(["docker", *words], env=self._env)
