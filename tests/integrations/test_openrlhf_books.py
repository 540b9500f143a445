"""An actor's death and its successor, without an actor: books and ledgers, a death at each instant between
them, weights that are not current, orphans. Needs no OpenRLHF."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from belayer_integrations.openrlhf import ActorKeepsDying, ActorRestarted, StaleWeights
from belayer_integrations.openrlhf.book import Past, context_digest, read_records, seed_record, turn_record
from belayer_integrations.openrlhf.books import KEEP_ANSWERED_S, KEEP_UNANSWERED_S, Books, is_stale
from belayer_integrations.openrlhf.calls import Call, call_under_way, current_call
from belayer_integrations.openrlhf.incarnation import Incarnation
from belayer_integrations.openrlhf.orphans import end_group
from belayer_integrations.openrlhf.resumption import BookAstray, retell
from belayer_integrations.openrlhf.sampling import Turn
from belayer_integrations.openrlhf.weights import WeightsSeen
from belayer_integrations.trajectory import Trajectory

from belayer_env import ContainerEnv
from belayer_env.errors import RecoveryFailed
from belayer_env.ledger import Step
from tests.integrations.openrlhf_crash import CALL, DEATH, FATAL_TURN, TURNS, open_episodes, play

SEED = 11
WHOLE = TURNS + 1
"""Turns of an episode, with the silent one."""


def die(instant: str, root: Path, *, seed: int | None = SEED, replay: str = "always") -> None:
    argv = [sys.executable, "-m", "tests.integrations.openrlhf_crash", instant, root, seed or "", replay]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
    assert done.returncode == DEATH, done.stderr


def text_of(sample: dict[str, Any]) -> str:
    return "".join(map(chr, sample["observation_tokens"]))


def row(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "extra_logs"}


@pytest.mark.parametrize(
    ("instant", "num_asked"),
    [
        ("begun", WHOLE),
        ("talk", WHOLE - FATAL_TURN + 1),
        ("booked", WHOLE - FATAL_TURN),
        ("run", WHOLE - FATAL_TURN),
        ("ledger", WHOLE - FATAL_TURN),
        ("played", 0),
        ("closed", 0),
    ],
)
def test_an_episode_goes_on_from_every_instant_at_which_its_process_may_die(
    tmp_path: Path, instant: str, num_asked: int
) -> None:
    """Token by token what it would have been, no turn is sampled twice, and no step runs twice."""
    calm, of_calm = play("", tmp_path / "calm", SEED)
    assert of_calm == WHOLE
    die(instant, tmp_path / "hit")
    hit, asked = play("", tmp_path / "hit", SEED)
    assert row(hit) == row(calm)
    assert asked == num_asked
    assert hit["extra_logs"]["container_steps"] == TURNS
    assert hit["extra_logs"]["container_resumptions"] == (instant in ("talk", "booked", "run", "ledger"))
    assert hit["extra_logs"]["container_rollbacks"] == 0


def test_two_deaths_in_a_row(tmp_path: Path) -> None:
    calm, _ = play("", tmp_path / "calm", SEED)
    die("talk", tmp_path / "hit")
    die("run", tmp_path / "hit")
    hit, _ = play("", tmp_path / "hit", SEED)
    assert row(hit) == row(calm)


def test_a_seed_that_was_not_given_is_drawn_once(tmp_path: Path) -> None:
    die("talk", tmp_path, seed=None)
    (book,) = tmp_path.glob("openrlhf/actor/task/0.jsonl")
    past = Past.of(read_records(book.read_text()))
    assert past.seed is not None
    hit, _ = play("", tmp_path, None)
    calm, _ = play("", tmp_path / "calm", past.seed)
    assert row(hit) == row(calm)


@pytest.mark.parametrize(("instant", "num_rollbacks"), [("run", 1), ("booked", 1), ("ledger", 0)])
def test_a_command_that_may_have_run_is_not_run_twice_where_the_task_forbids_it(
    tmp_path: Path, instant: str, num_rollbacks: int
) -> None:
    """The context goes back to what the ledger holds, of which nothing can be replayed here: to the start."""
    die(instant, tmp_path / "hit", replay="never")
    hit, _ = play("", tmp_path / "hit", SEED, replay="never")
    assert "error" not in hit
    assert hit["extra_logs"]["container_rollbacks"] >= num_rollbacks
    sums = [int(line.split("\n")[0]) for line in text_of(hit).split("|")[1:-1]]
    drawn = [int(turn.split("+")[1].split(")")[0]) for turn in text_of(hit).split("|")[:-2]]
    assert sums == [sum(drawn[: at + 1]) for at in range(len(drawn))]
    assert hit["reward"] == sum(sums)


def test_a_finished_samples_answer_is_given_again(tmp_path: Path) -> None:
    first, _ = play("", tmp_path, SEED)
    again, asked = play("", tmp_path, SEED)
    assert (asked, row(again)) == (0, row(first))


def test_an_episode_that_cannot_be_brought_back_is_begun_afresh_once(tmp_path: Path) -> None:
    """By another attempt, with draws of its own; what the dead process left is ended."""
    die("run", tmp_path)
    (left,) = open_episodes(tmp_path)

    def resume(*_: object) -> ContainerEnv:
        raise RecoveryFailed("no rung held", tried=("a checkpoint",))

    hit, asked = play("", tmp_path, SEED, resume_env=resume)
    calm, _ = play("", tmp_path / "calm", SEED)
    assert asked == WHOLE
    assert text_of(hit) != text_of(calm)
    assert hit["extra_logs"]["container_retries"] == 1
    assert left not in open_episodes(tmp_path)


def test_a_sample_that_was_lost_stays_lost(tmp_path: Path) -> None:
    """Another death must not be another try."""
    made: list[int] = []

    def make(*_: object) -> ContainerEnv:
        made.append(0)
        raise FileNotFoundError("no such image")

    first, _ = play("", tmp_path, SEED, make_env=make)
    again, _ = play("", tmp_path, SEED, make_env=make)
    assert first["error"] == again["error"] == "FileNotFoundError: no such image"
    assert len(made) == 1


def test_a_book_that_is_no_book_is_begun_anew(tmp_path: Path) -> None:
    die("run", tmp_path)
    (book,) = tmp_path.glob("openrlhf/actor/task/0.jsonl")
    book.write_text("{}\n" + book.read_text())
    calm, _ = play("", tmp_path / "calm", SEED)
    hit, asked = play("", tmp_path, SEED)
    assert (asked, row(hit)) == (WHOLE, row(calm))


def test_a_line_that_death_cut_short_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    calm, _ = play("", tmp_path / "calm", SEED)
    die("run", tmp_path)
    (book,) = tmp_path.glob("openrlhf/actor/task/0.jsonl")
    book.write_text(book.read_text()[:-7])
    hit, _ = play("", tmp_path, SEED)
    assert row(hit) == row(calm)
    Past.of(read_records(book.read_text()))


def test_a_ledger_that_knows_more_than_the_book_is_not_believed(tmp_path: Path) -> None:
    """A machine that lost its power may have kept the one and not the other."""
    calm, _ = play("", tmp_path / "calm", SEED)
    die("ledger", tmp_path)
    (book,) = tmp_path.glob("openrlhf/actor/task/0.jsonl")
    book.write_text("".join(line + "\n" for line in book.read_text().splitlines()[:-1]))
    hit, asked = play("", tmp_path, SEED)
    assert (asked, row(hit)) == (WHOLE, row(calm))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused nothing, but a directory in the way")
def test_a_book_that_cannot_be_written_takes_no_sample_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hit").mkdir()
    (tmp_path / "hit" / "openrlhf").write_text("a file where the directory should be")
    calm, _ = play("", tmp_path / "calm", SEED)
    hit, _ = play("", tmp_path / "hit", SEED)
    assert row(hit) == row(calm)
    assert "a sample has no book" in caplog.text


def test_books_are_removed_some_time_after_their_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = Books(lambda: tmp_path)
    other = Call("actor", "other")

    async def answer(call: Call) -> None:
        await books.open(call, 0, SEED)
        await books.close(call)

    asyncio.run(answer(CALL))
    asyncio.run(answer(other))
    assert len(list(tmp_path.glob("*/*/*.jsonl"))) == 2
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + KEEP_ANSWERED_S + 5)
    asyncio.run(books.close(Call("actor", "new")))
    assert list(tmp_path.glob("*/*/*.jsonl")) == []


def test_a_call_that_was_never_answered_is_waited_for_longer() -> None:
    assert not is_stale(KEEP_ANSWERED_S + 9, answered_at=0.0, touched_at=1.0)
    assert is_stale(KEEP_ANSWERED_S + 9, answered_at=1.0, touched_at=1.0)
    assert is_stale(KEEP_UNANSWERED_S + 9, answered_at=0.0, touched_at=1.0)


def told(*actions: str) -> tuple[list[int], list[Any], list[Step]]:
    """A prompt, the book and the ledger of an episode."""
    trajectory = _empty()
    records = []
    steps = []
    for at, action in enumerate(actions):
        turn = Turn([ord(character) for character in action], [-1.0] * len(action), is_cut=False)
        records.append(turn_record(turn, context_digest(trajectory.conversation.token_ids), {}))
        steps.append(Step(number=at + 1, action=action, observation=f"<{action}>", exit_code=0, reward=1.0))
        trajectory.speak(turn.token_ids, turn.logprobs)
        trajectory.observe([ord(character) for character in f"<{action}>"], 1.0, is_over=False)
    return trajectory.conversation.token_ids, Past.of(records).turns, steps


def _empty() -> Trajectory:
    return Trajectory([1, 2], max_turns=9, max_tokens=99, max_rollbacks=9)


def retold(turns: list[Any], steps: list[Step], replay: Any = "always") -> tuple[Trajectory, Turn | None]:
    trajectory = _empty()
    untold = retell(
        turns,
        steps,
        into=trajectory,
        action_of=lambda turn: "".join(map(chr, turn.token_ids)),
        encode=lambda text: [ord(character) for character in text],
        replay=replay,
    )
    return trajectory, untold


def test_a_ledger_that_went_back_takes_the_turns_behind_with_it() -> None:
    _, turns, steps = told("a", "b", "c", "d")
    short, _, _ = told("a")
    trajectory, untold = retold(turns, steps[:1])
    assert untold is None
    assert trajectory.conversation.token_ids == short
    trajectory, untold = retold(turns, steps[:3])
    assert untold == turns[3].turn
    trajectory, untold = retold(turns, steps[:3], replay="never")
    assert untold is None


def test_another_story_is_not_gone_on_with() -> None:
    _, turns, steps = told("a", "b")
    other = [steps[0], Step(number=2, action="x", observation="", exit_code=0)]
    with pytest.raises(BookAstray, match="another action"):
        retold(turns, other)
    other = [Step(number=1, action="a", observation="!", exit_code=0, reward=1.0), steps[1]]
    with pytest.raises(BookAstray, match="another context"):
        retold(turns, other)
    with pytest.raises(BookAstray, match="2 steps, the book 1"):
        retold(turns[:1], steps)


def test_a_call_is_that_of_the_tasks_begun_under_it() -> None:
    async def look() -> list[Call | None]:
        async def ask() -> Call | None:
            await asyncio.sleep(0)
            return current_call()

        with call_under_way(CALL):
            inside = asyncio.ensure_future(ask())
        return [await inside, await ask()]

    assert asyncio.run(look()) == [CALL, None]


def test_old_weights_are_never_sampled_from() -> None:
    first = WeightsSeen(is_first=True, were_sent=False)
    first.receive(by_group=True, is_last=False)
    first.require_current()  # upstream's own affair: a broadcast under way
    unsent = WeightsSeen(is_first=False, were_sent=False)
    unsent.require_current()
    unsent.join()
    unsent.receive(by_group=True, is_last=True)
    again = WeightsSeen(is_first=False, were_sent=True)
    with pytest.raises(StaleWeights, match=r"ckpt\.load_enable"):
        again.require_current()
    with pytest.raises(ActorRestarted, match=r"ckpt\.load_enable"):
        again.receive(by_group=True, is_last=True)
    again.receive(by_group=False, is_last=False)
    with pytest.raises(StaleWeights):
        again.require_current()
    again.receive(by_group=False, is_last=True)  # by CUDA IPC they come to whoever is there
    again.require_current()


def test_an_actor_that_keeps_dying_is_not_asked_for_ever() -> None:
    incarnation = Incarnation.after(None, node="n", group=2)
    for _ in range(2):
        incarnation = Incarnation.after(incarnation, node="n", group=2)
        incarnation.require_fruitful(3)
    with pytest.raises(ActorKeepsDying, match="3 times in a row"):
        Incarnation.after(incarnation, node="n", group=2).require_fruitful(3)
    answered = dataclasses.replace(incarnation, has_answered=True, got_weights=True)
    again = Incarnation.after(answered, node="m", group=3)
    again.require_fruitful(3)
    assert again == Incarnation(node="m", group=3, got_weights=True)


def test_what_a_dead_head_of_a_group_has_left_is_ended() -> None:
    script = "sleep 60 & sleep 60 & echo $!; exec sleep 60"
    head = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0)
    assert head.stdout is not None
    other = int(head.stdout.readline())
    head.stdout.close()
    assert end_group(head.pid) == 0  # it lives
    os.kill(other, 0)
    head.kill()
    head.wait()
    assert end_group(head.pid) == 2
    assert end_group(head.pid) == 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(other, signal.SIG_DFL)
        assert Path(f"/proc/{other}/stat").read_text().split()[2] == "Z"


def test_a_book_is_lines_of_plain_data() -> None:
    assert json.loads(json.dumps(seed_record(3))) == {"is": "seed", "seed": 3}
    with pytest.raises(ValueError, match="no record"):
        read_records("[]\n")
    with pytest.raises(ValueError, match="holds no 'wish'"):
        Past.of([{"is": "wish"}])
