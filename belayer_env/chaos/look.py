"""What an agent could find in a sandbox: files, shell, processes. Compared, a line a difference."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from belayer_env.chaos.faults import HasInit
from belayer_env.ledger import Step
from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.cgroup import Cgroup
from belayer_env.sandbox.procs import read_procs

__all__ = ["Outcome", "differences", "look", "processes"]

_SETTLE_S = 3.0
_TREES = "/root /srv /tmp /dev/shm"

# The index of git holds inode numbers and times, and so does compiled Python.
FILES = (
    f"cd / && for d in {_TREES}; do [ -d $d ] && find $d -xdev ! -path '*/.git/index' ! -name '*.pyc' "
    "-exec stat -c '%F %a %N' {} +; done | LC_ALL=C sort; "
    f"for d in {_TREES}; do [ -d $d ] && find $d -xdev -type f ! -path '*/.git/index' ! -name '*.pyc' "
    "-exec sha256sum {} +; done | LC_ALL=C sort -k 2"
)

# In functions and subshells, so that looking leaves nothing. What bash counts by itself is left out.
SHELL = r"""(
pwd; umask; trap -p; alias; ulimit -a 2>/dev/null; jobs
if [ -n "$BASH_VERSION" ]; then
    shopt; set +o
    compgen -v | while read -r belayer_name; do
        case $belayer_name in
            BASH*|EPOCH*|RANDOM|SRANDOM|SECONDS|PPID|LINENO|_|PIPESTATUS|COMP_*|DIRSTACK|FUNCNAME|HISTCMD) ;;
            __belayer_*|belayer_*) ;;
            *) declare -p "$belayer_name" 2>/dev/null ;;
        esac
    done
    declare -f
else
    set
fi
)"""

_ASKED = {"files": FILES, "shell": SHELL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One whole run: the ledger's steps, and what they left, by aspect, in lines."""

    steps: tuple[Step, ...]
    state: Mapping[str, tuple[str, ...]]


def look(sandbox: Sandbox, like: Mapping[str, tuple[str, ...]] | None = None) -> dict[str, tuple[str, ...]]:
    """The state of a sandbox that nothing else uses. ``like``: what to expect, given a moment (a background
    job that sleeps between two commands has one process more or less)."""
    found = {
        aspect: tuple(sandbox.run(f"( {command} ) 2>&1").output.splitlines())
        for aspect, command in _ASKED.items()
    }
    until = time.monotonic() + _SETTLE_S
    found["processes"] = processes(sandbox)
    while like is not None and found["processes"] != like["processes"] and time.monotonic() < until:
        time.sleep(0.05)
        found["processes"] = processes(sandbox)
    return found


def processes(sandbox: Sandbox) -> tuple[str, ...]:
    """The command lines of all that live, sorted, with a word on those that are stopped."""
    if isinstance(sandbox, HasInit):
        procs = read_procs(Cgroup.of_pid(sandbox.init_pid).pids())
        return tuple(
            sorted(
                " ".join(proc.argv) + (" (stopped)" if proc.state in "Tt" else "")
                for proc in procs
                if proc.state not in "ZX"
            )
        )
    return tuple(sorted(" ".join(process.argv) for process in sandbox.processes()))


def differences(one: Outcome, other: Outcome) -> list[str]:
    """In what two runs differ, a line each; none when an agent could not tell them apart."""
    found = []
    if len(one.steps) != len(other.steps):
        found.append(f"number of steps: {len(one.steps)} and {len(other.steps)}")
    for a, b in zip(one.steps, other.steps, strict=False):
        if a.action != b.action:
            found.append(f"action of step {a.number}: {a.action!r} and {b.action!r}")
        elif (a.digest, a.exit_code, a.timed_out) != (b.digest, b.exit_code, b.timed_out):
            found.append(
                f"step {a.number} ({a.action[:80]!r}): exit {a.exit_code}, {a.observation[-200:]!r} "
                f"and exit {b.exit_code}, {b.observation[-200:]!r}"
            )
    for aspect in one.state:
        found += [f"{aspect}: {line}" for line in _changed(one.state[aspect], other.state[aspect])]
    return found


def _changed(one: Sequence[str], other: Sequence[str]) -> list[str]:
    only_one, only_other = list(one), []
    for line in other:
        if line in only_one:
            only_one.remove(line)
        else:
            only_other.append(line)
    return [*(f"- {line}" for line in only_one), *(f"+ {line}" for line in only_other)]
