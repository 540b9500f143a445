"""One run of the demo's episode, with the container killed on the way or not, and two runs compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from belayer_env.env import ContainerEnv
from belayer_env.errors import Fault, RuntimeFailed
from belayer_env.sandbox.base import Sandbox
from belayer_env.telemetry import Telemetry

__all__ = ["Drill", "FinalState", "Outcome", "StepSeen", "differences", "play"]

POLL_S = 0.002

# Left out of the digest: the index holds inode numbers and times of the files (`git status` is compared).
FILES_DIGEST = (
    "( cd / && find testbed root -type f ! -path '*/.git/index' -print0 | sort -z | xargs -0 sha256sum )"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """When to kill the container: once a step has ended, and once in the middle of a later one, as soon as a
    process with ``sign`` among its arguments runs in it. Steps count from 1."""

    after_step: int
    during_step: int
    sign: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """What one step showed. ``wall_s`` is all of it: recovery and checkpoint included."""

    number: int
    action: str
    observation: str
    exit_code: int
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalState:
    """The sandbox after the last step. ``files``: path -> SHA-256; ``processes``: command lines, sorted."""

    files: Mapping[str, str]
    processes: tuple[str, ...]
    variables: str
    functions: str
    cwd: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One whole run."""

    steps: tuple[StepSeen, ...]
    state: FinalState
    telemetry: Telemetry
    wall_s: float


@dataclass(slots=True)
class Listener:
    """Who is told of what happens, as it happens."""

    on_kill: Callable[[str], None] = field(default=lambda where: None)
    on_step: Callable[[StepSeen], None] = field(default=lambda step: None)


def play(
    env: ContainerEnv,
    actions: Sequence[str],
    *,
    clock: Callable[[], float],
    variables: Sequence[str] = (),
    drill: Drill | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Reset the env, run the actions, and look at what they left.

    Raises:
        RuntimeFailed: the drill's process never ran, so that nothing was killed in mid-command."""
    listener = listener or Listener()
    began = clock()
    env.reset(seed=0)
    steps = []
    for number, action in enumerate(actions, start=1):
        started = clock()
        if drill is not None and number == drill.during_step:
            with _Killer(env.episode.sandbox, drill.sign, listener.on_kill) as killer:
                observation, _, _, _, info = env.step(action)
            if not killer.has_struck:
                raise RuntimeFailed(f"step {number} ended before {drill.sign!r} was seen to run")
        else:
            observation, _, _, _, info = env.step(action)
        seen = StepSeen(
            number=number,
            action=action,
            observation=observation,
            exit_code=info["exit_code"],
            wall_s=clock() - started,
        )
        steps.append(seen)
        listener.on_step(seen)
        if drill is not None and number == drill.after_step:
            listener.on_kill("between two steps")
            env.episode.sandbox.kill()
    state = _look(env.episode.sandbox, variables)
    return Outcome(steps=tuple(steps), state=state, telemetry=env.telemetry, wall_s=clock() - began)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """In what two runs differ, a line each; none when an agent could not tell them apart."""
    found = []
    if len(one.steps) != len(other.steps):
        found.append(f"number of steps: {len(one.steps)} and {len(other.steps)}")
    for a, b in zip(one.steps, other.steps, strict=False):
        if a.action != b.action:
            found.append(f"action of step {a.number}: {a.action!r} and {b.action!r}")
        if (a.observation, a.exit_code) != (b.observation, b.exit_code):
            found.append(f"observation of step {a.number}: {_first_difference(a, b)}")
    before, after = one.state, other.state
    for path in sorted(before.files.keys() | after.files.keys()):
        if before.files.get(path) != after.files.get(path):
            where = "differs" if path in before.files and path in after.files else "is in one of them only"
            found.append(f"file {path} {where}")
    for name in ("processes", "variables", "functions", "cwd"):
        a_value, b_value = getattr(before, name), getattr(after, name)
        if a_value != b_value:
            found.append(f"{name}: {a_value!r} and {b_value!r}")
    return found


class _Killer:
    """Kills a sandbox in mid-command: a thread that waits until a certain process runs in it."""

    def __init__(self, sandbox: Sandbox, sign: str, on_kill: Callable[[str], None]) -> None:
        self.has_struck = False
        self._sandbox = sandbox
        self._sign = sign
        self._on_kill = on_kill
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="belayer-drill")

    def __enter__(self) -> _Killer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                is_there = any(self._sign in process.argv for process in self._sandbox.processes())
            except Fault:
                return
            if is_there:
                self.has_struck = True
                self._on_kill("in the middle of this step")
                self._sandbox.kill()
                return


def _look(sandbox: Sandbox, variables: Sequence[str]) -> FinalState:
    def ask(command: str) -> str:
        return sandbox.run(command).output

    lines = ask(FILES_DIGEST).splitlines()
    return FinalState(
        files={path: digest for digest, _, path in (line.partition("  ") for line in lines)},
        processes=tuple(sorted(" ".join(process.argv) for process in sandbox.processes())),
        variables=ask(f"declare -p {' '.join(variables)}") if variables else "",
        # The shell loop has functions of its own, the same in every run.
        functions=ask("declare -f"),
        cwd=ask("pwd").strip(),
    )


def _first_difference(a: StepSeen, b: StepSeen) -> str:
    if a.exit_code != b.exit_code:
        return f"exit code {a.exit_code} and {b.exit_code}"
    mine, theirs = a.observation.splitlines(), b.observation.splitlines()
    for old, new in zip(mine, theirs, strict=False):
        if old != new:
            return f"{old!r} and {new!r}"
    return f"{len(mine)} and {len(theirs)} lines"
