"""A record of a SWE-bench-like data set: an issue of a repository, and the tests that tell it is solved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer_env.errors import InvalidInput

__all__ = ["SweRecord", "bundled_records", "load_records"]

BUNDLED = Path(__file__).parent / "bundled"
"""The project's own records, each beside the repository that it is about; they need no network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweRecord:
    """The fields that matter, under their names in the data set. Test lists are tuples of names; ``patch`` is
    the reference solution, which no agent is shown."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    patch: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> SweRecord:
        """From a row of the data set, as `datasets` or a JSON line gives it; fields without use are ignored.

        Raises:
            InvalidInput: a field is missing or is not what it should be."""
        try:
            return cls(
                instance_id=str(row["instance_id"]),
                repo=str(row["repo"]),
                base_commit=str(row["base_commit"]),
                problem_statement=str(row["problem_statement"]),
                test_patch=str(row["test_patch"]),
                fail_to_pass=_names(row["FAIL_TO_PASS"]),
                pass_to_pass=_names(row["PASS_TO_PASS"]),
                patch=str(row.get("patch") or ""),
            )
        except KeyError as error:
            raise InvalidInput(
                f"the record {row.get('instance_id', '?')} has no field {error.args[0]!r}"
            ) from error

    @property
    def image(self) -> str:
        """The image that SWE-bench publishes for it: the repository in /testbed, its packages in conda's env
        "testbed". Double underscores are not allowed in image names; the data set's makers write _1776_."""
        return f"swebench/sweb.eval.x86_64.{self.instance_id.replace('__', '_1776_').lower()}:latest"


def load_records(path: Path) -> Iterator[SweRecord]:
    """The records of a JSON file (a list), or of a file with one JSON object a line.

    Raises:
        InvalidInput: it is neither, or a record is incomplete."""
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
        for row in rows:
            yield SweRecord.from_row(row)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is neither a JSON list nor a JSON object a line: {error}") from error


def bundled_records() -> Iterator[tuple[SweRecord, Path]]:
    """Each of the project's own, and the folder with its repository at ``base_commit``."""
    for path in sorted(BUNDLED.glob("*/record.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        for name in ("test_patch", "patch"):
            row[name] = (path.parent / f"{name}.diff").read_text(encoding="utf-8")
        yield SweRecord.from_row(row), path.parent / "repository"


def _names(value: Any) -> tuple[str, ...]:
    """A list, or the JSON text of one, as the published data set has it."""
    names = json.loads(value) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"a list of test names is wanted, not {value!r:.80}")
    return tuple(names)
