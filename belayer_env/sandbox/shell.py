"""The host side of a sandbox's persistent shell: one directory of FIFOs, bind-mounted at /belayer.

    step      the command to run, written by the host       req     host -> shell: "run N", "ping N"
    state     what a new shell starts from                  ctl     shell -> host: "ready", "begin", "end",
    "pong"; out.N     stdout and stderr of command N                        init -> host: "exit CODE" when a
    shell ended

No exec per command, nothing that CRIU cannot dump (FIFOs, opened by path), and no waiting by the clock: the
host polls the FIFOs together with a pidfd of the container's init. Every command has an output FIFO of its
own, so what a background job prints later never mixes with a later command; it is read and dropped
(`LateOutput`).
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from belayer_env.errors import Fault, InvalidInput, NotText, SandboxAstray, SandboxFrozen, SandboxHung
from belayer_env.sandbox.late_output import LATE_OUTPUT
from belayer_env.sandbox.output import OutputBuffer
from belayer_env.sandbox.procs import ProcStat, below, foreground
from belayer_env.spec import ExecResult

__all__ = [
    "CHANNEL_MOUNT",
    "MAX_COMMAND_BYTES",
    "ChannelContents",
    "ChannelPeer",
    "ShellChannel",
    "check_command",
    "populate_channel",
]

CHANNEL_MOUNT = "/belayer"
MAX_COMMAND_BYTES = 12 * 1024**2
"""The channel, a tmpfs of 32 MB, holds two at once, and the shell's state beside them."""
TIMED_OUT_CODE = 124
"""Exit code of a command that was ended at its time limit, as timeout(1) has it."""

_GIVE_UP_SIGNAL = 41  # also in loop.bash
_SCRIPTS = ("init.sh", "loop.bash", "loop.sh")
_STEP = "step"
"""The command under way, or the last one."""
_CHUNK = 1 << 16
_MESSAGES_A_TURN = 1 << 10
_DRAIN_TURNS = 64
_FREEZE_CHECK_S = 0.5
_KILL_ROUND_S = 0.05
_BEGIN_DEADLINE_S = 10.0
_STOPPED_CHECKS = 2
"""A shell found stopped this often, `_FREEZE_CHECK_S` apart, while it should answer will not answer."""
_SHELL_START_S = 20.0
_STILLBORN_SHELLS = 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ChannelPeer(Protocol):
    """What the channel must know of the container behind it."""

    def init_pidfd(self) -> int:
        """A pidfd of the container's init; readable once it is dead."""

    def death(self, *, begun: bool) -> Fault:
        """The fault that says how init died."""

    def is_frozen(self) -> bool:
        """Whether the container's cgroup is frozen."""

    def procs(self) -> list[ProcStat]:
        """Its processes now."""


class _Event(enum.Enum):
    READY = "ready"
    BEGIN = "begin"
    END = "end"
    PONG = "pong"
    EXIT = "exit"


@dataclass(frozen=True, slots=True)
class _Message:
    event: _Event
    numbers: tuple[int, ...]


