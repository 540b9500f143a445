"""The tasks of openrlhf_agent.py, and their faults. Needs no OpenRLHF.

A label says all: ``image``, ``store``, ``number`` of the episode, its ``fault``, ``once`` (a key: only the
first episode of that key meets it), what a ``turn`` of the shell does, the ``policy``, and the directory for
``notes`` on what each ledger held.
"""

from __future__ import annotations

import json
import threading
import uuid
import zlib
from pathlib import Path
from typing import Any

from belayer_env import ContainerEnv, Task
from belayer_env.runtimes import open_runtime
from belayer_env.store import Store
from tests.memory_sandbox import Faults, FaultyRuntime

STEP_LIMIT_S = 10.0
MAX_TURNS = 4
MAX_TURN_TOKENS = 3


class Watched(ContainerEnv):
    """Notes what its ledger holds at its end and which hints it got, and meets its fault."""

    fault = ""
    faults: Faults
    hints: list[tuple[int, float]]
    """Steps before it, and seconds."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_there = len(self.episode.ledger) == 2 and not self.telemetry.recoveries
        if self.fault == "kill" and is_there:
            self.episode.sandbox.kill()
        elif self.fault == "kill during" and is_there:
            threading.Timer(0.3, self.episode.sandbox.kill).start()
        elif self.fault == "doom" and len(self.episode.ledger) == 1:
            # All its checkpoints damaged, and no fresh sandbox to be had either.
            damage(self._store, self.checkpoint().id)
            for _ in range(50):
                self.faults.arm("create", "before", "refuse")
            self.episode.sandbox.kill()
        return super().step(action)

    def hint_bubble(self, seconds: float) -> None:
        self.hints.append((len(self.episode.ledger), seconds))
        super().hint_bubble(seconds)

    def close(self) -> None:
        if self._episode is not None:
            note = {
                "label": self.task.env["NUMBER"],
                "actions": [s.action for s in self._episode.ledger.steps],
                "hints": self.hints,
            }
            (Path(self.task.env["NOTES"]) / uuid.uuid4().hex).write_text(json.dumps(note))
        super().close()


def damage(store: Store, checkpoint_id: str) -> None:
    images = [path for path in (store.root / "checkpoints").rglob("*.img") if checkpoint_id in str(path)]
    assert images
    for image in images:
        image.write_bytes(image.read_bytes()[:-1] + b"?")


def broken_reward(sandbox: object, ledger: object) -> float:
    raise LookupError("the reward of number two")


def count_reward(sandbox: Any, ledger: Any) -> float:
    """The counter of this shell, and something of the action."""
    return float(sandbox.run("echo $n").output) + zlib.crc32(ledger.steps[-1].action.encode()) % 1000 / 1000


def task_of(prompt: str, label: dict[str, Any]) -> Task:
    """Counts its steps in the shell, and says how many."""
    return Task(
        image=label["image"],
        instruction=label.get("instruction", ""),
        env={name.upper(): str(value) for name, value in label.items()},
        setup=[f"n=0; turn() {{ n=$((n+1)); {label.get('turn') or 'echo $n ok'}; }}"],
        reward=broken_reward if label["fault"] == "reward" else count_reward,
    )


_met: set[str] = set()
_lock = threading.Lock()


def make_env(task: Task, **options: Any) -> ContainerEnv:
    """With the fault that the label wants."""
    label = task.env
    fault = label["FAULT"]
    if label.get("ONCE"):
        with _lock:
            fault = "" if label["ONCE"] in _met else fault
            _met.add(label["ONCE"])
    if fault == "constructor":
        raise PermissionError("the constructor of number seven")
    store = Store(Path(label["STORE"]))
    options |= {"store": store, "policy": label.get("POLICY", "adaptive")}
    faults = Faults()
    if fault == "doom":
        options["runtime"] = FaultyRuntime(open_runtime("runc", store), faults)
    env = Watched(task, **options)
    env._owns_store = True
    env.fault, env.faults, env.hints = fault, faults, []
    return env


def command(text: str) -> str:
    """Whatever the model says is a turn."""
    return f"turn {text.encode().hex()}"
