"""An OCI image layout on disk: which manifest a tag means, and what the image's configuration asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belayer_env.errors import ImageNotFound, ImageUnreadable

__all__ = ["config_facts", "pick_manifest", "read_config"]


def pick_manifest(layout: Path, tag: str, source: str) -> tuple[str, str]:
    """Tag (empty where it has none) and digest of the manifest meant by ``tag``, or of the only one.

    Raises:
        ImageNotFound: no such tag, or several images and no tag.
        ImageUnreadable: no OCI layout."""
    try:
        index = json.loads((layout / "index.json").read_text())
        tagged = [
            (
                manifest.get("annotations", {}).get("org.opencontainers.image.ref.name", ""),
                str(manifest["digest"]),
            )
            for manifest in index["manifests"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageUnreadable(
            f"{source} is no OCI layout, a directory with an index.json "
            f"(an archive of one is first to be unpacked by tar): {type(error).__name__}: {error}"
        ) from error
    meant = [pair for pair in tagged if pair[0] == tag] if tag else tagged
    if len(meant) == 1:
        return meant[0]
    known = ", ".join(name or "(untagged)" for name, _ in tagged) or "none"
    if tag:
        raise ImageNotFound(f"{source}: the layout has no such tag; it has: {known}")
    raise ImageNotFound(
        f"{source}: the layout holds {len(tagged)} images; name one as oci:{layout}:TAG of: {known}"
    )


def read_config(layout: Path, digest: str) -> dict[str, Any]:
    """Environment and working directory by the image's configuration; none for what cannot be read as one."""
    try:
        manifest = json.loads(_blob(layout, digest).read_text())
        config = json.loads(_blob(layout, manifest["config"]["digest"]).read_text())
        return config_facts(config.get("config") or {})
    except (OSError, ValueError, KeyError, TypeError):
        return {"env": {}, "workdir": None}


def config_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """``env`` and ``workdir`` of an image's configuration, as OCI and Docker both write it."""
    pairs = (entry.partition("=") for entry in config.get("Env") or [])
    return {
        "env": {name: value for name, _, value in pairs if name},
        "workdir": config.get("WorkingDir") or None,
    }


def _blob(layout: Path, digest: str) -> Path:
    algorithm, _, value = digest.partition(":")
    if not re.fullmatch(r"[a-z0-9]+", algorithm) or not re.fullmatch(r"[a-f0-9]+", value):
        raise ValueError(f"no digest: {digest}")
    return layout / "blobs" / algorithm / value
