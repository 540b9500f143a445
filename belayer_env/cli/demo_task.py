"""What the demo's agent is given (a repository with a bug) and what it does about it. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from belayer_env import paths
from belayer_env.cli.demo_play import Drill
from belayer_env.spec import Task

__all__ = ["ACTIONS", "DRILL", "STATE_VARIABLES", "demo_task"]

WORKDIR = "/testbed"

GIT_ENV = {
    # Fixed: a commit's name holds its date, and two runs are to be compared.
    "GIT_AUTHOR_DATE": "2026-01-05T09:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-05T09:00:00Z",
    "GIT_AUTHOR_NAME": "Agent",
    "GIT_AUTHOR_EMAIL": "agent@example.org",
    "GIT_COMMITTER_NAME": "Agent",
    "GIT_COMMITTER_EMAIL": "agent@example.org",
}

PATCH = """\
git apply <<'PATCH'
--- a/slotbook/intervals.py
+++ b/slotbook/intervals.py
@@ -9,3 +9,3 @@
     def overlaps(self, other: "Interval") -> bool:
-        return self.start <= other.end and other.start <= self.end
+        return self.start < other.end and other.start < self.end

PATCH"""

NEW_TEST = """\
cat >>tests/test_intervals.py <<'TEST'


def test_an_empty_interval_overlaps_nothing_it_touches():
    assert not Interval(10, 10).overlaps(Interval(10, 20))
TEST"""

ACTIONS = (
    "ls -p . *",
    "git log --oneline && git status --short && cat README.md",
    "cat slotbook/calendar.py slotbook/feed.py",
    # The tests of the feed need a server, in the background from here on.
    "python3 -m http.server 8000 --bind 127.0.0.1 --directory data >/tmp/server.log 2>&1 &",
    "export SLOTBOOK_URL=http://127.0.0.1:8000/bookings.json; "
    "fetch() { python3 -c 'import sys, urllib.request as r; "
    'sys.stdout.buffer.write(r.urlopen(sys.argv[1]).read())\' "$1"; }; '
    'until fetch "$SLOTBOOK_URL" >/tmp/feed 2>&1; do sleep 0.05; done; grep -c room /tmp/feed',
    # No clock in what the agent sees: a replay must print the same.
    'suite() { python3 -m pytest -q --tb=line -p no:cacheprovider "$@" 2>&1 '
    "| sed 's/ in [0-9.]*s$//'; return \"${PIPESTATUS[0]}\"; }; suite",
    "cd slotbook && cat -n intervals.py",
    "grep -n 'overlaps\\|merge' *.py; tried=('max of the ends')",
    "sed -i '/merged.-1. =/s/interval.end)/max(merged[-1].end, interval.end))/' intervals.py && git diff -U0",
    "( cd .. && suite )",
    "tried+=('half-open'); cd \"$OLDPWD\"; " + PATCH,
    "suite",
    NEW_TEST,
    'fetch "$SLOTBOOK_URL" | grep blocked; jobs',
    'suite && echo "${#tried[@]} things tried: ${tried[*]}" | tee ~/notes',
    "git commit -qam 'Fix overlaps and merge' && git log --oneline && git status --short",
)
"""One shell command a step. They print nothing that a second run would not print as well."""

DRILL = Drill(after_step=8, during_step=12, sign="pytest")
"""The first between two checkpoints of "every-3"; the second in the test run after both of the agent's
edits."""

STATE_VARIABLES = ("SLOTBOOK_URL", "tried", "OLDPWD")
"""What the agent left in its shell, beside its functions."""


def demo_task(image: str = "") -> Task:
    """The task; ``image`` by default the test image that `belayer setup` makes."""
    return Task(
        image=image or f"rootfs:{paths.test_image()}",
        instruction="The tests of slotbook fail. Find out why, mend it, and commit.",
        setup=(
            f"cd {WORKDIR}",
            *_write_commands(resources.files(__package__).joinpath("demo_repo")),
            "git init -q -b main . && git add . && git commit -qm 'slotbook, as received'",
        ),
        env={"PYTHONDONTWRITEBYTECODE": "1", **GIT_ENV},
        workdir=WORKDIR,
    )


def _write_commands(root: Traversable) -> Iterator[str]:
    for name, text in _files(root):
        folder = name.rpartition("/")[0] or "."
        yield f"mkdir -p {folder} && cat >{name} <<'END-OF-{name}'\n{text}END-OF-{name}"


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif entry.is_file():
            yield f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")
