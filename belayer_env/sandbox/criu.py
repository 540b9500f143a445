"""CRIU as Belayer uses it: its options, its deadlines, its two calls.

CRIU is called itself, for dump and restore: `runc checkpoint` and `runc restore` start it twice (a version
query first), walk the cgroups, and take about 40 ms more each for the same images.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from belayer_env.errors import CheckpointRefused, RestoreFailed, RuntimeFailed, SandboxFrozen
from belayer_env.host.command import search_path
from belayer_env.sandbox.cgroup import UNIFIED, Cgroup
from belayer_env.sandbox.criu_images import ImageUnknown, as_dumped_from_outside, with_timers_armed
from belayer_env.sandbox.criu_log import refusal, restore_failure
from belayer_env.sandbox.mounts import TMPFS_MAGIC, file_system_magic
from belayer_env.sandbox.procs import ProcStat

__all__ = [
    "RESTORABLE",
    "DumpRequest",
    "RestoreRequest",
    "await_exit",
    "dump",
    "restore",
    "run_deadlined",
    "traced_process",
]

DUMP_DEADLINE_S = 60.0
RESTORE_DEADLINE_S = 60.0
FROZEN_PATIENCE_S = 8.0
"""How long CRIU may stand still under a freezer before it counts as waiting for who is frozen."""
_LOOK_S = 0.25
COLLECT_DEADLINE_S = 3
"""CRIU's own limit for stopping all tasks; the sandbox is frozen already, so this is ample."""
_FROZEN = "the sandbox was frozen by somebody else in the middle of its checkpoint"

RESTORABLE = ("tcp-established", "ext-unix-sk", "file-locks")
"""What CRIU dumps only when told to, and loses or fails on if the restore is not told as well."""

# The network namespace comes back empty (an action script brings its loopback up) and nothing is locked: the
# sandbox is frozen, and nobody outside can reach it.
_COMMON = ("--empty-ns", "net", "--network-lock", "skip", "--link-remap")
_LINK_REMAP = b"link_remap."
_CACHE_DIR = Path("/dev/shm/belayer-criu")


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """One dump: of the tree under ``pid`` (host pid of the container's init), into ``images``.

    ``externals``: --external arguments, the mounts that come from outside. ``freezer``: the frozen cgroup.
    ``manage_cgroups``: "ignore" where the restore is to choose the cgroups, or a mode that it needs in the
    images. ``allow``: those of `RESTORABLE` that the restore will be told of as well; what needs another one
    is refused. ``from_inside``: dump from inside the tree's network namespace, for less of a pause (see
    `criu_images`). ``plain_tmpfs``: do not compress what lies in a tmpfs; for a `restore` of ours only."""

    criu: Path
    pid: int
    root: Path
    images: Path
    work: Path
    freezer: Path
    externals: tuple[str, ...]
    ghost_bytes: int
    manage_cgroups: str = "ignore"
    allow: Sequence[str] = RESTORABLE
    from_inside: bool = False
    plain_tmpfs: bool = False

    def argv(self) -> list[str]:
        """The command line."""
        argv = ["nsenter", f"--net=/proc/{self.pid}/ns/net"] if self.from_inside else []
        argv += [str(self.criu), "dump", "--no-default-config", "-v2", "-o", "dump.log", "-t", str(self.pid)]
        argv += ["-D", str(self.images), "-W", str(self.work), "--root", str(self.root)]
        argv += ["--leave-running", "--freeze-cgroup", str(self.freezer)]
        argv += [f"--manage-cgroups={self.manage_cgroups}", "--timeout", str(COLLECT_DEADLINE_S)]
        argv += [*_COMMON, "--ghost-fiemap", *(f"--{option}" for option in self.allow)]
        argv += ["--ghost-limit", str(self.ghost_bytes)]
        return argv + _external(self.externals)


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """One restore: from ``images`` into a new tree under the mounted ``root``.

    ``externals``: --external arguments, what to bind where. ``cgroups``: existing directories that the tree
    is to live in, one a hierarchy. ``action_script`` brings the loopback up. ``pid_file`` gets init's host
    pid."""

    criu: Path
    root: Path
    images: Path
    work: Path
    pid_file: Path
    externals: tuple[str, ...]
    cgroups: tuple[Path, ...]
    action_script: Path
    ghost_bytes: int

    def argv(self) -> list[str]:
        """The command line."""
        argv = [str(self.criu), "restore", "--no-default-config", "-v2", "-o", "restore.log"]
        argv += ["--restore-detached", "-D", str(self.images), "-W", str(self.work), "--root", str(self.root)]
        argv += ["--pidfile", str(self.pid_file), "--manage-cgroups=ignore", *_COMMON]
        argv += [f"--{option}" for option in RESTORABLE]
        # Sizes, not build ids: the files come from the same snapshot, and reading ELF notes takes time.
        argv += ["--file-validation", "filesize", "--action-script", str(self.action_script)]
        argv += ["--ghost-limit", str(self.ghost_bytes)]
        return argv + _external(self.externals)


