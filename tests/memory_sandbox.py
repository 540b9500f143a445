"""A sandbox in memory that implements the protocol honestly, and faults around any sandbox.

Its commands are a few shell commands, word for word, so that what is proven here can be proven on real
sandboxes by the same tests:

    V=text            V=$((V+3)); echo $V      echo $V             echo text >>/root/list
    cat /root/list    pgrep -c sleep           (exit 3)
    touch /root/list  sleep 999                true                echo ok
    sleep 900 & until grep -q sleep /proc/$!/comm; do :; done
    cat /proc/sys/kernel/random/uuid | tee -a /root/list
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer_env.errors import (
    Fault,
    RestoreFailed,
    RuntimeFailed,
    SandboxFrozen,
    SandboxGone,
    SandboxHung,
)
from belayer_env.sandbox.base import ProcessInfo, Sandbox, SandboxRuntime, Saved
from belayer_env.sandbox.shell import check_command
from belayer_env.spec import ExecResult, SandboxSpec, Tier

__all__ = [
    "RANDOM",
    "SPAWN",
    "TIMED_OUT",
    "Faults",
    "FaultyRuntime",
    "FaultySandbox",
    "MemoryRuntime",
    "MemorySandbox",
    "State",
    "execute",
]

RANDOM = "cat /proc/sys/kernel/random/uuid | tee -a /root/list"
TIMED_OUT = "sleep 999"
SPAWN = "sleep 900 & until grep -q sleep /proc/$!/comm; do :; done"
"""Waits until the process is what it is called: a fork takes a moment to become it."""


@dataclass(slots=True)
class State:
    """What a sandbox of this little language is."""

    variables: dict[str, str] = field(default_factory=dict)
    lines: list[str] | None = None
    processes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"variables": self.variables, "lines": self.lines, "processes": self.processes}


def execute(state: State, command: str, entropy: Callable[[], str]) -> ExecResult:
    """Run one command on the state. Pure, but for ``entropy``, what the kernel's uuid file would give."""
    if command == TIMED_OUT:
        return ExecResult(output="", exit_code=124, timed_out=True)
    if command == RANDOM:
        line = entropy()
        state.lines = [*(state.lines or []), line]
        return ExecResult(output=line + "\n", exit_code=0)
    if command == "touch /root/list":
        state.lines = state.lines or []
        return ExecResult(output="", exit_code=0)
    if command == "cat /root/list":
        if state.lines is None:
            return ExecResult(output="cat: /root/list: No such file or directory\n", exit_code=1)
        return ExecResult(output="".join(line + "\n" for line in state.lines), exit_code=0)
    if command == "pgrep -c sleep":
        return ExecResult(output=f"{len(state.processes)}\n", exit_code=0 if state.processes else 1)
    if command in ("true", "echo ok"):
        return ExecResult(output="ok\n" if command == "echo ok" else "", exit_code=0)
    if match := re.fullmatch(r"([A-Z])=(\w+)", command):
        state.variables[match[1]] = match[2]
        return ExecResult(output="", exit_code=0)
    if match := re.fullmatch(r"([A-Z])=\$\(\(\1\+(\d+)\)\); echo \$\1", command):
        state.variables[match[1]] = str(int(state.variables.get(match[1], "0")) + int(match[2]))
        return ExecResult(output=state.variables[match[1]] + "\n", exit_code=0)
    if match := re.fullmatch(r"echo \$([A-Z])", command):
        return ExecResult(output=state.variables.get(match[1], "") + "\n", exit_code=0)
    if match := re.fullmatch(r"echo (\w+) >>/root/list", command):
        state.lines = [*(state.lines or []), match[1]]
        return ExecResult(output="", exit_code=0)
    if match := re.fullmatch(r"(sleep \d+) & until grep -q sleep /proc/\$!/comm; do :; done", command):
        state.processes.append(match[1])
        return ExecResult(output="", exit_code=0)
    if match := re.fullmatch(r"\(exit (\d+)\)", command):
        return ExecResult(output="", exit_code=int(match[1]))
    raise AssertionError(f"no command of this sandbox: {command!r}")


