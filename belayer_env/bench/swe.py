"""What the agents of the recovery bench do: a software task in a repository of its own. Pure data.

Compilers are stood in for by `sleep`: they take their time and leave the cores to what is measured. All
output is the same in every run, clocks apart."""

from __future__ import annotations

import itertools

from belayer_env.spec import Task

__all__ = ["ACTIONS", "long_episode", "swe_task"]

WORKDIR = "/work"

_MODULE = '''\
"""Totals of orders, in cents."""


def total(items):
    return sum(price * count for price, count in items)


def discounted(items, percent):
    return total(items) - total(items) * percent / 100
'''

_TESTS = """\
import time

import pytest

from shop.orders import discounted, total

ITEMS = [(199, 2), (50, 3)]


@pytest.mark.parametrize("n", range(12))
def test_total(n):
    time.sleep(0.15)  # a data base that is waited for
    assert total(ITEMS * n) == 548 * n


def test_discounts_are_whole_cents():
    assert isinstance(discounted(ITEMS, 7), int)
"""

_PATCH = "sed -i 's|percent / 100|percent // 100|' shop/orders.py && git diff -U0"

_BUILD = (
    "python3 -m compileall -q -f shop && sleep {seconds} && mkdir -p build && "
    "cat shop/*.py | sha256sum | cut -c 1-16 | tee build/id"
)

_INDEX = (
    'python3 -c "import hashlib, json\n'
    "digests = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(400_000)]\n"
    "json.dump(digests[::100], open('build/index.json', 'w'))\n"
    'print(len(digests), digests[-1][:12])"'
)

_SUITE = "python3 -m pytest -q --tb=line -p no:cacheprovider tests"

ACTIONS = (
    "git log --oneline && ls -p",
    "cat shop/orders.py",
    "python3 -m http.server 8000 --bind 127.0.0.1 >/tmp/server.log 2>&1 &",
    "export SHOP_ENV=dev; tried=()",
    _BUILD.format(seconds=5),
    _SUITE,
    "grep -n percent -r shop tests --include '*.py'",
    "tried+=('true division'); git status --short",
    _PATCH,
    _SUITE,
    _BUILD.format(seconds=6),
    _INDEX,
    "git add -A shop && git commit -qm 'Discounts in whole cents' && git log --oneline",
    "head -c 8000000 /dev/zero | tr '\\0' 'x' >build/blob && wc -c build/blob",
    _SUITE + " -k total",
    _BUILD.format(seconds=5),
    "printf '\\n\\ndef is_free(items):\\n    return not total(items)\\n' >>shop/orders.py; git diff -U0",
    _SUITE,
    _BUILD.format(seconds=4),
    'echo "$SHOP_ENV ${#tried[@]}" | tee ~/notes; git diff --stat',
)
"""20 steps of about 30 s together."""

_LOOKING = (
    _SUITE + " -k whole",
    "git status --short",
    "cat shop/orders.py",
    "grep -n total -r shop tests --include '*.py'",
    "ls -p . shop tests",
    "git log --oneline | head -n 3",
    "python3 -c 'from shop.orders import total; print(total([(199, 2)]))'",
)
_CHANGING = (
    "echo '# seen' >>shop/orders.py; wc -l shop/orders.py",
    "sleep 0.4; cat shop/*.py | sha256sum | tee build.id",
    "python3 -m compileall -q -f shop; git add -A shop; git commit -qm more; git log --oneline | wc -l",
)


def long_episode(num_steps: int) -> tuple[str, ...]:
    """The actions of a longer episode: of four, three look around and one changes something. Of agents' turns
    about 75 % change nothing worth a checkpoint. Source: Crab, arXiv 2604.28138."""
    looking, changing = itertools.cycle(_LOOKING), itertools.cycle(_CHANGING)
    return tuple(next(changing) if number % 4 == 0 else next(looking) for number in range(1, num_steps + 1))


def swe_task(image: str) -> Task:
    """The repository, with what an agent finds in it."""
    date = "2026-01-05T09:00:00Z"
    return Task(
        image=image,
        instruction="Discounts are to be whole cents.",
        setup=(
            "mkdir -p shop tests && touch shop/__init__.py",
            f"cat >shop/orders.py <<'END'\n{_MODULE}END",
            f"cat >tests/test_orders.py <<'END'\n{_TESTS}END",
            "printf 'build*\\n__pycache__/\\n' >.gitignore",
            "git init -q -b main && git add . && git commit -qm 'as received'",
        ),
        env={
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_DATE": date,
            "GIT_AUTHOR_NAME": "Agent",
            "GIT_AUTHOR_EMAIL": "agent@example.org",
            "GIT_COMMITTER_NAME": "Agent",
            "GIT_COMMITTER_EMAIL": "agent@example.org",
        },
        workdir=WORKDIR,
    )