def dump(request: DumpRequest, snapshot: Callable[[], None]) -> None:
    """Dump a frozen tree, and call ``snapshot`` (of its files) while nothing has run since.

    A file that lives on only through a second, removed name gets a temporary link from CRIU, which it takes
    away as it ends; then the snapshot must come before that. Rare and seen from the images, so only then is
    the dump made again with CRIU calling back.

    Raises:
        CheckpointRefused: with the cause, as read from the log.
        SandboxFrozen: somebody else froze it meanwhile. ``begun``: CRIU had to be killed over it.
        StoreFull: no room for the images."""
    if not _dump_once(request, ()):
        request = replace(request, from_inside=False)
        _start_over(request)
        _dump_once(request, ())
    if _LINK_REMAP in _read(request.images / "files.img"):
        _start_over(request)
        _dump_calling_back(request, snapshot)
    else:
        snapshot()


def restore(request: RestoreRequest) -> None:
    """Bring a dumped tree back to life; its processes run when this returns.

    CRIU starts inside the sandbox's cgroups: what it forks is there from the first instant.

    Raises:
        RestoreFailed: with CRIU's first errors."""
    request.pid_file.unlink(missing_ok=True)
    argv = _with_kernel_cache(request.argv(), cgroups=request.cgroups)
    try:
        code = run_deadlined(argv, timeout_s=RESTORE_DEADLINE_S, env=_without_gzip(request.work))
    except TimeoutError as error:
        raise RestoreFailed(f"the checkpoint did not restore: {error}") from error
    if code != 0:
        raise restore_failure(_read(request.work / "restore.log").decode(errors="replace"), code)


def traced_process(procs: Iterable[ProcStat]) -> ProcStat | None:
    """A process that a debugger holds: CRIU cannot stop it, and would wait for its own time-out."""
    for proc in procs:
        for status in Path(f"/proc/{proc.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):
                tracer = re.search(rb"^TracerPid:\t(\d+)", status.read_bytes(), re.MULTILINE)
                if tracer is not None and tracer[1] != b"0":
                    return proc
    return None


def run_deadlined(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    watch: Callable[[int], None] | None = None,
) -> int:
    """Exit status of a command that gets no stdio; at the deadline, or on any interrupt, its whole process
    group is killed. ``env`` None: this process's environment. ``watch`` is called with the command's pid now
    and then; what it raises ends the command.

    Raises:
        TimeoutError: it ran past ``timeout_s``."""
    # No pipe: what a detached container inherits would keep it open for ever.
    null = subprocess.DEVNULL
    process = subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True, env=env)
    code, ended = await_exit(process, timeout_s=timeout_s, watch=watch)
    if not ended:
        raise TimeoutError(f"{Path(argv[0]).name} ran past {timeout_s:g} s")
    return code


def await_exit(
    process: subprocess.Popen[bytes], *, timeout_s: float, watch: Callable[[int], None] | None = None
) -> tuple[int, bool]:
    """Exit status of a process group's leader, and whether it ended by itself: at the deadline, or on any
    interrupt, the whole group is killed. ``watch``: see `run_deadlined`."""
    ended = False
    try:
        # Popen.wait polls by the clock and would add up to 50 ms.
        pidfd = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            until = time.monotonic() + timeout_s
            while not ended and (left_s := until - time.monotonic()) > 0:
                ended = bool(poll.poll((left_s if watch is None else min(left_s, _LOOK_S)) * 1000))
                if watch is not None and not ended:
                    watch(process.pid)
        finally:
            os.close(pidfd)
    finally:
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return code, ended


