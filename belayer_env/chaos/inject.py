"""A runtime and a store with faults in them: around real ones, and striking while a call is under way."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer_env.chaos.faults import FAULTS, HasInit, kill_restored, kill_runtime_command
from belayer_env.chaos.strikes import Instant, Kind, Strike
from belayer_env.checkpoint import CheckpointRef
from belayer_env.errors import BelayerError, RestoreFailed, RuntimeFailed, StoreFull
from belayer_env.ledger import Step
from belayer_env.ownership import process_start_time
from belayer_env.sandbox.base import ProcessInfo, Sandbox, SandboxRuntime, Saved
from belayer_env.sandbox.cgroup import Cgroup
from belayer_env.spec import ExecResult, SandboxSpec, Tier
from belayer_env.store import Store

__all__ = ["ChaosRuntime", "ChaosSandbox", "ChaosStore", "Injector"]

_FIRST_GUESS_S = 0.1
_REMEMBERED = 20
_OF_THE_STORE = (Kind.DISK,)
_OF_THE_SANDBOX = (Kind.KILL, Kind.OOM, Kind.FREEZE, Kind.HANG, Kind.CORRUPT, Kind.RUNTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call under way: ``word`` is in the arguments of the runtime's commands; ``sandbox`` is None while it
    is being restored."""

    instant: Instant
    cgroup: Cgroup
    word: str
    sandbox: Sandbox | None = None