def check_command(command: str) -> bytes:
    """The bytes to run.

    Raises:
        NotText: it is none.
        InvalidInput: it holds a NUL byte or a lone surrogate, or is longer than `MAX_COMMAND_BYTES`."""
    if not isinstance(command, str):
        raise NotText(f"a command is text, not {type(command).__name__}")
    if "\0" in command:
        raise InvalidInput(
            "a command cannot hold a NUL byte: no shell can read it; use printf '\\000' to make one"
        )
    try:
        data = command.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a command must be valid Unicode: {error}") from error
    if len(data) > MAX_COMMAND_BYTES:
        raise InvalidInput(
            f"a command of {len(data)} bytes is too long (at most {MAX_COMMAND_BYTES}): write a file in parts"
        )
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelContents:
    """What a channel directory is filled with: by default, for a fresh sandbox.

    ``state``: what a new shell starts from. ``last_run``: number of the run that the shell has ended last, 0
    if none, None if that is not known. ``last_pid``: the pid that its namespace gave out last, 0 if that is
    not known. ``late_fifos``: output FIFOs that background jobs still hold.
    ``scripts``: those that the sandbox's processes have open, name to text, which a later Belayer may have
    changed; empty: this Belayer's. Among them the last command: a shell other than bash reads it piece by
    piece, and what it has just forked has it open until it first runs."""

    state: bytes = b""
    last_run: int | None = 0
    last_pid: int = 0
    late_fifos: tuple[str, ...] = ()
    scripts: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint; ``from_json`` is the inverse."""
        return {
            "shell_state": self.state.hex(),
            "last_run": self.last_run,
            "last_pid": self.last_pid,
            "late_fifos": list(self.late_fifos),
            "scripts": dict(self.scripts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, with_processes: bool) -> ChannelContents:
        """For a restore. Without processes nobody holds a FIFO or a script."""
        # Earlier versions wrote neither last_run nor last_pid.
        state, last_run = bytes.fromhex(data["shell_state"]), data.get("last_run")
        if not with_processes:
            return cls(state=state, last_run=last_run)
        return cls(
            state=state,
            last_run=last_run,
            last_pid=data.get("last_pid", 0),
            late_fifos=tuple(data["late_fifos"]),
            scripts=data["scripts"],
        )


def populate_channel(directory: Path, contents: ChannelContents, *, owner: int) -> None:
    """Fill a new channel directory.

    ``owner`` is the uid and gid of its files on the host: one that the sandbox's user namespace does not map
    keeps the sandbox's root from removing or replacing them."""
    for script in _SCRIPTS:
        text = contents.scripts.get(script) or resources.files(__package__).joinpath(script).read_text()
        _write(directory / script, text.encode(), owner, 0o644)
    if (step := contents.scripts.get(_STEP)) is not None:
        _write(directory / _STEP, step.encode(), owner, 0o644)
    for fifo in ("req", "ctl", *contents.late_fifos):
        os.mkfifo(directory / fifo)
        (directory / fifo).chmod(0o666)
        os.chown(directory / fifo, owner, owner)
    _write(directory / "state", contents.state, owner, 0o644)
    _write(directory / "state.new", b"", owner, 0o666)
    os.chown(directory, owner, owner)


