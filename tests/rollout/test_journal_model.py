"""The journal against a dict, by a state machine, through closing, crashing (a copy of the files) and
cutting."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from belayer_rollout import journal as journal_module
from belayer_rollout.journal import Journal, JournalledRequest
from belayer_rollout.types import FinishReason, SamplingParams, TokenChunk

PARAMS = SamplingParams(max_tokens=10**6)
SMALL_LOG_BYTES = 300
"""So that a few appends make the writer turn its log into runs."""

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where a sync takes no time: what a crash leaves is a copy of the files here, not what a disk has."""

tokens = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0.0, allow_nan=False)), max_size=5)
which = st.integers(0, 5)
Token = tuple[int, float, str, int]


class JournalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=MEMORY))
        self.patch = mock.patch.object(journal_module, "LOG_BYTES", SMALL_LOG_BYTES)
        self.patch.start()
        self.loop = asyncio.new_event_loop()
        self.path = self.directory / "0.db"
        self.journal = Journal(self.path)
        self.model: dict[str, list[Token]] = {}
        self.finished: dict[str, tuple[FinishReason, int | str | None]] = {}
        self.failovers: dict[str, int] = {}
        self.copies = 0

    @initialize(num=st.integers(1, 4))
    def begin(self, num: int) -> None:
        for n in range(num):
            self.open("ab"[n % 2])

    @rule(session=st.sampled_from("ab"))
    def open(self, session: str) -> None:
        request = f"r{len(self.model)}"
        self.loop.run_until_complete(self.journal.open_request(request, session, (1, 2), PARAMS))
        self.model[request] = []
        self.failovers[request] = 0

    @rule(parts=st.lists(st.tuples(which, tokens, st.sampled_from("uv"), st.integers(0, 2)), min_size=1))
    def append_together(self, parts: list[tuple[int, list[tuple[int, float]], str, int]]) -> None:
        requests = [self._running(at) for at, *_ in parts]

        async def append() -> None:
            pending = None
            for request, (_, new, worker, version) in zip(requests, parts, strict=True):
                chunk = TokenChunk(tuple(i for i, _ in new), tuple(p for _, p in new), worker, version)
                start = len(self.model[request])
                self.model[request] += [(i, p, worker, version) for i, p in new]
                pending = self.journal.append(request, start, chunk)
            assert pending is not None
            await pending

        self.loop.run_until_complete(append())

    @rule(at=which, length=st.integers(0, 12), new=tokens)
    def cut_and_append_in_one_commit(self, at: int, length: int, new: list[tuple[int, float]]) -> None:
        request = self._running(at)
        kept = self.model[request][:length]
        chunk = TokenChunk(tuple(i for i, _ in new), tuple(p for _, p in new), "w", 0)

        async def cut() -> None:
            cutting = asyncio.ensure_future(self.journal.cut(request, length))
            await asyncio.sleep(0)
            self.journal.append(request, len(kept), chunk)
            await cutting
            # It is durable once a later commit is.
            await self.journal.note_failover(request, "w", "killed")

        self.loop.run_until_complete(cut())
        self.model[request] = kept + [(i, p, "w", 0) for i, p in new]
        self.failovers[request] += 1

    @rule(at=which, length=st.integers(0, 12))
    def cut(self, at: int, length: int) -> None:
        request = self._running(at)
        self.loop.run_until_complete(self.journal.cut(request, length))
        del self.model[request][length:]

    @rule(at=which, cut=st.integers(0, 2), stop=st.sampled_from([None, 3, "END"]))
    def finish(self, at: int, cut: int, stop: int | str | None) -> None:
        request = self._running(at)
        length = max(0, len(self.model[request]) - cut)
        self.loop.run_until_complete(self.journal.finish(request, "stop", stop, length))
        del self.model[request][length:]
        self.finished[request] = ("stop", stop)

    @rule(at=which)
    def load(self, at: int) -> None:
        request = self._running(at)
        self._check(request, self.loop.run_until_complete(self.journal.load(request)))

    @rule()
    def close_and_open_again(self) -> None:
        self.loop.run_until_complete(self.journal.close())
        self.journal = Journal(self.path)
        self._check_all()

    @rule()
    def crash(self) -> None:
        """What a kill at this moment leaves: the files as they are, and an owner that is no more."""
        self.copies += 1
        copy = self.directory / f"{self.copies}.db"
        for end in ("", "-wal"):
            if (source := Path(f"{self.path}{end}")).exists():
                shutil.copy(source, f"{copy}{end}")
        with closing(sqlite3.connect(copy, isolation_level=None)) as db:
            db.execute("UPDATE writers SET mark = 'boot:namespace:0'")
        self.loop.run_until_complete(self.journal.close())
        self.path = copy
        self.journal = Journal(copy)
        self._check_all()

    @invariant()
    def lists_what_is_there(self) -> None:
        listed = self.loop.run_until_complete(self.journal.requests())
        assert {r.request_id: r.tokens for r in listed} == {r: len(t) for r, t in self.model.items()}

    def teardown(self) -> None:
        self.loop.run_until_complete(self.journal.close())
        self.loop.close()
        self.patch.stop()
        shutil.rmtree(self.directory)

    def _running(self, at: int) -> str:
        running = [request for request in self.model if request not in self.finished]
        if not running:
            self.open("a")
            return list(self.model)[-1]
        return running[at % len(running)]

    def _check_all(self) -> None:
        for request in self.model:
            self._check(request, self.loop.run_until_complete(self.journal.load(request)))

    def _check(self, request: str, found: JournalledRequest) -> None:
        flat = [
            (i, p, chunk.worker, chunk.weight_version)
            for _, chunk in found.chunks
            for i, p in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ]
        assert flat == self.model[request]
        finish = self.finished.get(request, (None, None))
        assert (found.finish_reason, found.stop_reason) == finish
        assert found.failovers == self.failovers[request]


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
