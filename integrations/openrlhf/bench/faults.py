"""The faults of the drill, done to one sample, once. Runs in rollout actors, of both sides. Seconds."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belayer_env.chaos.faults import FAULTS, HasInit
from belayer_env.sandbox.base import Sandbox
from belayer_env.sandbox.cgroup import Cgroup

__all__ = ["Fault", "strike"]

VICTIM = 3
FATAL_STEP = 3
_INTO_THE_COMMAND_S = 0.25


class Fault(enum.StrEnum):
    """What befalls a batch: the last two are done to processes from outside, the others end in a sandbox."""

    NONE = "none"
    RAISE = "step raises"
    ENDLESS = "step hangs: its command never ends"
    STOPPED = "step hangs: its container stands still"
    KILL = "container killed"
    OOM = "container out of memory"
    ENGINE = "EngineCore killed"
    ACTOR = "actor killed"


_OF_A_SANDBOX: Mapping[Fault, str] = {Fault.STOPPED: "hang", Fault.KILL: "kill", Fault.OOM: "oom"}


def is_due(label: Mapping[str, Any], step: int) -> bool:
    """Whether it is this sample's turn to meet its fault, in this step (from 1)."""
    return int(label["number"]) == VICTIM and step == FATAL_STEP


def strike(label: Mapping[str, Any], step: int, sandbox: Sandbox) -> None:
    """Just before a command: see to it that its container meets the fault while it runs, the first time."""
    of_sandbox = _OF_A_SANDBOX.get(Fault(label["fault"]))
    if of_sandbox is None or not is_due(label, step):
        return
    try:
        (Path(label["run"]) / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    assert isinstance(sandbox, HasInit)
    cgroup = Cgroup.of_pid(sandbox.init_pid)
    threading.Timer(_INTO_THE_COMMAND_S, FAULTS[of_sandbox], (sandbox, cgroup)).start()
