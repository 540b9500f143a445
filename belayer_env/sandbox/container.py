"""One running container as the host's kernel shows it, whatever made it: its death, its freezer, its shell,
and the frame of a checkpoint. Seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from belayer_env.disk import disk_errors
from belayer_env.errors import (
    BelayerError,
    CheckpointRefused,
    Fault,
    InvalidInput,
    RuntimeFailed,
    SandboxFrozen,
    SandboxGone,
    SandboxOOM,
)
from belayer_env.sandbox import changes, criu
from belayer_env.sandbox.base import ProcessInfo, Saved
from belayer_env.sandbox.cgroup import Cgroup
from belayer_env.sandbox.pids import counting_on
from belayer_env.sandbox.procs import ProcStat, locked_mapping, read_procs
from belayer_env.sandbox.shell import ChannelContents, ShellChannel, populate_channel
from belayer_env.spec import ExecResult, SandboxSpec, Tier

__all__ = ["Container"]

LIVENESS_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 5.0
_DEATH_DEADLINE_S = 10.0
_DYING_S = 0.02
"""What a killed init takes to be gone, unless it is frozen."""
_OOM_SETTLE_S = 0.15
"""Between the first process that the OOM killer takes and init, 25 to 100 ms were seen."""


class Container:
    """The processes of one sandbox: what both runtimes do alike once the container runs. `close` is owed.

    A runtime opens the channel before the processes run, and calls `attach` as soon as init's pid is known.
    ``upper`` gives the upper directory of its overlay, once that is known. ``was_oom`` is asked about a death
    when the cgroup, and with it the kernel's count, is gone already."""

    def __init__(
        self,
        spec: SandboxSpec,
        cgroup: Cgroup,
        *,
        upper: Callable[[], Path],
        was_oom: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec = spec
        self._upper = upper
        self.cgroup = cgroup
        self.pid = 0
        self._channel: ShellChannel | None = None
        self._pidfd = -1
        self._closing = threading.Lock()
        self._oom_kills = 0
        self._was_oom = was_oom
        self._lost: str | None = None

    def open_channel(self, directory: Path, contents: ChannelContents, *, owner: int) -> None:
        """Fill a new channel directory, and take up the host's end."""
        with disk_errors("filling the shell channel"):
            populate_channel(directory, contents, owner=owner)
        self._channel = ShellChannel(directory, self, contents, owner=owner)

    def attach(self, pid: int, cgroup: Cgroup | None = None) -> None:
        """Hold on to the container's init; without ``cgroup``, to the cgroup it is in.

        Raises:
            SandboxGone: it is dead already."""
        try:
            self._pidfd = os.pidfd_open(pid)
            self.pid = pid
            self.cgroup = cgroup or Cgroup.of_pid(pid)
        except ProcessLookupError as error:
            raise SandboxGone("the sandbox's init died as it started") from error

    def greet_restored(self) -> None:
        """The first words with processes that have just been restored.

        Raises:
            Fault: they do not answer, or not as those that were saved."""
        channel = self.require()
        with counting_on(self.pid, channel.last_pid):
            channel.ping(LIVENESS_DEADLINE_S)

    def require(self) -> ShellChannel:
        """The channel of a container that is neither lost nor destroyed.

        Raises:
            SandboxGone: it is."""
        if self._lost is not None:
            raise SandboxGone(f"the sandbox is lost: {self._lost}")
        if self._channel is None:
            raise SandboxGone("the sandbox has been destroyed")
        return self._channel

    # -- what the shell channel asks (ChannelPeer)

    def init_pidfd(self) -> int:
        """See `ChannelPeer.init_pidfd`."""
        return self._pidfd

    def death(self, *, begun: bool) -> Fault:
        """See `ChannelPeer.death`."""
        # Who remembers kills for us does not tell this one from those of earlier steps.
        if self.cgroup.oom_kills() > self._oom_kills or (self._oom_kills == 0 and self._was_oom()):
            limit = self.spec.limits.memory_bytes
            return SandboxOOM(
                f"the sandbox ran out of memory (limit {limit} bytes) and died of it", begun=begun
            )
        return SandboxGone("the sandbox's init was killed", begun=begun)

    def is_frozen(self) -> bool:
        """See `ChannelPeer.is_frozen`."""
        return self.cgroup.is_frozen()

    def procs(self) -> list[ProcStat]:
        """See `ChannelPeer.procs`."""
        return read_procs(self.cgroup.pids())

    # -- Sandbox

    def run(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """See `Sandbox.run`."""
        channel = self.require()
        limits = self.spec.limits
        if self._has_died(0):
            raise self.death(begun=False)  # before its own kill is taken for one of an earlier step's
        self._note_oom_kills()
        try:
            result = channel.run(
                command,
                timeout_s=limits.step_timeout_s if timeout_s is None else timeout_s,
                grace_s=limits.kill_grace_s,
                output_bytes=limits.output_bytes,
            )
        except OSError as error:
            # The channel is full, or a pid was gone as it was to be signalled: nobody knows how far it got.
            raise RuntimeFailed(f"the sandbox's shell could not be talked to: {error}", begun=True) from error
        oom_kills = self.cgroup.oom_kills() - self._oom_kills
        if oom_kills <= 0:
            return result
        # The kernel may go on from a background job (whose end the shell has just printed) to init: then what
        # was observed is a sandbox's dying, and no step's.
        if self._has_died(_OOM_SETTLE_S):
            raise self.death(begun=True)
        self._note_oom_kills()
        return dataclasses.replace(result, oom_kills=oom_kills)

    def enter_workdir(self) -> None:
        """Make the working directory that the image lacks, as Docker does, and go there.

        Raises:
            InvalidInput: it cannot be made."""
        made = self.require().run(
            'mkdir -p -- "$BELAYER_WORKDIR" && cd -- "$BELAYER_WORKDIR"',
            timeout_s=30,
            grace_s=1,
            output_bytes=4096,
        )
        if made.exit_code != 0:
            raise InvalidInput(
                f"workdir {self.spec.workdir} cannot be made in this image: {made.output.strip()}"
            )

    def save(
        self,
        into: Path,
        *,
        tier: Tier,
        write: Callable[[], None],
        discard: Callable[[Path], None],
        settle: Callable[[], None],
        meta: Mapping[str, Any],
        with_fingerprint: bool = False,
    ) -> Saved:
        """The frame of `Sandbox.save`: ``settle``, freeze, ``write`` what the sandbox is into ``into``, thaw,
        and prove that it answers. After any error ``discard(into / "layer")`` is called and ``into`` is gone.

        ``meta`` is what the runtime adds to what a restore needs.

        Raises:
            Fault: see `Sandbox.save`."""
        channel = self.require()
        if self._has_died(0):
            raise self.death(begun=False)
        if self.is_frozen():
            channel.ping()  # raises SandboxFrozen
        instant: dict[str, Any] = {}

        def write_all() -> None:
            # Of the same instant: once thawed, a job may let go of its FIFO, and the FIFO goes.
            instant.update(channel.contents().to_json())
            write()

        try:
            into.mkdir(mode=0o700)
            if tier is Tier.FULL:
                self._refuse_traced()
                self._refuse_stopped()
                self._refuse_locked_mapping()
            channel.ping(LIVENESS_DEADLINE_S)  # with the pid that was given out last
            settle()
            before = self._look() if with_fingerprint else None
            pause_s = self._frozen(write_all)
            self._prove_alive(channel)
        except BaseException as error:
            discard(into / "layer")
            shutil.rmtree(into, ignore_errors=True)
            # Killed in mid-dump: what CRIU, or /proc, made of that is not the cause. A frozen one dies as it
            # thaws.
            if isinstance(error, (Fault, OSError)) and self._lost is None and self._has_died(_DYING_S):
                raise self.death(begun=False) from error
            if isinstance(error, OSError):
                raise RuntimeFailed(f"the sandbox could not be saved: {error}") from error
            raise
        fingerprint = changes.baseline(before, self._look()) if before is not None else None
        return Saved(
            tier=tier, pause_s=pause_s, meta={"tier": tier, **instant, **meta}, fingerprint=fingerprint
        )

    def processes(self) -> list[ProcessInfo]:
        """See `Sandbox.processes`."""
        self.require()
        procs = self.procs()
        ns_pids = {proc.pid: proc.ns_pid for proc in procs}
        return sorted(
            (ProcessInfo(pid=p.ns_pid, ppid=ns_pids.get(p.ppid, 0), argv=p.argv) for p in procs),
            key=lambda process: process.pid,
        )

    def is_alive(self) -> bool:
        """See `Sandbox.is_alive`."""
        if self._pidfd < 0 or self._lost is not None:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except OSError:
            return False
        return not _is_zombie(self.pid)

    def fingerprint(self) -> str | None:
        """See `Sandbox.fingerprint`."""
        facts = self._look()
        return changes.digest(facts) if facts is not None else None

    def answers(self) -> bool:
        """See `Sandbox.answers`."""
        try:
            self.require().ping(ANSWER_DEADLINE_S)
        except BelayerError:
            return False
        return True

    def memory_bytes(self) -> int:
        """See `Sandbox.memory_bytes`."""
        return self.cgroup.anonymous_bytes()

    def suspend(self) -> None:
        """See `Sandbox.suspend`."""
        self.require()
        self.cgroup.freeze()

    def wake(self) -> None:
        """See `Sandbox.wake`."""
        channel = self.require()
        if self._has_died(0):
            raise self.death(begun=False)
        try:
            self.cgroup.thaw()
        except RuntimeFailed as error:
            raise SandboxGone(f"the suspended sandbox did not wake: {error}") from error
        channel.ping(ANSWER_DEADLINE_S)

    def kill(self) -> None:
        """See `Sandbox.kill`. A drill may call it from a second thread while a command runs."""
        with self._closing:
            if self._pidfd < 0:
                return
            # One of our own: the first thread closes its as soon as it has seen init die.
            pidfd = os.dup(self._pidfd)
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._await_death(pidfd)
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """Kill init and let go of it and of the channel. Idempotent, never raises."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._await_death(self._pidfd)
            with self._closing:
                os.close(self._pidfd)
                self._pidfd = -1

    # -- private

    def _note_oom_kills(self) -> None:
        # A cgroup that is gone counts none.
        self._oom_kills = max(self._oom_kills, self.cgroup.oom_kills())

    def _look(self) -> changes.SandboxFacts | None:
        if self._channel is None or self._lost is not None:
            return None
        try:
            state, upper = self._channel.shell_state(), self._upper()
        except (OSError, BelayerError):
            return None
        return changes.observe(init_pid=self.pid, pids=self.cgroup.pids(), upper=upper, shell_state=state)

    def _has_died(self, wait_s: float) -> bool:
        return _is_readable(self._pidfd, wait_s)

    def _refuse_traced(self) -> None:
        traced = criu.traced_process(self.procs())
        if traced is not None:
            name = " ".join(traced.argv) or "?"
            raise CheckpointRefused(
                f"the sandbox cannot be checkpointed: a debugger holds process {traced.ns_pid} ({name})",
                cause="traced",
                culprit=name,
                pid=traced.pid,
            )

    def _refuse_stopped(self) -> None:
        """A process that a signal has stopped cannot be seized under a v1 freezer: CRIU would hang in the
        kernel (ptrace_attach waits for the stopped task to move) until its deadline, the sandbox be lost."""
        if "freezer" not in self.cgroup.paths:
            return
        stopped = next((proc for proc in self.procs() if proc.state == "T"), None)
        if stopped is not None:
            name = " ".join(stopped.argv) or "?"
            raise CheckpointRefused(
                f"the sandbox cannot be checkpointed: process {stopped.ns_pid} ({name}) is stopped by a "
                f"signal; let it go on: kill -CONT {stopped.ns_pid}",
                cause="stopped",
                culprit=name,
                pid=stopped.pid,
            )

    def _refuse_locked_mapping(self) -> None:
        """CRIU sets a POSIX lock again, and then closes the descriptor by which it has mapped the file: as
        the kernel has it, that lets go of the lock. Another process could then write in between."""
        found = locked_mapping(self.cgroup.pids())
        if found is not None:
            pid, path = found
            raise CheckpointRefused(
                f"the sandbox cannot be checkpointed: a process holds a POSIX lock on {path}, which it has "
                "mapped too (as SQLite does in WAL mode), and the lock would not come back; "
                "let it close the file",
                cause="locked-mapping",
                culprit=path,
                pid=pid,
            )

    def _frozen(self, act: Callable[[], None]) -> float:
        """Seconds from freeze to thaw around ``act``, which must finish or leave the sandbox as it was;
        anything else that ends it (a killed CRIU, an interrupt) counts the sandbox as lost."""
        started = time.monotonic()
        try:
            self.cgroup.freeze()
            act()
            if not self.cgroup.is_frozen():
                raise RuntimeFailed(
                    "somebody thawed the sandbox in the middle of its checkpoint: what was saved of its "
                    "processes and of its files may be of two instants"
                )
        except CheckpointRefused as refused:
            if refused.cause in ("deadline", "killed"):
                self._lose(f"CRIU ended in the middle of a dump: {refused}")
            raise
        except SandboxFrozen as frozen:
            if frozen.begun:
                self._lose(f"CRIU ended in the middle of a dump: {frozen}")
            raise
        except BelayerError:
            raise
        except BaseException:
            self._lose("its checkpoint was interrupted")
            raise
        finally:
            with contextlib.suppress(RuntimeFailed):
                self.cgroup.thaw()
        return time.monotonic() - started

    def _prove_alive(self, channel: ShellChannel) -> None:
        try:
            channel.ping(LIVENESS_DEADLINE_S)
        except Fault as fault:
            self._lose(f"it did not answer after its checkpoint: {fault}")
            raise

    def _lose(self, why: str) -> None:
        """A state nobody can vouch for is no state: end it."""
        self._lost = why
        with contextlib.suppress(Exception):
            self.cgroup.kill_all()

    def _await_death(self, pidfd: int) -> None:
        if not _is_readable(pidfd, _DYING_S) and self.is_frozen():
            with contextlib.suppress(RuntimeFailed):
                self.cgroup.thaw()
        _is_readable(pidfd, _DEATH_DEADLINE_S)


def _is_readable(fd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(int(wait_s * 1000)))


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
