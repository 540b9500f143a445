"""`belayer chaos`: faults that really hit, told from what an agent must never see; and what is left of it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_bench.machine import Machine
from belayer_env.chaos.look import Outcome, differences
from belayer_env.chaos.run import ChaosReport, run_chaos
from belayer_env.chaos.strikes import REACH, Deck, Instant, Kind, Strike, parse_kinds
from belayer_env.chaos.task import ACTIONS, chaos_task
from belayer_env.errors import InvalidInput
from belayer_env.ledger import Step
from belayer_env.sandbox.layers import open_layers
from belayer_env.spec import Task
from belayer_env.store import Store

BELAYER = Path(sys.executable).with_name("belayer")

# -- what is drawn and what is compared


def test_every_kind_meets_every_instant_it_can_hit_before_one_comes_twice() -> None:
    deck = Deck(random.Random(3), tuple(Kind))
    size = sum(len(instants) for instants in REACH.values())
    for _ in range(3):
        drawn = [deck.draw() for _ in range(size)]
        assert Counter((strike.kind, strike.instant) for strike in drawn) == {
            (kind, instant): 1 for kind in Kind for instant in REACH[kind]
        }
        assert all(0 <= strike.delay < 1 for strike in drawn)


def test_the_same_seed_draws_the_same() -> None:
    one, other = (Deck(random.Random(7), tuple(Kind)) for _ in range(2))
    assert [one.draw() for _ in range(40)] == [other.draw() for _ in range(40)]


def test_kinds_are_parsed() -> None:
    assert parse_kinds("kill, oom") == (Kind.KILL, Kind.OOM)
    for wrong in ("", ",", "kill,meteor"):
        with pytest.raises(InvalidInput, match="kill,oom,freeze"):
            parse_kinds(wrong)


def _outcome(observation: str = "a\n", files: tuple[str, ...] = ("x", "y")) -> Outcome:
    step = Step(number=1, action="echo", observation=observation, exit_code=0)
    return Outcome(steps=(step,), state={"files": files, "processes": ("init", "sleep 1", "sleep 1")})


def test_equal_runs_do_not_differ() -> None:
    assert differences(_outcome(), _outcome()) == []


def test_each_difference_is_a_line() -> None:
    assert differences(_outcome(), _outcome(files=("x", "z"))) == ["files: - y", "files: + z"]
    assert "echo" in differences(_outcome(), _outcome("b\n"))[0]
    fewer = Outcome(steps=(), state={**_outcome().state, "processes": ("init", "sleep 1")})
    assert differences(_outcome(), fewer) == ["number of steps: 1 and 0", "processes: - sleep 1"]


def test_a_report_fails_on_what_must_never_happen() -> None:
    machine = Machine(cpu="any", cores=2, memory_bytes=1 << 30, kernel="6.18")
    strike = Strike(kind=Kind.KILL, instant=Instant.RESTORE, delay=0.5)
    report = ChaosReport(machine=machine, seed=1, hits=[strike, strike], rollbacks=["told"])
    assert not report.has_failed
    found = report.to_json()
    assert (found["faults"], found["recovered"], found["rolled_back"]) == (2, 1, 1)
    assert (found["by_kind"]["kill"], found["by_instant"]["during a restore"]) == (2, 2)
    for name in ("differences", "lost", "leaks"):
        failed = ChaosReport(machine=machine, seed=1)
        getattr(failed, name).append("one")
        assert failed.has_failed
        assert failed.to_json()["found"] == ["one"]


# -- on real sandboxes


@pytest.fixture
def store(store_dir: Path, runtime_names: frozenset[str]) -> Iterator[Path]:
    """A store of the test's own; nothing may be left in it."""
    if "runc" not in runtime_names:
        pytest.skip("the runc runtime does not give FULL here; run: make setup")
    own = store_dir / f"store-{time.monotonic_ns()}"
    own.mkdir()
    yield own
    left = [*(own / "sandboxes").glob("*"), *(own / "checkpoints").glob("*")]
    open_layers(store_dir).drop(own)
    assert not left


def play(store: Path, image: str, *, faults: int, seed: int, standby: bool = False) -> ChaosReport:
    report = run_chaos(
        chaos_task(image),
        ACTIONS,
        faults=faults,
        seed=seed,
        kinds=tuple(Kind),
        standby=standby,
        runtime="runc",
        store=store,
    )
    assert not report.has_failed, report.to_json()["found"]
    assert len(report.hits) >= faults
    return report


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("standby", "faults"), [(False, 20), (True, 10)])
def test_no_agent_can_tell(store: Path, image: str, standby: bool, faults: int) -> None:
    report = play(store, image, faults=faults, seed=11, standby=standby)
    assert report.rollbacks == []  # these actions print the same each time
    assert len({hit.instant for hit in report.hits}) >= 4
    assert report.recoveries


@pytest.mark.criu
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("standby", [False, True])
def test_no_agent_can_tell_at_length(store: Path, image: str, standby: bool) -> None:
    report = play(store, image, faults=300, seed=1, standby=standby)
    assert {hit.kind for hit in report.hits} == set(Kind)
    assert {hit.instant for hit in report.hits} == set(Instant)
    assert {"SandboxGone", "SandboxOOM", "SandboxFrozen", "SandboxHung", "StoreFull"} <= set(report.surfaced)


@pytest.mark.criu
def test_a_task_whose_own_runs_differ_is_refused(store: Path, image: str) -> None:
    with pytest.raises(InvalidInput, match="two undisturbed runs"):
        run_chaos(
            Task(image=image),
            ["cat /proc/sys/kernel/random/uuid"],
            faults=1,
            seed=1,
            kinds=[Kind.KILL],
            runtime="runc",
            store=store,
        )


@pytest.mark.criu
def test_ones_own_task_is_played_and_ctrl_c_leaves_nothing(store: Path, image: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"from belayer_env import Task\ntask = Task(image={image!r})\n")
    (tmp_path / "actions").write_text("N=1; sleep 900 &\n\necho $N >>/root/f; cat /root/f\n")
    argv: list[str | Path] = [
        BELAYER,
        "chaos",
        "--task",
        "mine:task",
        "--actions",
        "actions",
        "--store",
        store,
    ]
    argv += ["--runtime", "runc", "--kinds", "kill,runtime", "--json"]
    done = subprocess.run([*argv, "--faults", "3"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["bench"], found["unnoticed_divergences"], found["lost_episodes"], found["leaks"]) == (
        "chaos", 0, 0, 0,
    )  # fmt: skip
    assert found["faults"] >= 3
    for signum in (signal.SIGINT, signal.SIGTERM):
        chaos = subprocess.Popen(
            [*argv, "--faults", "1000"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert chaos.stderr is not None
        with chaos.stderr:
            for line in chaos.stderr:
                if "of 1000 faults" in line:
                    break
            chaos.send_signal(signum)
            chaos.stderr.read()
        assert chaos.wait() != 0
        with Store(store) as opened:
            assert opened.homes() == []
            assert [record for record in opened.episodes() if record.state == "open"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kinds", "meteor"], "kinds is a list"),
        (["--task", "os:sep"], "together"),
        (["--task", "os:sep", "--actions", "nowhere"], "not a belayer_env.Task"),
        (["--task", "no.such:task", "--actions", "nowhere"], "module:attribute"),
    ],
)
def test_what_cannot_be_played_is_said(arguments: list[str], words: str) -> None:
    done = subprocess.run([BELAYER, "chaos", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert words in " ".join(done.stderr.split())
