"""The package's public names, what importing it costs, and that all of it is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import belayer_rollout

ROOT = Path(__file__).parent.parent.parent


def test_the_public_names_are_these() -> None:
    assert sorted(belayer_rollout.__all__) == dir(belayer_rollout) == [
        "EngineWorker", "Generation", "HfWorker", "HttpWorker", "Journal", "ModelInfo", "RolloutClient",
        "SamplingParams", "Segment", "ShadowPair", "TokenChunk", "VllmWorker",
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(belayer_rollout.__all__) - {"HfWorker", "VllmWorker"}))
def test_each_is_there_without_an_engine_installed(name: str) -> None:
    assert getattr(belayer_rollout, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Journall"):
        _ = belayer_rollout.Journall


def test_the_client_is_imported_without_torch_and_without_the_env_package() -> None:
    code = (
        "import sys, belayer_rollout.client, belayer_rollout.serve, belayer_rollout.memory.owner\n"
        "print([name for name in ('torch', 'vllm', 'transformers', 'belayer_env') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_pip_installs_every_package_there_is() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts).replace("integrations", "belayer_integrations", 1)
        for top in ("belayer_bench", "belayer_env", "belayer_rollout", "integrations")
        for path in (ROOT / top).rglob("__init__.py")
        if not {"demo_repo", "bundled"} & set(path.parts)
    }
    assert set(listed) == found