class Injector:
    """Holds at most one strike and lets it hit in the next call that it fits. Thread-safe.

    ``hits`` are those that have really hit, oldest first. ``damage`` spoils the newest checkpoint of the
    episode under way, and says whether there was one."""

    def __init__(self, damage: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.hits: list[Strike] = []
        self._damage = damage
        self._lock = threading.Lock()
        self._armed: Strike | None = None
        self._after = 0
        self._took_s: dict[Instant, list[float]] = {}
        self._expected_s: float | None = None
        self._left_s: float | None = None
        self._number = itertools.count(1)

    def arm(self, strike: Strike, *, expected_s: float | None = None) -> None:
        """From now on, for sandboxes there are (COMMAND) or for those made later (RECOVERY).
        ``expected_s``: how long the call it is meant for takes; None: as long as others did."""
        with self._lock:
            self._armed, self._expected_s, self._left_s = strike, expected_s, None
            self._after = next(self._number)

    def disarm(self) -> bool:
        """Take back what has not hit; True if there was nothing to take back."""
        with self._lock:
            armed, self._armed = self._armed, None
            return armed is None

    def new_number(self) -> int:
        """By which a sandbox can be told to be older or younger than a strike."""
        return next(self._number)

    def instant_of_run(self, number: int) -> Instant:
        """Whether a command run in this sandbox is the agent's or a replay."""
        return Instant.RECOVERY if number > self._after else Instant.COMMAND

    def strike_now(self, strike: Strike, sandbox: ChaosSandbox) -> bool:
        """Between two calls."""
        has_hit = self._apply(strike, _Call(instant=strike.instant, **sandbox.place))
        if has_hit:
            self.hits.append(strike)
        return has_hit

    def claim_refusal(self, instant: Instant, kind: Kind) -> bool:
        """Whether this call is to fail at once."""
        with self._lock:
            armed = self._armed
            if armed is None or (armed.instant, armed.kind) != (instant, kind):
                return False
            if kind is Kind.RUNTIME and not armed.is_refusal:
                return False
            self._armed = None
            self.hits.append(armed)
            return True

    @contextlib.contextmanager
    def during(self, call: _Call) -> Iterator[None]:
        """Around a call that the armed strike may hit."""
        began = self._clock()
        with self._lock:
            strike, left_s = self._armed, self._left_s
            fits = strike is not None and strike.instant is call.instant and strike.kind in _OF_THE_SANDBOX
            if fits:
                self._armed = None
        thread, over = None, threading.Event()
        if fits and strike is not None:
            wait_s = strike.delay * self._expectation(call.instant) if left_s is None else left_s
            thread = threading.Thread(
                target=self._fire, args=(strike, call, over, wait_s), name="belayer-chaos", daemon=True
            )
            thread.start()
        try:
            yield
            if not fits:
                self._took_s.setdefault(call.instant, []).append(self._clock() - began)
        finally:
            over.set()
            if thread is not None:
                thread.join()

    def _expectation(self, instant: Instant) -> float:
        if self._expected_s is not None:
            return self._expected_s
        took_s = self._took_s.get(instant, [])[-_REMEMBERED:]
        return statistics.median(took_s) if took_s else _FIRST_GUESS_S

    def _fire(self, strike: Strike, call: _Call, over: threading.Event, wait_s: float) -> None:
        began = self._clock()
        if over.wait(wait_s):
            with self._lock:
                # Too early for this call: a recovery is more than one.
                self._armed, self._left_s = strike, max(0.0, wait_s - (self._clock() - began))
            return
        if self._apply(strike, call):
            self.hits.append(strike)

    def _apply(self, strike: Strike, call: _Call) -> bool:
        if strike.kind is Kind.CORRUPT:
            return self._damage()
        if strike.kind is Kind.RUNTIME:
            return kill_runtime_command(call.word)
        if call.sandbox is None:
            return kill_restored(call.cgroup)
        try:
            return FAULTS[strike.kind](call.sandbox, call.cgroup)
        except BelayerError:
            return False


class ChaosSandbox:
    """A sandbox that strikes hit. See `Sandbox`."""

    def __init__(self, inner: Sandbox, cgroup: Cgroup, injector: Injector) -> None:
        self.inner = inner
        self.cgroup = cgroup
        self._injector = injector
        self._number = injector.new_number()

    @property
    def id(self) -> str:
        """See `Sandbox.id`."""
        return self.inner.id

    @property
    def spec(self) -> SandboxSpec:
        """See `Sandbox.spec`."""
        return self.inner.spec

    @property
    def tier(self) -> Tier:
        """See `Sandbox.tier`."""
        return self.inner.tier

    @property
    def place(self) -> dict[str, Any]:
        """Where to strike it."""
        return {"cgroup": self.cgroup, "word": self.id, "sandbox": self.inner}

    def run(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """See `Sandbox.run`."""
        call = _Call(instant=self._injector.instant_of_run(self._number), **self.place)
        with self._injector.during(call):
            return self.inner.run(command, timeout_s=timeout_s)

    def save(self, into: Path, *, previous: Path | None = None, with_fingerprint: bool = False) -> Saved:
        """See `Sandbox.save`."""
        if self._injector.claim_refusal(Instant.CHECKPOINT, Kind.RUNTIME):
            raise RuntimeFailed("chaos: the runtime's command to checkpoint failed")
        with self._injector.during(_Call(instant=Instant.CHECKPOINT, **self.place)):
            return self.inner.save(into, previous=previous, with_fingerprint=with_fingerprint)

    def processes(self) -> list[ProcessInfo]:
        """See `Sandbox.processes`."""
        return self.inner.processes()

    def answers(self) -> bool:
        """See `Sandbox.answers`."""
        return self.inner.answers()

    def fingerprint(self) -> str | None:
        """See `Sandbox.fingerprint`."""
        return self.inner.fingerprint()

    def memory_bytes(self) -> int:
        """See `Sandbox.memory_bytes`."""
        return self.inner.memory_bytes()

    def suspend(self) -> None:
        """See `Sandbox.suspend`."""
        self.inner.suspend()

    def wake(self) -> None:
        """See `Sandbox.wake`."""
        self._number = self._injector.new_number()  # as good as restored now
        if self._injector.claim_refusal(Instant.RESTORE, Kind.RUNTIME):
            raise RuntimeFailed("chaos: the runtime's command to wake the standby failed")
        with self._injector.during(_Call(instant=Instant.RESTORE, **self.place)):
            self.inner.wake()

    def is_alive(self) -> bool:
        """See `Sandbox.is_alive`."""
        return self.inner.is_alive()

    def kill(self) -> None:
        """See `Sandbox.kill`."""
        self.inner.kill()

    def destroy(self) -> None:
        """See `Sandbox.destroy`."""
        self.inner.destroy()


@dataclass(slots=True)
class _Made:
    homes: list[Path] = field(default_factory=list)
    inits: list[tuple[int, int]] = field(default_factory=list)


class ChaosRuntime:
    """A runtime whose sandboxes, and whose restores, strikes hit. See `SandboxRuntime`.

    ``made`` holds every home, and the pid and start time of every init, there ever was."""

    def __init__(self, inner: SandboxRuntime, injector: Injector) -> None:
        self.inner = inner
        self.made = _Made()
        self._injector = injector

    @property
    def name(self) -> str:
        """See `SandboxRuntime.name`."""
        return self.inner.name

    @property
    def tier(self) -> Tier:
        """See `SandboxRuntime.tier`."""
        return self.inner.tier

    @property
    def tier_reason(self) -> str:
        """See `SandboxRuntime.tier_reason`."""
        return self.inner.tier_reason

    def create(self, spec: SandboxSpec, home: Path) -> Sandbox:
        """See `SandboxRuntime.create`."""
        self.made.homes.append(home)
        if self._injector.claim_refusal(Instant.RESTORE, Kind.RUNTIME):
            raise RuntimeFailed("chaos: the runtime's command to start a sandbox failed")
        return self._wrapped(self.inner.create(spec, home))

    def restore(self, spec: SandboxSpec, saved_dir: Path, meta: Mapping[str, Any], home: Path) -> Sandbox:
        """See `SandboxRuntime.restore`."""
        self.made.homes.append(home)
        if self._injector.claim_refusal(Instant.RESTORE, Kind.RUNTIME):
            raise RestoreFailed("chaos: the runtime's command to restore failed")
        # What is being restored has no init yet: it is found by the name that runc's cgroups have.
        call = _Call(instant=Instant.RESTORE, cgroup=Cgroup.find(f"belayer-{home.name}"), word=home.name)
        with self._injector.during(call):
            sandbox = self.inner.restore(spec, saved_dir, meta, home)
        return self._wrapped(sandbox)

    def sweep(self, home: Path) -> None:
        """See `SandboxRuntime.sweep`."""
        self.inner.sweep(home)

    def _wrapped(self, sandbox: Sandbox) -> Sandbox:
        cgroup = Cgroup.find(f"belayer-{sandbox.id}")
        if isinstance(sandbox, HasInit):
            with contextlib.suppress(ProcessLookupError):
                # Now, while the pid is surely its own; a cgroup's name is never used again.
                cgroup = Cgroup.of_pid(sandbox.init_pid)
                self.made.inits.append((sandbox.init_pid, process_start_time(sandbox.init_pid) or 0))
        return ChaosSandbox(sandbox, cgroup, self._injector)


class ChaosStore(Store):
    """A store whose disk is full when a strike says so, and that learns nothing from what chaos does."""

    def __init__(self, root: Path | None = None) -> None:
        super().__init__(root)
        self.injector: Injector | None = None
        self.staged: list[str] = []

    def staging(self, episode_id: str) -> Path:
        """See `Store.staging`."""
        path = super().staging(episode_id)
        self.staged.append(path.name)
        return path

    def publish(self, staging: Path, **facts: Any) -> CheckpointRef:
        """See `Store.publish`."""
        if self._is_full(Instant.CHECKPOINT):
            self.layers.drop(staging)
            raise StoreFull("chaos: the store's disk is full")
        return super().publish(staging, **facts)

    def append_step(self, episode_id: str, step: Step) -> None:
        """See `Store.append_step`."""
        if self._is_full(Instant.COMMAND):
            raise StoreFull("chaos: the store's disk is full")
        super().append_step(episode_id, step)

    def new_home(self, episode_id: str | None, runtime: str) -> Path:
        """See `Store.new_home`."""
        if self._is_full(Instant.RESTORE):
            raise StoreFull("chaos: the store's disk is full")
        return super().new_home(episode_id, runtime)

    def fact(self, name: str) -> Any:
        """None: a chaos run is like any other with its seed."""
        return None

    def remember(self, name: str, value: Any) -> None:
        """Nothing: faults made on purpose say nothing of this host."""

    def _is_full(self, instant: Instant) -> bool:
        return self.injector is not None and self.injector.claim_refusal(instant, Kind.DISK)