class ShellChannel:
    """A conversation with one persistent shell. Used by one thread at a time.

    `close` is owed. Make it before the container's processes run: it opens the reading ends first, so that a
    restored background job never writes into a FIFO without a reader."""

    def __init__(self, directory: Path, peer: ChannelPeer, contents: ChannelContents, *, owner: int) -> None:
        """``contents``: what the directory has been filled with."""
        self.last_pid = contents.last_pid
        self._dir = directory
        self._peer = peer
        self._owner = owner
        self._n = time.time_ns()  # never used before in this channel, in whatever life of it
        self._pending = b""
        self._shell_ns_pid = 0
        self._ready = False
        self._restarts_unseen = False
        self._last_run = contents.last_run
        # Read-write, so that neither open waits for the other side and no reader ever sees an end of file.
        self._req = os.open(directory / "req", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ctl = os.open(directory / "ctl", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        for fifo in directory.glob("out.*"):
            LATE_OUTPUT.adopt(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), fifo)

    def contents(self) -> ChannelContents:
        """What a checkpoint must carry of the channel."""
        return ChannelContents(
            state=self.shell_state(),
            last_run=self._last_run,
            last_pid=self.last_pid,
            late_fifos=tuple(sorted(fifo.name for fifo in self._dir.glob("out.*"))),
            scripts={
                script: path.read_bytes().decode()
                for script in (*_SCRIPTS, _STEP)
                if (path := self._dir / script).exists()
            },
        )

    def shell_state(self) -> bytes:
        """What a new shell would start from: a script that sets variables, functions, options and cwd."""
        return (self._dir / "state").read_bytes()

    def wait_ready(self, timeout_s: float = _SHELL_START_S) -> None:
        """Wait for a new shell's first word.

        Raises:
            Fault: init died, no word within ``timeout_s`` seconds, or shell after shell ends without one."""
        deadline = time.monotonic() + timeout_s
        num_ended = 0
        while not self._ready:
            message = self._next_message(deadline, begun=False, what="start its shell")
            self._note(message)
            num_ended += message.event is _Event.EXIT
            if num_ended > _STILLBORN_SHELLS:
                raise SandboxHung("the sandbox's shell ends as soon as it is started")

    def ping(self, timeout_s: float = 10.0) -> None:
        """Prove that the shell answers, and that it has run what the host knows of, and nothing else.

        Raises:
            SandboxAstray: it has run something else.
            Fault: it does not answer within ``timeout_s`` seconds."""
        self._n += 1
        self._request(b"ping %d" % self._n)
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._next_message(deadline, begun=False, what="answer a ping")
            self._note(message)
            if message.event is _Event.PONG and message.numbers[:1] == (self._n,):
                self._ready = True
                self.last_pid = message.numbers[3] if len(message.numbers) > 3 else 0
                self._refuse_astray(message.numbers[2:], begun=False)
                return

    def run(self, command: str, *, timeout_s: float, grace_s: float, output_bytes: int) -> ExecResult:
        """Run one command; see `Sandbox.run`."""
        data = check_command(command)
        self._catch_up()
        self._n += 1
        started = time.monotonic()
        run = _Run(
            number=self._n,
            since_ticks=int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S),
            deadline=started + timeout_s,
            begin_deadline=started + _BEGIN_DEADLINE_S,
            output=OutputBuffer(output_bytes),
        )
        fifo = self._dir / f"out.{self._n}"
        os.mkfifo(fifo)
        fifo.chmod(0o666)
        run.fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _write(self._dir / _STEP, data + b"\n", self._owner, 0o644)
            self._request(b"run %d" % self._n)
            self._follow(run, grace_s)
            self._drain(run)
        finally:
            # Still held by a background job, or by a container that is no more: either way read to its end.
            LATE_OUTPUT.adopt(run.fd, fifo)
        restarted = run.shell_ended or self._restarts_unseen
        self._restarts_unseen = False
        return ExecResult(
            output=run.output.text(),
            exit_code=TIMED_OUT_CODE if run.timed_out else run.code,
            timed_out=run.timed_out,
            output_truncated=run.output.truncated,
            shell_restarted=restarted,
            duration_s=time.monotonic() - started,
        )

    def close(self) -> None:
        """Let go of the FIFOs. Idempotent."""
        for name in ("_req", "_ctl"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)
        LATE_OUTPUT.forget(self._dir)

    # -- one run

    def _follow(self, run: _Run, grace_s: float) -> None:
        """Carry a run to its end: reads what comes, acts on each message, ends the command at its
        deadline.

        Raises:
            SandboxHung: the shell does not even begin, or is found stopped at the deadline. (A stopped shell
                has run past no time limit: nobody let it run.)"""
        while not run.ended:
            now = time.monotonic()
            if not run.begun and now >= run.begin_deadline:
                raise self._never_begun(run, f"did not begin a command within {_BEGIN_DEADLINE_S:g} s")
            if now >= run.deadline:
                if self._is_stopped():
                    if not run.begun:
                        raise self._never_begun(run, "is stopped")
                    raise SandboxHung("the sandbox's shell was stopped in mid-command", begun=True)
                run.timed_out = True
                self._end_command(run, grace_s)
                return
            self._turn(run, min(run.deadline - now, _FREEZE_CHECK_S))
        if run.shell_ended:
            self.wait_ready()

    def _never_begun(self, run: _Run, what: str) -> SandboxHung:
        """The shell does not read its requests; and this one it will not read later, either."""
        return SandboxHung(f"the sandbox's shell {what}", begun=not self._take_back(run))

    def _take_back(self, run: _Run) -> bool:
        """Take back a request that the shell has not begun. False: it has read some of it, and may still act
        on that."""
        return not run.begun and b"run %d\n" % run.number in self._withdraw_request()

    def _turn(self, run: _Run, wait_s: float) -> None:
        """Wait for something to happen, at most ``wait_s`` seconds, and take it in."""
        ready = self._poll(run.fd if not run.fd_at_end else -1, wait_s)
        if run.fd in ready:
            self._read_output(run)
        if self._ctl in ready:
            for message in self._read_messages():
                self._take(run, message)
        if not run.ended:
            if self._peer.init_pidfd() in ready:
                raise self._peer.death(begun=True)
            if not ready and self._peer.is_frozen():
                # Not left there, to be run whenever somebody thaws it.
                if self._take_back(run):
                    raise SandboxFrozen("the sandbox was frozen by somebody else", begun=False)
                raise SandboxFrozen("the sandbox was frozen by somebody else in mid-command", begun=True)
            if not ready and not run.begun:
                run.num_stopped = run.num_stopped + 1 if self._is_stopped() else 0
                if run.num_stopped >= _STOPPED_CHECKS:
                    raise self._never_begun(run, "is stopped")

    def _take(self, run: _Run, message: _Message) -> None:
        self._note(message)
        match message:
            case _Message(_Event.BEGIN, (n, *last_run)) if n == run.number:
                run.begun = True
                self._refuse_astray(last_run, begun=True)
            case _Message(_Event.END, (n, code)) if n == run.number:
                run.code = code
                run.ended = True
                self._last_run = n
                self._keep_state()
            case _Message(_Event.EXIT, (code,)) if run.begun:
                # The shell went with this command. (One that ends before "begin" leaves the request to its
                # heir.)
                run.code = code
                run.ended = run.shell_ended = True
            case _:
                pass

    def _end_command(self, run: _Run, grace_s: float) -> None:
        """Interrupt the foreground, then kill it, then the shell; the run has ended when this returns.

        Raises:
            Fault: not even the shell's death could be had."""
        # Looked up first: a shell other than bash dies of the signal, and what it ran is then nobody's child.
        doomed = self._foreground(run)
        self._signal_shell(_GIVE_UP_SIGNAL)
        _signal(doomed, signal.SIGINT)
        self._await_end(run, grace_s)
        until = time.monotonic() + 2 * grace_s
        while not run.ended and time.monotonic() < until:
            doomed = self._foreground(run)
            _signal(doomed, signal.SIGKILL)
            self._await_end(run, _KILL_ROUND_S)
        if not run.ended:
            self._withdraw_request()
            run.begun = True  # or never will be: with the shell the run has ended
            self._signal_shell(signal.SIGKILL)
            self._await_end(run, _SHELL_START_S)
        if not run.ended:
            raise SandboxHung("the sandbox's shell can be neither interrupted nor killed", begun=True)
        if run.shell_ended:
            self._kill_survivors(doomed)
            self.wait_ready()

    def _request(self, line: bytes) -> None:
        self._withdraw_request()  # what the sandbox itself may have written there
        try:
            # The first newline ends whatever unfinished line the shell has read already.
            os.write(self._req, b"\n%s\n" % line)
        except BlockingIOError as error:
            raise SandboxHung("somebody in the sandbox fills its shell's request FIFO") from error

    def _withdraw_request(self) -> bytes:
        """Take back what the shell has not read yet."""
        taken = b""
        for _ in range(_DRAIN_TURNS):
            try:
                taken += os.read(self._req, _CHUNK)
            except BlockingIOError:
                break
        return taken

    def _await_end(self, run: _Run, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while not run.ended and (left := until - time.monotonic()) > 0:
            self._turn(run, min(left, _FREEZE_CHECK_S))

    def _foreground(self, run: _Run) -> list[ProcStat]:
        procs = self._peer.procs()
        shell = self._shell_pid(procs)
        return [] if shell is None else foreground(procs, shell, run.since_ticks)

    def _kill_survivors(self, doomed: list[ProcStat]) -> None:
        """Kill those of them that outlived their shell, and what they have started."""
        until = time.monotonic() + _KILL_ROUND_S * 20
        roots = {(proc.pid, proc.start_ticks) for proc in doomed}
        while time.monotonic() < until:
            left = below(self._peer.procs(), roots)
            if not left:
                return
            _signal(left, signal.SIGKILL)
            time.sleep(0.002)

    def _signal_shell(self, signum: int) -> None:
        shell = self._shell_pid(self._peer.procs())
        if shell is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(shell, signum)

    def _shell_pid(self, procs: list[ProcStat]) -> int | None:
        return next((proc.pid for proc in procs if proc.ns_pid == self._shell_ns_pid), None)

    def _is_stopped(self) -> bool:
        """Whether somebody has stopped the shell with a signal."""
        return any(proc.state == "T" for proc in self._peer.procs() if proc.ns_pid == self._shell_ns_pid)

    def _read_output(self, run: _Run) -> None:
        try:
            chunk = os.read(run.fd, _CHUNK)
        except BlockingIOError:
            return
        if chunk:
            run.output.feed(chunk)
        else:
            run.fd_at_end = True  # so far: nobody has it open for writing

    def _drain(self, run: _Run) -> None:
        """Read what the pipe held when the command ended: at most its capacity, as a background job may go on
        writing for ever."""
        left = _pipe_capacity(run.fd)
        while left > 0:
            try:
                chunk = os.read(run.fd, min(_CHUNK, left))
            except BlockingIOError:
                return
            if not chunk:
                return
            run.output.feed(chunk)
            left -= len(chunk)

    def _keep_state(self) -> None:
        """Make the state that the shell has just written the one that its successor starts from."""
        with contextlib.suppress(OSError):
            (self._dir / "state.new").rename(self._dir / "state")
            _write(self._dir / "state.new", b"", self._owner, 0o666)

    # -- messages

    def _catch_up(self) -> None:
        """Take in what happened since the last command (a background job may have killed the shell)."""
        if self._peer.init_pidfd() in self._poll(-1, 0):
            raise self._peer.death(begun=False)
        for message in self._read_messages():
            self._note(message)
        if not self._ready:
            self.wait_ready()

    def _note(self, message: _Message) -> None:
        match message:
            case _Message(_Event.READY, (ns_pid,)):
                self._shell_ns_pid = ns_pid
                self._ready = True
            case _Message(_Event.PONG, (_, ns_pid, *_)):
                self._shell_ns_pid = ns_pid  # a restored shell says "ready" to nobody
            case _Message(_Event.EXIT, _):
                self._ready = False
                self._restarts_unseen = True
                self._last_run = None  # the heir's state is of some earlier run
            case _:
                pass

    def _refuse_astray(self, said: Sequence[int], *, begun: bool) -> None:
        """``said``: what the shell says it has ended last; scripts of earlier versions say nothing."""
        if said and self._last_run is not None and said[0] != self._last_run:
            raise SandboxAstray(
                f"the sandbox's shell has last run command {said[0]}, and not {self._last_run}", begun=begun
            )

    def _next_message(self, deadline: float, *, begun: bool, what: str) -> _Message:
        num_stopped = 0
        while True:
            for message in self._read_messages():
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                if self._peer.is_frozen():
                    raise SandboxFrozen("the sandbox was frozen by somebody else", begun=begun)
                raise SandboxHung(f"the sandbox did not {what} in time", begun=begun)
            ready = self._poll(-1, min(left, _FREEZE_CHECK_S))
            if self._peer.init_pidfd() in ready:
                raise self._peer.death(begun=begun)
            if not ready and self._peer.is_frozen():
                raise SandboxFrozen("the sandbox was frozen by somebody else", begun=begun)
            if not ready:
                num_stopped = num_stopped + 1 if self._is_stopped() else 0
                if num_stopped >= _STOPPED_CHECKS:
                    raise SandboxHung(f"the sandbox did not {what}: its shell is stopped", begun=begun)

    def _read_messages(self) -> Iterator[_Message]:
        """Messages that are there now. What is not of the protocol (the sandbox's root may write anything
        into its end) is dropped."""
        for _ in range(_MESSAGES_A_TURN):
            line, newline, rest = self._pending.partition(b"\n")
            if not newline:
                try:
                    # An unfinished line longer than any message is no message.
                    self._pending = self._pending[-256:] + os.read(self._ctl, _CHUNK)
                except BlockingIOError:
                    return
                continue
            self._pending = rest
            message = _parse(line)
            if message is not None:
                yield message

    def _poll(self, output: int, wait_s: float) -> set[int]:
        poll = select.poll()
        poll.register(self._ctl, select.POLLIN)
        poll.register(self._peer.init_pidfd(), select.POLLIN)
        if output >= 0:
            poll.register(output, select.POLLIN)
        # Round up: poll(0) in the last half millisecond before a deadline would spin.
        return {fd for fd, _ in poll.poll(int(wait_s * 1000 + 0.999))}


class _Run:
    """One command under way."""

    __slots__ = (
        "begin_deadline", "begun", "code", "deadline", "ended", "fd", "fd_at_end", "num_stopped", "number",
        "output", "shell_ended", "since_ticks", "timed_out",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        since_ticks: int,
        deadline: float,
        begin_deadline: float,
        output: OutputBuffer,
    ) -> None:
        self.number = number
        self.since_ticks = since_ticks
        self.deadline = deadline
        self.begin_deadline = begin_deadline
        self.num_stopped = 0
        self.output = output
        self.fd = -1
        self.fd_at_end = False
        self.code = -1
        self.begun = self.ended = self.shell_ended = self.timed_out = False


def _signal(procs: Iterable[ProcStat], signum: int) -> None:
    for proc in procs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(proc.pid, signum)


def _parse(line: bytes) -> _Message | None:
    word, *numbers = line.split(b" ")
    try:
        return _Message(_Event(word.decode("ascii")), tuple(int(n) for n in numbers))
    except ValueError:
        return None


def _write(path: Path, data: bytes, owner: int, mode: int) -> None:
    aside = path.with_name(path.name + ".aside")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
        os.fchown(fd, owner, owner)
    finally:
        os.close(fd)
    aside.rename(path)


def _pipe_capacity(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