def _external(externals: Iterable[str]) -> list[str]:
    return [word for external in externals for word in ("--external", external)]


def _with_kernel_cache(argv: Sequence[str], *, cgroups: Sequence[Path] = ()) -> list[str]:
    """The command, started in these cgroups, and with a tmpfs at /run in a mount namespace of its own where
    the host's /run is none.

    CRIU probes the kernel at every start (30 to 50 ms) and caches what it found in /run/criu.kdat, but only
    on a tmpfs. A host with a tmpfs there, as systemd makes it, needs nothing of this."""
    enter = "".join(f"echo 0 >{shlex.quote(f'{path}/cgroup.procs')} || exit 97; " for path in cgroups)
    run_is_tmpfs = file_system_magic(Path("/run")) == TMPFS_MAGIC
    if run_is_tmpfs or file_system_magic(Path("/dev/shm")) != TMPFS_MAGIC:
        return ["sh", "-c", f'{enter}exec "$0" "$@"', *argv] if cgroups else list(argv)
    _CACHE_DIR.mkdir(mode=0o700, exist_ok=True)
    script = f'{enter}mount --bind "$0" /run && exec "$@"'
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, str(_CACHE_DIR), *argv]


def _without_gzip(work: Path) -> dict[str, str]:
    """An environment in which `gzip` copies.

    CRIU has tar compress what lies in a tmpfs, /dev/shm above all: 25 ms a megabyte, in the pause. It has no
    option for that; but tar runs the `gzip` that is first on the PATH, to pack and (`gzip -d`) to unpack."""
    directory = work / "plain"
    directory.mkdir(exist_ok=True)
    script = directory / "gzip"
    if not script.exists():
        script.write_text("#!/bin/sh\nexec cat\n")
        script.chmod(0o700)
    return {**os.environ, "PATH": f"{directory}:{search_path()}"}


def _start_over(request: DumpRequest) -> None:
    shutil.rmtree(request.images)
    request.images.mkdir(mode=0o700)


def _dump_once(
    request: DumpRequest, extra: Sequence[str], is_snapping: Callable[[], bool] = lambda: False
) -> bool:
    """False: dumped, but with images that cannot be made right; it must be done from outside.
    ``is_snapping``: whether CRIU waits for us at this moment."""
    try:
        argv = _with_kernel_cache([*request.argv(), *extra])
        env = _without_gzip(request.work) if request.plain_tmpfs else None
        watch = _FreezeWatch(request.freezer, is_snapping)
        code = run_deadlined(argv, timeout_s=DUMP_DEADLINE_S, env=env, watch=watch)
    except TimeoutError as error:
        raise CheckpointRefused(f"the sandbox cannot be checkpointed: {error}", cause="deadline") from error
    if watch.has_thawed:
        raise SandboxFrozen(_FROZEN)
    if code < 0:
        message = f"the sandbox cannot be checkpointed: CRIU was killed by signal {-code}"
        raise CheckpointRefused(message, cause="killed")
    if code != 0:
        log = _read(request.work / "dump.log").decode(errors="replace")
        refused = refusal(log, ghost_bytes=request.ghost_bytes)
        if isinstance(refused, CheckpointRefused) and refused.cause == "deadline" and watch.is_waiting():
            raise SandboxFrozen(_FROZEN) from refused  # before it held them all: it has let go of them itself
        raise refused
    _arm_timers(request.images)
    if request.from_inside:
        inventory = request.images / "inventory.img"
        try:
            inventory.write_bytes(as_dumped_from_outside(inventory.read_bytes()))
        except ImageUnknown:
            return False
    return True


