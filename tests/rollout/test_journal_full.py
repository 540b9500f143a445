"""The journal on a disk that is really full: a small tmpfs."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer_rollout.errors import JournalFault, JournalFull
from belayer_rollout.journal import Journal
from belayer_rollout.types import SamplingParams
from tests.rollout.journal_child import PROMPT, token

PARAMS = SamplingParams(max_tokens=10**6)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        # Lazily: a journal may be open on it, when its test failed.
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"

    def write() -> None:
        with filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write()
    return filler


async def append_until_full(journal: Journal, lengths: dict[str, int]) -> dict[str, int]:
    """Append to all requests at once, round by round, until the journal is full; what was durable of each."""
    durable = dict(lengths)
    for _ in range(100_000):
        futures = []
        try:
            for request in lengths:
                index = lengths[request]
                futures.append((request, journal.append(request, index, token(request, index))))
                lengths[request] += 1
        except JournalFull:
            assert not futures, "an append was refused while the ones before it may still be committed"
            return durable
        await asyncio.sleep(0)
        strict = [(request, future) for request, future in futures if future is not None]
        results = await asyncio.gather(*(future for _, future in strict), return_exceptions=True)
        for (request, _), result in zip(strict, results, strict=True):
            if result is None:
                durable[request] = lengths[request]
            else:
                assert isinstance(result, JournalFull)
    raise AssertionError("the disk never filled")


def test_a_full_disk_fails_every_future_and_append_until_there_is_room_again(disk: Path) -> None:
    async def go() -> None:
        journal = Journal(disk / "tokens.db")
        lengths = {f"r{n}": 0 for n in range(5)}
        for request in lengths:
            await journal.open_request(request, "s", PROMPT, PARAMS)
        filler = fill(disk)
        durable = await append_until_full(journal, lengths)
        for request in lengths:
            with pytest.raises(JournalFull, match="free some disk"):
                journal.append(request, lengths[request], token(request, lengths[request]))
            with pytest.raises(JournalFull):
                await journal.finish(request, "stop", None, durable[request])
        with pytest.raises(JournalFull):
            await journal.open_request("big", "s", range(100_000), PARAMS)
        os.unlink(filler)  # noqa: PTH108 - in a coroutine, but a moment
        await journal.reopen()
        for request, length in durable.items():
            with pytest.raises(JournalFault, match="load it to go on"):
                journal.append(request, length, token(request, length))
        for request, length in durable.items():
            found = await journal.load(request)
            assert found.length >= length
            for start, chunk in found.chunks:
                expected = [token(request, start + n) for n in range(len(chunk.token_ids))]
                assert chunk.token_ids == tuple(c.token_ids[0] for c in expected)
                assert chunk.logprobs == tuple(c.logprobs[0] for c in expected)
            pending = journal.append(request, found.length, token(request, found.length))
            assert pending is not None
            await pending
            await journal.finish(request, "length", None, found.length + 1)
        await journal.close()

    asyncio.run(go())


def test_relaxed_appends_are_refused_once_the_disk_is_full(disk: Path) -> None:
    async def go() -> None:
        journal = Journal(disk / "tokens.db", durability="relaxed")
        await journal.open_request("r", "s", PROMPT, PARAMS)
        for index in range(10):
            assert journal.append("r", index, token("r", index)) is None
        await journal.note_failover("r", "w", "killed")
        filler = fill(disk)
        lengths = {"r": 10}
        await append_until_full(journal, lengths)
        os.unlink(filler)  # noqa: PTH108 - in a coroutine, but a moment
        # Loading opens the journal again by itself.
        found = await journal.load("r")
        assert 10 <= found.length <= lengths["r"]
        assert journal.append("r", found.length, token("r", found.length)) is None
        await journal.finish("r", "length", None, found.length + 1)
        await journal.close()

    asyncio.run(go())


def test_a_journal_closes_quietly_on_a_full_disk(disk: Path) -> None:
    async def go() -> None:
        journal = Journal(disk / "tokens.db")
        await journal.open_request("r", "s", PROMPT, PARAMS)
        fill(disk)
        await append_until_full(journal, {"r": 0})
        await journal.close()

    asyncio.run(go())


def test_what_a_closed_journal_could_not_let_go_on_a_full_disk_is_taken_over(disk: Path) -> None:
    async def go() -> None:
        path = disk / "tokens.db"
        first = Journal(path)
        await first.open_request("r", "s", PROMPT, PARAMS)
        fill(disk)
        durable = await append_until_full(first, {"r": 0})
        await first.close()
        (disk / "filler").unlink()
        second = Journal(path)
        try:
            found = await second.load("r")
            assert sum(len(chunk.token_ids) for _, chunk in found.chunks) >= durable["r"]
        finally:
            await second.close()

    asyncio.run(go())
