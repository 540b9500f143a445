"""What Belayer adds to vLLM's worker class: called by name through collective_rpc, in each worker process.

A worker_extension_cls of your own must be a subclass of `WorkerExtension`: vLLM takes only one."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from belayer_rollout.shared_memory import DIRECTORY, shared_memory_of

__all__ = ["EXTENSION", "LEFTOVER", "WorkerExtension", "end_with"]

EXTENSION = "belayer_rollout.engines.vllm.extension.WorkerExtension"

LEFTOVER = "BELAYER_ENGINE_LEFTOVER"
"""Environment variable: directories (between them os.pathsep) to remove when its user was killed."""

_watched: set[int] = set()
_left: list[str] = []
"""Files that this process leaves behind."""


def end_with(pid: int) -> None:
    """End this process when that one (the engine's user) dies: EngineCore alone would wait for ever. Once is
    enough, more do no harm. Nobody else is left then to remove what it shares with the engine's other
    processes, and the directories that `LEFTOVER` names."""
    if pid in _watched:
        return
    _watched.add(pid)
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        _end()
        return

    def watch() -> None:
        select.select([fd], [], [])
        _end()

    threading.Thread(target=watch, name="belayer-end-with", daemon=True).start()


def _end() -> None:
    # Python's resource tracker would, but is a child of the user's, and may have been killed with it.
    for path in (*(DIRECTORY / name for name in shared_memory_of(("self",))), *map(Path, _left)):
        with contextlib.suppress(OSError):
            path.unlink()
    for leftover in filter(None, os.environ.get(LEFTOVER, "").split(os.pathsep)):
        shutil.rmtree(leftover, ignore_errors=True)
    os._exit(1)


class WorkerExtension:
    """Mixed into vLLM's worker. Every name begins with ``belayer_``, so that none of vLLM's is hidden."""

    model_runner: Any  # vLLM's
    distributed_init_method: str  # likewise
    _belayer_before: list[_ModuleState] | None = None

    def belayer_pids(self) -> tuple[int, int]:
        """This process and its parent."""
        return os.getpid(), os.getppid()

    def belayer_end_with(self, pid: int) -> None:
        """See `end_with`."""
        _left[:] = self.belayer_files()
        end_with(pid)

    def belayer_files(self) -> list[str]:
        """Files that it leaves behind even if it ends in peace: the one through which its ranks met."""
        scheme, _, path = self.distributed_init_method.partition("://")
        return [path] if scheme == "file" else []

    def belayer_load(self, directory: str) -> str | None:
        """Put the safetensors of a directory in force, and keep what was before; the reason if that fails,
        and then nothing has changed."""
        import torch

        model = self.model_runner.get_model()
        with torch.no_grad():
            self._belayer_before = [_ModuleState(module) for module in model.modules()]
            try:
                # vLLM's own reload: it fuses, shards and (on CPUs, whose linear layers hold packed copies)
                # packs again. A plain copy into the parameters would change nothing there.
                self.model_runner.reload_weights(weights_iterator=_tensors(Path(directory)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the old weights go back
                self.belayer_restore()
                return f"{type(error).__name__}: {error}"
        return None

    def belayer_restore(self) -> None:
        """Write back what the last `belayer_load` replaced. Nothing to write back: nothing happens."""
        import torch
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        with torch.no_grad():
            for state in self._belayer_before or ():
                state.restore()
                # A reload that broke off has left its book-keeping half-way.
                get_layerwise_info(state.module).reset()
        self._belayer_before = None

    def belayer_forget(self) -> None:
        """Let go of what the last `belayer_load` replaced: the new weights are in force everywhere."""
        self._belayer_before = None


class _ModuleState:
    """A module's own tensors and attributes (kernel handles, packed weights) as they are now."""

    def __init__(self, module: Any) -> None:
        import torch

        self.module = module
        self._attributes = {name: value for name, value in vars(module).items() if name not in _LEFT_OUT}
        self._tensors = {name: dict(getattr(module, name)) for name in _TENSORS}
        held = [self._attributes, *self._tensors.values()]
        # Held on the host where they are on an accelerator: there need not be room for the weights twice.
        self._values = [
            (tensor, tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu())
            for tensors in held
            for tensor in tensors.values()
            if isinstance(tensor, torch.Tensor)
        ]

    def restore(self) -> None:
        for name in set(vars(self.module)) - set(self._attributes) - _LEFT_OUT:
            del vars(self.module)[name]
        vars(self.module).update(self._attributes)
        for name, tensors in self._tensors.items():
            held = getattr(self.module, name)
            held.clear()
            held.update(tensors)
        for tensor, value in self._values:
            # In place: CUDA graphs and views keep their addresses.
            tensor.data.copy_(value)


_TENSORS = ("_parameters", "_buffers")
_LEFT_OUT = {"_modules", "kv_cache", *_TENSORS}
"""Of a module's attributes: what is taken apart, and the KV cache, which may fill most of the memory."""


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