class _FreezeWatch:
    """Notices when CRIU waits for a tree that somebody else has frozen, and thaws it, so that CRIU can end
    and let go of it; what was dumped is then worth nothing.

    CRIU thaws what we have frozen as soon as it holds every task, and freezes it again as its last act: in
    between, it needs them. A freeze that it waits for longer than `FROZEN_PATIENCE_S` is not ours, unless it
    waits for the disk, or for our snapshot: on a busy disk each has been seen to take seconds."""

    def __init__(self, freezer: Path, is_snapping: Callable[[], bool]) -> None:
        v1 = (freezer / "freezer.state").exists()
        self._cgroup = Cgroup({"freezer" if v1 else UNIFIED: freezer})
        self._is_snapping = is_snapping
        self._since_s: float | None = None
        self._looked_s = 0.0
        self._seen_ticks = -1
        self.has_thawed = False

    def is_waiting(self) -> bool:
        """Whether CRIU had stood still under a freezer for a good part of `COLLECT_DEADLINE_S` when last
        looked at."""
        return self._since_s is not None and self._looked_s - self._since_s >= COLLECT_DEADLINE_S / 3

    def __call__(self, pid: int) -> None:
        """One look at CRIU, process ``pid``.

        Raises:
            SandboxFrozen: it has been frozen once more."""
        now_s, ticks, state = time.monotonic(), *_cpu_ticks(pid)
        self._looked_s = now_s
        goes_on = ticks != self._seen_ticks or state == "D" or self._is_snapping()
        if goes_on or not self._cgroup.is_frozen():
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= FROZEN_PATIENCE_S:
            if self.has_thawed:
                raise SandboxFrozen(f"{_FROZEN}, repeatedly", begun=True)
            self.has_thawed = True
            self._since_s = None
            with contextlib.suppress(RuntimeFailed):
                self._cgroup.thaw(1.0)
        self._seen_ticks = ticks


def _cpu_ticks(pid: int) -> tuple[int, str]:
    """Clock ticks on a CPU so far, and the state's letter; -1 and "X" of a process that is gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1, "X"
    return int(words[11]) + int(words[12]), words[0].decode()


def _arm_timers(images: Path) -> None:
    for image in (*images.glob("core-*.img"), images / "files.img"):
        with contextlib.suppress(FileNotFoundError):
            before = image.read_bytes()
            try:
                after = with_timers_armed(before)
            except ImageUnknown as error:
                message = (
                    f"the sandbox cannot be checkpointed: {image.name} of this CRIU is new to us ({error})"
                )
                raise CheckpointRefused(message, cause="unknown-image") from error
            if after != before:
                image.write_bytes(after)


def _dump_calling_back(request: DumpRequest, snapshot: Callable[[], None]) -> None:
    """A dump that stops after its images are written, until the snapshot has been taken."""
    here = request.work
    for fifo in ("dumped", "snapped"):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(here / fifo, 0o600)
    script = here / "post-dump.sh"
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f'echo dumped >"{here}/dumped" && read -r go <"{here}/snapped" && [ "$go" = ok ]\n'
    )
    script.chmod(0o700)
    with _Snapper(here / "dumped", here / "snapped", snapshot) as snapper:
        _dump_once(request, ("--action-script", str(script)), lambda: snapper.is_snapping)
    snapper.raise_for_failure()


class _Snapper:
    """Takes the snapshot in a thread of its own when CRIU says it is time, and lets CRIU go on."""

    def __init__(self, dumped: Path, snapped: Path, snapshot: Callable[[], None]) -> None:
        # Read-write: neither side waits for the other to open, and none is left waiting if the other dies.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._dumped, self._snapped = os.open(dumped, flags), os.open(snapped, flags)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._snapshot = snapshot
        self._error: BaseException | None = None
        self._done = False
        self.is_snapping = False
        self._thread = threading.Thread(target=self._serve, name="belayer-snapper")

    def __enter__(self) -> _Snapper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for fd in (self._dumped, self._snapped, self._stop):
            os.close(fd)

    def raise_for_failure(self) -> None:
        """Pass on what the snapshot met.

        Raises:
            CheckpointRefused: CRIU never called."""
        if self._error is not None:
            raise self._error
        if not self._done:
            raise CheckpointRefused("CRIU ended without calling for the snapshot")

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._dumped, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        if self._dumped not in {fd for fd, _ in poll.poll()}:
            return
        answer = b"failed\n"
        self.is_snapping = True
        try:
            self._snapshot()
            self._done = True
            answer = b"ok\n"
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits for the dump
            self._error = error
        self.is_snapping = False
        os.write(self._snapped, answer)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
