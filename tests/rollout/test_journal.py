"""The journal in one process: what goes in comes out, bit by bit, and misuse is told."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import struct
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from belayer_rollout.errors import (
    ClientClosed,
    InvalidRequest,
    JournalDamaged,
    JournalFault,
    JournalFull,
    UnknownRequest,
)
from belayer_rollout.journal import Durability, Journal, JournalledRequest
from belayer_rollout.types import SamplingParams, TokenChunk

PARAMS = SamplingParams(
    max_tokens=100, seed=7, stop=("END",), stop_token_ids=(3,), extra={"a": [1, {"b": 2}]}
)


def chunk(*ids: int, worker: str = "w", version: int = 0, logprobs: tuple[float, ...] = ()) -> TokenChunk:
    return TokenChunk(ids, logprobs or tuple(-i / 3 for i in ids), worker, version)


def with_journal(
    path: Path, use: Callable[[Journal], Awaitable[None]], *, max_bytes: int | None = None
) -> None:
    async def go() -> None:
        journal = Journal(path, max_bytes=max_bytes)
        try:
            await use(journal)
        finally:
            await journal.close()

    asyncio.run(go())


async def add(journal: Journal, request: str, start: int, *ids: int, **of: int) -> None:
    pending = journal.append(request, start, chunk(*ids, **of))  # type: ignore[arg-type]
    assert pending is not None
    await pending


def size_of(path: Path) -> int:
    return path.stat().st_size


def reload(path: Path, request: str) -> JournalledRequest:
    found: list[JournalledRequest] = []

    async def load(journal: Journal) -> None:
        found.append(await journal.load(request))

    with_journal(path, load)
    return found[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.db"


def test_a_request_comes_back_as_it_went_in(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1, 2**31 - 1], PARAMS)
        await add(journal, "r", 0, 10)
        await add(journal, "r", 1, 11, 12)
        await add(journal, "r", 3, 13, version=2**40)
        await journal.note_failover("r", "w", "killed")
        await journal.finish("r", "stop", "END", 4)

    with_journal(path, use)
    found = reload(path, "r")
    assert (found.session, found.prompt_token_ids, found.params) == ("s", (1, 2**31 - 1), PARAMS)
    assert found.chunks == ((0, chunk(10, 11, 12)), (3, chunk(13, version=2**40)))
    assert (found.finish_reason, found.stop_reason, found.failovers, found.length) == ("stop", "END", 1, 4)


@pytest.mark.parametrize("stop_reason", [None, 3, "3", 2**40])
def test_a_stop_reason_keeps_its_type(path: Path, stop_reason: int | str | None) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        await journal.finish("r", "stop", stop_reason, 0)

    with_journal(path, use)
    assert reload(path, "r").stop_reason == stop_reason
    assert type(reload(path, "r").stop_reason) is type(stop_reason)


def test_odd_logprobs_survive_bit_by_bit(path: Path) -> None:
    # A NaN with a payload, the infinities, a subnormal and the negative zero.
    odd = struct.unpack("<5d", struct.pack("<5Q", 0x7FF8DEADBEEF0001, 0xFFF0 << 48, 0x7FF0 << 48, 1, 1 << 63))

    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        pending = journal.append("r", 0, chunk(1, 2, 3, 4, 5, logprobs=odd))
        assert pending is not None
        await pending

    with_journal(path, use)
    ((_, found),) = reload(path, "r").chunks
    assert struct.pack("<5d", *found.logprobs) == struct.pack("<5d", *odd)
    assert math.isnan(found.logprobs[0])


def test_a_missing_logprob_is_refused_and_never_becomes_zero(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        with pytest.raises(InvalidRequest, match="2 token ids with 1 logprobs"):
            journal.append("r", 0, TokenChunk((1, 2), (-0.5,), "w", 0))
        with pytest.raises(InvalidRequest, match="must be numbers"):
            journal.append("r", 0, TokenChunk((1,), (None,), "w", 0))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="32 bits"):
            journal.append("r", 0, chunk(2**31))
        # None of these left anything behind.
        await add(journal, "r", 0, 9)
        assert (await journal.load("r")).chunks == ((0, chunk(9)),)

    with_journal(path, use)


def test_tokens_that_do_not_follow_on_are_refused(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        await add(journal, "r", 0, 1, 2)
        for start in (0, 1, 3):
            with pytest.raises(InvalidRequest, match="has 2 tokens"):
                journal.append("r", start, chunk(5))
        with pytest.raises(InvalidRequest, match="has 2 tokens, not 3"):
            await journal.finish("r", "length", None, 3)
        await journal.finish("r", "length", None, 2)
        with pytest.raises(UnknownRequest, match="open or load it first"):
            journal.append("r", 2, chunk(5))

    with_journal(path, use)


def test_an_id_is_opened_again_only_with_the_same_content(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1, 2], PARAMS)
        await add(journal, "r", 0, 1)
        await journal.open_request("r", "s", [1, 2], PARAMS)
        await add(journal, "r", 1, 2)
        for session, prompt, params in (
            ("t", [1, 2], PARAMS),
            ("s", [1, 3], PARAMS),
            ("s", [1, 2], SamplingParams()),
        ):
            with pytest.raises(InvalidRequest, match="is taken"):
                await journal.open_request("r", session, prompt, params)

    with_journal(path, use)
    assert reload(path, "r").length == 2


def test_a_finished_request_takes_no_more_tokens_when_it_is_opened_again(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        await add(journal, "r", 0, 1)
        await journal.finish("r", "stop", None, 1)
        await journal.open_request("r", "s", [1], PARAMS)
        await journal.load("r")
        with pytest.raises(UnknownRequest):
            journal.append("r", 1, chunk(2))

    with_journal(path, use)
    assert reload(path, "r").chunks == ((0, chunk(1)),)


@pytest.mark.parametrize("reload_between", [False, True])
def test_a_cut_voids_what_stands_in_rows_and_what_does_not(path: Path, reload_between: bool) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        await add(journal, "r", 0, 1, 2, 3)
        await add(journal, "r", 3, 4, 5, version=1)
        if reload_between:
            await journal.load("r")
        await journal.cut("r", 2)
        await add(journal, "r", 2, 7, version=2)
        await journal.cut("r", 9)
        assert (await journal.load("r")).chunks == ((0, chunk(1, 2)), (2, chunk(7, version=2)))
        await journal.finish("r", "stop", None, 1)

    with_journal(path, use)
    assert reload(path, "r").chunks == ((0, chunk(1)),)


def test_unknown_requests_are_unknown(path: Path) -> None:
    async def use(journal: Journal) -> None:
        with pytest.raises(UnknownRequest, match="no request 'r'"):
            await journal.load("r")
        with pytest.raises(UnknownRequest):
            journal.append("r", 0, chunk(1))
        with pytest.raises(UnknownRequest):
            await journal.finish("r", "stop", None, 0)

    with_journal(path, use)


def test_asking_for_an_unknown_request_writes_no_rows(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        for n in range(20):
            await add(journal, "r", n, n)
            with pytest.raises(UnknownRequest):
                await journal.load("new")
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("SELECT count(*) FROM tokens").fetchone() == (0,)

    with_journal(path, use)
    assert reload(path, "r").length == 20


def test_a_closed_journal_says_so(path: Path) -> None:
    async def go() -> None:
        journal = Journal(path)
        await journal.open_request("r", "s", [1], PARAMS)
        await journal.close()
        await journal.close()
        with pytest.raises(ClientClosed):
            journal.append("r", 0, chunk(1))
        with pytest.raises(ClientClosed):
            await journal.load("r")

    asyncio.run(go())


def test_nothing_is_taken_while_it_closes(path: Path) -> None:
    async def go() -> None:
        journal = Journal(path)
        await journal.open_request("r", "s", [1], PARAMS)
        closing_it = asyncio.ensure_future(journal.close())
        await asyncio.sleep(0)
        with pytest.raises(ClientClosed):
            journal.append("r", 0, chunk(1))
        with pytest.raises(ClientClosed):
            await journal.cut("r", 0)
        await closing_it

    asyncio.run(go())
    assert reload(path, "r").chunks == ()


def test_all_appends_of_one_commit_share_a_future_that_cancelling_one_task_leaves_alone(path: Path) -> None:
    async def use(journal: Journal) -> None:
        for n in range(3):
            await journal.open_request(f"r{n}", "s", [1], PARAMS)
        # No await between them: the writer may have begun with the first at most.
        futures = [journal.append(f"r{n}", 0, chunk(n)) for n in range(3)]
        assert len(set(futures)) <= 2
        assert futures[2] is not None

        async def wait() -> None:
            assert futures[2] is not None
            await futures[2]

        doomed, other = asyncio.ensure_future(wait()), asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        doomed.cancel()
        await other
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert futures[2].done()

    with_journal(path, use)


def test_an_empty_chunk_adds_nothing(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        await add(journal, "r", 0)
        assert (await journal.load("r")).chunks == ()

    with_journal(path, use)


@pytest.mark.parametrize("durability", ["strict", "relaxed"])
def test_thirty_thousand_tokens_are_few_rows(path: Path, durability: Durability) -> None:
    num = 30_000

    async def go() -> None:
        journal = Journal(path, durability=durability)
        await journal.open_request("long", "s", [1], SamplingParams(max_tokens=num))
        for index in range(num):
            journal.append("long", index, chunk(index))
            if index % 50 == 0:
                await asyncio.sleep(0)
        await journal.finish("long", "length", None, num)
        await journal.close()

    asyncio.run(go())
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM tokens").fetchone()[0] <= 3
        assert db.execute("SELECT count(*) FROM log").fetchone()[0] == 0
        (pages,), (free,) = (db.execute(f"PRAGMA {n}").fetchone() for n in ("page_count", "freelist_count"))
        assert (pages - free) * 4096 < num * 12 * 1.1 + 100_000
    assert reload(path, "long").chunks == ((0, chunk(*range(num))),)


def test_sessions_and_requests_are_listed_with_the_tokens_of_running_ones(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("a1", "a", [1, 2, 3], PARAMS)
        await journal.open_request("b1", "b", [1], PARAMS)
        await journal.open_request("a2", "a", [1], PARAMS)
        await add(journal, "a1", 0, 1, 2)
        await journal.finish("a1", "length", None, 2)
        await add(journal, "a2", 0, 1, 2, 3, 4)
        await journal.note_failover("a2", "w", "hung")
        watcher = Journal(path)
        sessions, (first, second) = await watcher.sessions(), await watcher.requests("a")
        await watcher.close()
        assert [(s.session, s.requests, s.unfinished, s.tokens) for s in sessions] == [
            ("a", 2, 1, 6),
            ("b", 1, 1, 0),
        ]
        assert (first.request_id, first.prompt_tokens, first.tokens, first.owner_pid) == ("a1", 3, 2, None)
        assert (second.request_id, second.tokens, second.failovers) == ("a2", 4, 1)
        assert second.owner_pid is not None

    with_journal(path, use)


def test_pruning_a_session_shrinks_the_file_and_spares_what_runs(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("old", "old", list(range(200_000)), PARAMS)
        await journal.finish("old", "stop", None, 0)
        await journal.open_request("new", "new", [1], PARAMS)
        await add(journal, "new", 0, 1)
        assert await journal.prune("old") == 1
        assert size_of(path) < 200_000
        with pytest.raises(InvalidRequest, match="runs 'new'"):
            await journal.prune("new")
        assert await journal.prune("old") == 0
        with pytest.raises(UnknownRequest):
            await journal.load("old")
        await add(journal, "new", 1, 2)

    with_journal(path, use)
    assert reload(path, "new").length == 2


def test_a_full_journal_prunes_its_oldest_finished_sessions_first(path: Path) -> None:
    bound = 2**20

    async def use(journal: Journal) -> None:
        await journal.open_request("running", "running", [1], SamplingParams(max_tokens=10**6))
        await add(journal, "running", 0, 1)
        for n in range(60):
            await journal.open_request(f"r{n}", f"s{n}", list(range(10_000)), PARAMS)
            await journal.finish(f"r{n}", "stop", None, 0)
        left = [s.session for s in await journal.sessions()]
        assert left[0] == "running"
        newest = [f"s{n}" for n in range(60)]
        assert left[1:] == newest[-len(left) + 1 :]
        assert 5 < len(left) < 30
        assert size_of(path) <= bound
        assert (await journal.load("running")).length == 1

    with_journal(path, use, max_bytes=bound)


def test_tokens_that_meet_the_bound_make_room_for_themselves(path: Path) -> None:
    bound, width = 2**20, 100

    async def use(journal: Journal) -> None:
        for n in range(20):
            await journal.open_request(f"old{n}", f"old{n}", list(range(10_000)), PARAMS)
            await journal.finish(f"old{n}", "stop", None, 0)
        await journal.open_request("r", "s", [1], SamplingParams(max_tokens=10**6))
        for start in range(0, 30_000, width):
            await add(journal, "r", start, *range(start, start + width))
        assert (await journal.load("r")).chunks == ((0, chunk(*range(30_000))),)
        left = [s.session for s in await journal.sessions()]
        assert "old0" not in left
        assert left[-1] == "s"
        assert size_of(path) <= bound

    with_journal(path, use, max_bytes=bound)


def test_a_full_journal_with_nothing_finished_says_so_and_keeps_what_it_had(path: Path) -> None:
    async def use(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], SamplingParams(max_tokens=10**6))
        await add(journal, "r", 0, 1, 2)
        with pytest.raises(JournalFull, match="raise max_bytes, or prune"):
            await journal.open_request("big", "t", list(range(300_000)), PARAMS)
        with pytest.raises(JournalFull):
            journal.append("r", 2, chunk(3))
        # Loading opens it again, as small things still fit.
        assert (await journal.load("r")).length == 2
        await add(journal, "r", 2, 3)

    with_journal(path, use, max_bytes=2**20)
    assert reload(path, "r").chunks == ((0, chunk(1, 2, 3)),)


def test_a_file_that_is_no_journal_is_refused_with_the_remedy(path: Path) -> None:
    path.write_bytes(b"no database at all, " * 1000)
    with pytest.raises(JournalDamaged, match="name another file"):
        Journal(path)
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE other (x)")
    with pytest.raises(JournalDamaged, match="is no journal"):
        Journal(path)


def test_a_path_that_cannot_be_opened_is_a_journal_fault(tmp_path: Path) -> None:
    with pytest.raises(JournalFault, match="unable to open"):
        Journal(tmp_path / "missing" / "tokens.db")


@pytest.mark.parametrize("column", ["ids", "logprobs"])
def test_a_flipped_bit_in_the_tokens_of_one_request_is_found_and_spares_the_others(
    path: Path, column: str
) -> None:
    async def fill(journal: Journal) -> None:
        for request in ("good", "bad"):
            await journal.open_request(request, "s", [1], PARAMS)
            await add(journal, request, 0, 1, 2, 3)

    with_journal(path, fill)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        select = f"SELECT {column} FROM tokens WHERE request = 2"
        data = bytearray(db.execute(select).fetchone()[0])
        data[5] ^= 4
        db.execute(f"UPDATE tokens SET {column} = ? WHERE request = 2", (bytes(data),))

    async def use(journal: Journal) -> None:
        with pytest.raises(JournalDamaged, match="checksum"):
            await journal.load("bad")
        assert (await journal.load("good")).chunks == ((0, chunk(1, 2, 3)),)

    with_journal(path, use)


def test_a_missing_row_is_found(path: Path) -> None:
    async def fill(journal: Journal) -> None:
        await journal.open_request("r", "s", [1], PARAMS)
        await add(journal, "r", 0, 1)
        await add(journal, "r", 1, 2, version=1)
        await journal.finish("r", "stop", None, 2)

    with_journal(path, fill)
    for start, complaint in ((1, "has 1 of its 2 tokens"), (0, "has 0 of its 2 tokens")):
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("DELETE FROM tokens WHERE start = ?", (start,))
        with pytest.raises(JournalDamaged, match=complaint):
            reload(path, "r")


def test_pages_overwritten_with_garbage_are_damage_not_tokens(path: Path) -> None:
    async def fill(journal: Journal) -> None:
        await journal.open_request("r", "s", list(range(50_000)), PARAMS)
        await add(journal, "r", 0, 1)

    with_journal(path, fill)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(JournalDamaged, match="recover"):
        reload(path, "r")
