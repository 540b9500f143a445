"""What a sandbox and a task are: plain frozen data, validated when made. Bytes, seconds, whole processes."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3

from belayer_env.errors import InvalidInput
from belayer_env.volatile import compile_volatile

if TYPE_CHECKING:
    from belayer_env.ledger import Ledger
    from belayer_env.sandbox.base import Sandbox

__all__ = ["ExecResult", "Limits", "Reward", "SandboxSpec", "Task", "Tier"]

MIB = 1024**2
GIB = 1024**3

Reward = Callable[["Sandbox", "Ledger"], "float | tuple[float, bool]"]
"""``reward(sandbox, ledger) -> float | (float, terminated)``, called after every step."""


class Tier(enum.StrEnum):
    """What a checkpoint carries. FULL: processes and files. FILES: files, cwd and shell variables."""

    FULL = "full"
    FILES = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use.

    ``memory_bytes``, ``pids`` and ``cpus`` are enforced by cgroups, in new and restored sandboxes alike.
    ``disk_bytes`` bounds the writable layer (None: not bounded) where the store's file system can (btrfs).
    ``output_bytes`` is the longest observation kept of one step, head and tail each about half of it.
    ``step_timeout_s`` ends a command; ``kill_grace_s`` lies between its interrupt and its kill.
    ``ghost_bytes`` bounds a deleted file that a process still holds open and that a checkpoint must carry.

    Raises:
        InvalidInput: a limit that is not positive, or not finite."""

    memory_bytes: int = 2 * GIB
    pids: int = 512
    cpus: float | None = None
    disk_bytes: int | None = None
    output_bytes: int = 64 * 1024
    step_timeout_s: float = 120.0
    setup_timeout_s: float = 600.0
    kill_grace_s: float = 1.0
    ghost_bytes: int = 1 * GIB

    def __post_init__(self) -> None:
        for limit in dataclasses.fields(self):
            value = getattr(self, limit.name)
            if value is None and limit.name in ("cpus", "disk_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidInput(f"Limits.{limit.name} must be a number, not {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"Limits.{limit.name} must be positive and finite, not {value!r}")
            if (limit.name.endswith("_bytes") or limit.name == "pids") and value != int(value):
                raise InvalidInput(f"Limits.{limit.name} must be a whole number, not {value!r}")
        if self.memory_bytes < 16 * MIB:
            raise InvalidInput(f"Limits.memory_bytes below 16 MiB cannot hold a shell: {self.memory_bytes}")
        if self.pids < 8:
            raise InvalidInput(f"Limits.pids below 8 leaves no room for a pipeline: {self.pids}")
        if self.output_bytes < 64:
            raise InvalidInput(f"Limits.output_bytes below 64 leaves no room: {self.output_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One container: its image, environment, working directory, limits and network ("none")."""

    image: str
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/root"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not self.image.strip():
            raise InvalidInput(
                f"image must be a reference such as name:tag, rootfs:DIR or oci:PATH, not {self.image!r}"
            )
        if not self.workdir.startswith("/"):
            raise InvalidInput(f"workdir must be an absolute path in the container, not {self.workdir!r}")
        for name, value in self.env.items():
            if not name.isidentifier() or "\0" in value:
                raise InvalidInput(f"env holds {name!r}={value!r}: names are identifiers, values have no NUL")

    def to_json(self) -> dict[str, Any]:
        """Plain data for a manifest; ``from_json`` is the inverse."""
        return {
            "image": self.image,
            "env": dict(self.env),
            "workdir": self.workdir,
            "limits": dataclasses.asdict(self.limits),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SandboxSpec:
        """The inverse of ``to_json``."""
        return cls(
            image=data["image"], env=data["env"], workdir=data["workdir"], limits=Limits(**data["limits"])
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent is to do, and in what container.

    ``setup`` commands run once after every fresh start, in the sandbox's shell, before the agent's first
    step; one that fails ends reset() with TaskSetupFailed. ``instruction`` is reset()'s observation.
    ``reward``: see `Reward`; None means 0.0 and never terminated.
    ``volatile``: regular expressions of what may differ between two runs of a command and still mean the
    same, beside the defaults (see `volatile`). ``replay``: "always", or "never" when commands act on the
    outside world: after a fault the context is then cut to the last checkpoint instead."""

    image: str
    instruction: str = ""
    setup: Sequence[str] = ()
    reward: Reward | None = None
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/root"
    volatile: Sequence[str] = ()
    replay: Literal["always", "never"] = "always"

    def __post_init__(self) -> None:
        if isinstance(self.volatile, str):
            raise InvalidInput("Task.volatile is a list of regular expressions, not one string")
        object.__setattr__(self, "volatile", tuple(self.volatile))
        compile_volatile(tuple(self.volatile))
        if self.replay not in ("always", "never"):
            raise InvalidInput(f'Task.replay must be "always" or "never", not {self.replay!r}')
        if isinstance(self.setup, str):
            raise InvalidInput("Task.setup is a list of commands, not one string")
        object.__setattr__(self, "setup", tuple(self.setup))
        for command in self.setup:
            if not isinstance(command, str) or "\0" in command:
                raise InvalidInput(f"Task.setup holds {command!r}: commands are text without NUL")
        _ = self.sandbox  # validates the rest

    @property
    def sandbox(self) -> SandboxSpec:
        """The container this task runs in."""
        return SandboxSpec(image=self.image, env=self.env, workdir=self.workdir, limits=self.limits)

    @property
    def digest(self) -> str:
        """Identity of all that shapes the sandbox; a checkpoint is only restored under its own task."""
        return blake3(
            json.dumps([self.sandbox.to_json(), list(self.setup)], sort_keys=True).encode()
        ).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the catalogue. The reward, being code, is not in it."""
        return {
            "sandbox": self.sandbox.to_json(),
            "setup": list(self.setup),
            "instruction": self.instruction,
            "volatile": list(self.volatile),
            "replay": self.replay,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, reward: Reward | None = None) -> Task:
        """The inverse of ``to_json``, with the reward given again."""
        box = SandboxSpec.from_json(data["sandbox"])
        return cls(
            image=box.image,
            env=box.env,
            workdir=box.workdir,
            limits=box.limits,
            setup=tuple(data["setup"]),
            instruction=data["instruction"],
            volatile=data["volatile"],
            replay=data["replay"],
            reward=reward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did.

    ``exit_code`` is the shell's own (128 + N for a death by signal N, 124 at a time-out).
    ``output`` is stdout and stderr in order, valid Unicode, of at most ``Limits.output_bytes`` (and a mark
    where it was cut).
    ``shell_restarted``: the shell ended with this command; a new one stands in the same sandbox.
    ``duration_s`` is host wall time. ``oom_kills``: processes that the kernel's OOM killer took meanwhile."""

    output: str
    exit_code: int
    timed_out: bool = False
    output_truncated: bool = False
    shell_restarted: bool = False
    duration_s: float = 0.0
    oom_kills: int = 0