class MemoryRuntime:
    """Makes them. ``made``: all there ever were."""

    name = "memory"
    tier = Tier.FULL
    tier_reason = ""

    def __init__(self) -> None:
        self.made: list[MemorySandbox] = []

    def create(self, spec: SandboxSpec, home: Path) -> MemorySandbox:
        return self._new(spec, home, State())

    def restore(
        self, spec: SandboxSpec, saved_dir: Path, meta: Mapping[str, Any], home: Path
    ) -> MemorySandbox:
        try:
            state = State(**json.loads((saved_dir / "images" / "state.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RestoreFailed(f"the saved state cannot be read: {error}") from error
        return self._new(spec, home, state)

    def sweep(self, home: Path) -> None:
        for sandbox in self.made:
            if sandbox.home == home:
                sandbox.kill()
        shutil.rmtree(home, ignore_errors=True)

    def _new(self, spec: SandboxSpec, home: Path, state: State) -> MemorySandbox:
        (home / "running").touch()
        self.made.append(MemorySandbox(spec, home, state))
        return self.made[-1]


class MemorySandbox:
    """One of them. ``answers_no_more``: its shell is hung."""

    def __init__(self, spec: SandboxSpec, home: Path, state: State) -> None:
        self.id = home.name
        self.spec = spec
        self.tier = Tier.FULL
        self.home = home
        self.state = state
        self.answers_no_more = False
        self._is_alive = True
        self._is_suspended = False

    def run(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        check_command(command)
        self._reach()
        return execute(self.state, command, lambda: str(uuid.uuid4()))

    def run_half(self, command: str) -> None:
        """As if something had ended it in the middle of this command, with some of its effects there."""
        self._reach()
        execute(self.state, command, lambda: "half a line")
        self.state.processes.append("half a process")
        self.kill()

    def save(self, into: Path, *, previous: Path | None = None, with_fingerprint: bool = False) -> Saved:
        self._reach()
        (into / "images").mkdir(parents=True, mode=0o700)
        (into / "images" / "state.json").write_text(json.dumps(self.state.to_json()))
        meta = {"tier": self.tier, "image_digest": "none", "criu_version": "4.2.1"}
        fingerprint = self.fingerprint() if with_fingerprint else None
        return Saved(tier=self.tier, pause_s=0.0, meta=meta, fingerprint=fingerprint)

    def processes(self) -> list[ProcessInfo]:
        self._reach()
        argvs = [("init",), ("sh",), *(tuple(process.split()) for process in self.state.processes)]
        return [ProcessInfo(pid, min(pid - 1, 2), argv) for pid, argv in enumerate(argvs, start=1)]

    def answers(self) -> bool:
        return self._is_alive and not self._is_suspended and not self.answers_no_more

    def fingerprint(self) -> str | None:
        if not self.answers():
            return None
        return hashlib.sha256(json.dumps(self.state.to_json(), sort_keys=True).encode()).hexdigest()

    def memory_bytes(self) -> int:
        return 1000 * len(self.state.processes) if self._is_alive else 0

    def suspend(self) -> None:
        self._reach()
        self._is_suspended = True

    def wake(self) -> None:
        self._is_suspended = False
        self._reach()

    def is_alive(self) -> bool:
        return self._is_alive

    def kill(self) -> None:
        self._is_alive = False
        (self.home / "running").unlink(missing_ok=True)

    def destroy(self) -> None:
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def _reach(self) -> None:
        if not self._is_alive:
            raise SandboxGone("the sandbox's init was killed")
        if self._is_suspended:
            raise SandboxFrozen("the sandbox is frozen")
        if self.answers_no_more:
            raise SandboxHung("the sandbox's shell does not answer")


class Faults:
    """Holds faults to come, each for a point of call: "run", "save", "restore", "create" or "wake", and there
    "before", "middle" (of a run) or "after". ``hits`` are those that came. ``discard`` removes what a
    sandbox saved."""

    def __init__(self, discard: Callable[[Path], None] = shutil.rmtree) -> None:
        self.discard = discard
        self.armed: list[tuple[str, str, str]] = []
        self.hits: list[tuple[str, str, str]] = []

    def arm(self, call: str, when: str, kind: str) -> None:
        """``kind``: "kill" the sandbox, "hang" its shell, or "refuse", a runtime command that fails."""
        self.armed.append((call, when, kind))

    def due(self, call: str, when: str) -> str:
        """The kind that is to come now, or ""."""
        for fault in self.armed:
            if fault[:2] == (call, when):
                self.armed.remove(fault)
                self.hits.append(fault)
                return fault[2]
        return ""


class FaultyRuntime:
    """Any runtime, with faults."""

    def __init__(self, inner: SandboxRuntime, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def tier(self) -> Tier:
        return self.inner.tier

    @property
    def tier_reason(self) -> str:
        return self.inner.tier_reason

    def create(self, spec: SandboxSpec, home: Path) -> FaultySandbox:
        if self.faults.due("create", "before"):
            raise RuntimeFailed("the runtime's command failed")
        return self._made(self.inner.create(spec, home), "create")

    def restore(
        self, spec: SandboxSpec, saved_dir: Path, meta: Mapping[str, Any], home: Path
    ) -> FaultySandbox:
        if self.faults.due("restore", "before"):
            raise RestoreFailed("the runtime's command failed")
        return self._made(self.inner.restore(spec, saved_dir, meta, home), "restore")

    def sweep(self, home: Path) -> None:
        self.inner.sweep(home)

    def _made(self, sandbox: Sandbox, call: str) -> FaultySandbox:
        match self.faults.due(call, "after"):
            case "kill":
                sandbox.kill()  # noticed by whoever uses it first
            case "hang" | "refuse":
                sandbox.destroy()
                failure: type[Fault] = RestoreFailed if call == "restore" else RuntimeFailed
                raise failure("the runtime's command failed at its end")
        return FaultySandbox(sandbox, self.faults)


class FaultySandbox:
    """Any sandbox, with faults."""

    def __init__(self, inner: Sandbox, faults: Faults) -> None:
        self.inner = inner
        self.id, self.spec, self.tier = inner.id, inner.spec, inner.tier
        self._faults = faults
        self._is_hung = False

    def run(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        check_command(command)
        self._strike(self._faults.due("run", "before"), begun=False)
        if self._faults.due("run", "middle"):
            if isinstance(self.inner, MemorySandbox):
                self.inner.run_half(command)
            else:
                self.inner.run(f"{command}\necho half >>/root/list", timeout_s=timeout_s)
                self.inner.kill()
            raise SandboxGone("killed in mid-command", begun=True)
        result = self.inner.run(command, timeout_s=timeout_s)
        self._strike(self._faults.due("run", "after"), begun=True)
        return result

    def save(self, into: Path, *, previous: Path | None = None, with_fingerprint: bool = False) -> Saved:
        self._strike(self._faults.due("save", "before"), begun=False)
        saved = self.inner.save(into, previous=previous, with_fingerprint=with_fingerprint)
        try:
            self._strike(self._faults.due("save", "after"), begun=False)
        except Fault:
            self._faults.discard(into)  # as every runtime does on any error
            raise
        return saved

    def processes(self) -> list[ProcessInfo]:
        return self.inner.processes()

    def answers(self) -> bool:
        return not self._is_hung and self.inner.answers()

    def fingerprint(self) -> str | None:
        return None if self._is_hung else self.inner.fingerprint()

    def memory_bytes(self) -> int:
        return self.inner.memory_bytes()

    def suspend(self) -> None:
        self.inner.suspend()

    def wake(self) -> None:
        self._strike(self._faults.due("wake", "before"), begun=False)
        self.inner.wake()
        self._strike(self._faults.due("wake", "after"), begun=False)

    def is_alive(self) -> bool:
        return self.inner.is_alive()

    def kill(self) -> None:
        self.inner.kill()

    def destroy(self) -> None:
        self.inner.destroy()

    def _strike(self, kind: str, *, begun: bool) -> None:
        if self._is_hung:
            raise SandboxHung("the shell does not answer", begun=False)
        match kind:
            case "kill":
                self.inner.kill()
                raise SandboxGone("killed", begun=begun)
            case "hang":
                self._is_hung = True
                raise SandboxHung("the shell does not answer", begun=begun)
            case "refuse":
                raise RuntimeFailed("the runtime's command failed", begun=begun)
