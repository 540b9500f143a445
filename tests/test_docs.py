"""What the documents say is so: their programs run, their links lead somewhere, their commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_env.sandbox.layers import open_layers
from belayer_env.store import Store

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PROGRAM = re.compile(r"^<!-- runnable -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|^(?: {4}).*$|`[^`]+`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"(?:^|[\s`/])belayer ([a-z]+)((?:[ ]+(?:--?[a-z][a-z-]*|[a-z]+|[A-Z]+))*)", re.MULTILINE
)
CODE_COMMANDS = {"setup", "doctor", "demo", "bench", "ps", "gc", "timeline", "chaos", "rollout"}


def programs() -> Iterator[object]:
    for document in DOCUMENTS:
        for number, found in enumerate(PROGRAM.finditer(document.read_text()), start=1):
            yield pytest.param(found[1], id=f"{document.relative_to(ROOT)}-{number}")
    yield pytest.param((ROOT / "examples/quickstart.py").read_text(), id="examples/quickstart.py")


def commands() -> list[tuple[str, str]]:
    """Each `belayer ...` in the documents' code, as its subcommand and the words after that."""
    found = set()
    for document in DOCUMENTS:
        for code in CODE.finditer(document.read_text()):
            found |= {(match[1], match[2].strip()) for match in COMMAND.finditer(code[0])}
    return sorted(found)


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def state_home(store_dir: Path) -> Iterator[Path]:
    """The default store of the programs lies below it."""
    home = store_dir / "state"
    home.mkdir()
    yield home
    open_layers(store_dir).drop(home)


@pytest.mark.criu
@pytest.mark.parametrize("program", list(programs()))
def test_a_runnable_program_runs_and_leaves_nothing(program: str, state_home: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env=os.environ | {"XDG_STATE_HOME": str(state_home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Store(state_home / "belayer") as store:
        assert store.homes() == []
        assert {episode.state for episode in store.episodes()} == {"closed"}


@pytest.mark.criu
def test_the_quickstart_prints_what_the_readme_says(state_home: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/quickstart.py"],
        env=os.environ | {"XDG_STATE_HOME": str(state_home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = re.search(r"^It prints\n\n```text\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert said is not None
    assert _without_chance(done.stdout) == _without_chance(said[1])


def test_the_readme_shows_the_quickstart() -> None:
    shown = PROGRAM.search((ROOT / "README.md").read_text())
    assert shown is not None
    _, _, program = (ROOT / "examples/quickstart.py").read_text().partition("# ruff: noqa: T201\n\n")
    assert shown[1] == program
    assert len(program.split("\n\n")[1].splitlines()) <= 10


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (document.parent / path) if path else document
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


@pytest.mark.parametrize(("name", "rest"), commands())
def test_a_command_and_its_options_exist(name: str, rest: str) -> None:
    assert name in CODE_COMMANDS
    words = rest.split()
    # A word that is no option, right after the name, is a subcommand of these two, or prose.
    below = words[:1] if name in ("bench", "rollout") and words and not words[0].startswith("-") else []
    usage = _help(name, *below)
    for option in [word for word in words if word.startswith("-")]:
        assert option in usage


def test_every_command_is_in_the_documents() -> None:
    assert {name for name, _ in commands()} == CODE_COMMANDS


def _help(*command: str) -> str:
    belayer = Path(sys.executable).parent / "belayer"
    done = subprocess.run(
        [belayer, *command, "--help"],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _without_chance(text: str) -> str:
    """Less what no two runs have in common: a checkpoint's name, and how long something took."""
    return re.sub(r"(total_s|started_s)=[\d.]+", r"\1=N", re.sub(r"ck-\w+", "ck-ID", text))
