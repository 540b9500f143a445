"""How tokens become bytes in the journal, and come back. Pure: no I/O, no clock.

Token ids are packed as little-endian int32, logprobs as float64 (so that NaN and -inf come back bit by bit).
Two shapes hold them:

- a `Run`: consecutive tokens of one request, from one worker under one weight version: a row of `tokens`;
- a `LogRow`: all that one commit added, of however many requests, in the order in which it came: a row of
  `log`. Its ``heads`` are int32 quadruples (request row, start, count, source); a count of -1 is a cut: the
  tokens from ``start`` on are void. ``sources`` is JSON: the (worker, weight version) pairs of this row.

The log is written for every commit, as one row at the end of one table: a page or two, where a row for each
of a thousand requests would touch a thousand pages. Now and then (see `journal`) the tails that its rows
describe are written as runs, and the log starts anew."""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

from belayer_rollout.errors import InvalidRequest, JournalDamaged
from belayer_rollout.types import SamplingParams, TokenChunk

__all__ = [
    "ID_BYTES",
    "LOGPROB_BYTES",
    "LogEntries",
    "LogRow",
    "Run",
    "Tail",
    "TailPart",
    "checksum",
    "pack_ids",
    "pack_logprobs",
    "params_from_text",
    "params_text",
    "replay",
    "to_bytes",
    "unpack_ids",
    "unpack_logprobs",
]

ID_BYTES = 4
LOGPROB_BYTES = 8
CUT = -1
"""The count of a head that is a cut."""

_BIG = sys.byteorder == "big"


def pack_ids(token_ids: Sequence[int]) -> array[int]:
    """Token ids as int32.

    Raises:
        InvalidRequest: one that is no 32-bit integer."""
    try:
        return array("i", token_ids)
    except (OverflowError, TypeError) as exc:
        raise InvalidRequest(f"token ids must be integers of 32 bits: {exc}") from exc


def pack_logprobs(logprobs: Sequence[float]) -> array[float]:
    """Logprobs as float64.

    Raises:
        InvalidRequest: one that is no number (None, say: a logprob that is missing is never made a zero)."""
    try:
        return array("d", logprobs)
    except TypeError as exc:
        raise InvalidRequest(f"logprobs must be numbers: {exc}") from exc


def unpack_ids(data: bytes) -> array[int]:
    """The inverse of `pack_ids` and `to_bytes`."""
    return cast("array[int]", _from_bytes("i", data))


def unpack_logprobs(data: bytes) -> array[float]:
    """The inverse of `pack_logprobs` and `to_bytes`."""
    return cast("array[float]", _from_bytes("d", data))


def to_bytes(packed: array[Any]) -> bytes:
    """Little-endian on every machine."""
    if _BIG:
        packed = array(packed.typecode, packed)
        packed.byteswap()
    return packed.tobytes()


def _from_bytes(typecode: str, data: bytes) -> array[Any]:
    packed: array[Any] = array(typecode)
    try:
        packed.frombytes(data)
    except ValueError as exc:
        raise JournalDamaged(f"a row of the journal has half a token: {exc}") from exc
    if _BIG:
        packed.byteswap()
    return packed


def params_text(params: SamplingParams) -> str:
    """Sampling parameters as canonical JSON: equal texts are equal parameters.

    Raises:
        InvalidRequest: ``extra`` holds what JSON cannot."""
    try:
        return json.dumps(asdict(params) | {"extra": dict(params.extra)}, sort_keys=True)
    except (TypeError, ValueError) as exc:
        raise InvalidRequest(f"params.extra must be plain JSON to be journalled: {exc}") from exc


def params_from_text(text: str) -> SamplingParams:
    """The inverse of `params_text`."""
    try:
        return SamplingParams(**json.loads(text))
    except (TypeError, ValueError) as exc:
        raise JournalDamaged(f"the parameters of a request are not what was written: {exc}") from exc


@dataclass(slots=True)
class Run:
    """Consecutive tokens of one request from one worker under one weight version."""

    start: int
    worker: str
    weight_version: int
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))

    @property
    def stop(self) -> int:
        """The index after its last token."""
        return self.start + len(self.ids)

    def chunk(self) -> TokenChunk:
        """As a chunk without a finish reason."""
        return TokenChunk(tuple(self.ids), tuple(self.logprobs), self.worker, self.weight_version)


class TailPart(NamedTuple):
    """What of a request is to be written into `tokens`: first void the rows from ``cut`` on, then add
    runs."""

    request: int
    cut: int | None
    runs: list[Run]


@dataclass(slots=True)
class Tail:
    """The end of an open request: its tokens that `tokens` does not hold yet."""

    request: int
    """The request's row."""
    length: int
    """Of the whole request, in tokens."""
    runs: list[Run] = field(default_factory=list)
    cut_at: int | None = None
    """Rows of `tokens` from this token on are void."""

    def add(
        self, start: int, ids: array[int], logprobs: array[float], worker: str, weight_version: int
    ) -> None:
        """Tokens at ``start``, which is the length so far."""
        run = self.runs[-1] if self.runs else None
        if run is None or run.weight_version != weight_version or run.worker != worker:
            run = Run(start, worker, weight_version)
            self.runs.append(run)
        run.ids.extend(ids)
        run.logprobs.extend(logprobs)
        self.length = start + len(ids)

    def cut(self, length: int) -> None:
        """Drop the tokens from ``length`` on."""
        if length >= self.length:
            return
        first_here = self.runs[0].start if self.runs else self.length
        if length < first_here:
            self.cut_at = length if self.cut_at is None else min(length, self.cut_at)
        while self.runs and self.runs[-1].start >= length:
            self.runs.pop()
        if self.runs:
            last = self.runs[-1]
            del last.ids[length - last.start :]
            del last.logprobs[length - last.start :]
        self.length = length

    def take(self) -> TailPart | None:
        """What is to be written; the tail is then empty. None: nothing."""
        if not self.runs and self.cut_at is None:
            return None
        part = TailPart(self.request, self.cut_at, self.runs)
        self.runs, self.cut_at = [], None
        return part


class LogRow(NamedTuple):
    """A row of the log, without its key and its writer."""

    sources: str
    heads: bytes
    ids: bytes
    logprobs: bytes
    crc: int

    @property
    def num_bytes(self) -> int:
        """Of its payload."""
        return len(self.sources) + len(self.heads) + len(self.ids) + len(self.logprobs)


class LogEntries:
    """What one commit adds to the log, gathered entry by entry."""

    __slots__ = ("heads", "ids", "logprobs", "sources")

    def __init__(self) -> None:
        self.heads: array[int] = array("i")
        self.ids: array[int] = array("i")
        self.logprobs: array[float] = array("d")
        self.sources: dict[tuple[str, int], int] = {}

    def add(
        self,
        request: int,
        start: int,
        ids: array[int],
        logprobs: array[float],
        worker: str,
        weight_version: int,
    ) -> None:
        """Tokens of a request."""
        sources = self.sources
        source = sources.setdefault((worker, weight_version), len(sources))
        self.heads.extend((request, start, len(ids), source))
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)

    def add_cut(self, request: int, length: int) -> None:
        """The request's tokens from ``length`` on are void."""
        self.heads.extend((request, length, CUT, 0))

    def row(self) -> LogRow | None:
        """As one row; None when there is nothing."""
        if not self.heads:
            return None
        sources = json.dumps(list(self.sources))
        parts = (to_bytes(self.heads), to_bytes(self.ids), to_bytes(self.logprobs))
        return LogRow(sources, *parts, crc=checksum(sources.encode(), *parts))


def checksum(*parts: bytes) -> int:
    """CRC-32 over all parts. SQLite keeps none of the pages of a database."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def replay(rows: Sequence[LogRow], tails: Mapping[int, Tail]) -> None:
    """Bring ``tails`` (by request row) to where the log's rows, in order, lead. Entries of requests that are
    not in ``tails`` are passed over: those are finished, and their tokens stand in `tokens`.

    Raises:
        JournalDamaged: a row that is not what was written, or that does not follow on what is there."""
    for row in rows:
        for request, start, ids, logprobs, source in _entries(row):
            tail = tails.get(request)
            if tail is None:
                continue
            if source is None:
                tail.cut(start)
            elif start == tail.length:
                tail.add(start, ids, logprobs, *source)
            else:
                raise JournalDamaged(
                    f"the log has tokens at {start} for a request that has {tail.length}: rows are missing"
                )


def _entries(
    row: LogRow,
) -> Iterator[tuple[int, int, array[int], array[float], tuple[str, int] | None]]:
    if checksum(row.sources.encode(), row.heads, row.ids, row.logprobs) != row.crc:
        raise JournalDamaged("a row of the log does not have its checksum")
    sources = [(worker, version) for worker, version in json.loads(row.sources)]
    heads, ids, logprobs = unpack_ids(row.heads), unpack_ids(row.ids), unpack_logprobs(row.logprobs)
    first = 0
    for at in range(0, len(heads), 4):
        request, start, count, source = heads[at : at + 4]
        if count == CUT:
            yield request, start, ids[:0], logprobs[:0], None
        else:
            stop = first + count
            yield request, start, ids[first:stop], logprobs[first:stop], sources[source]
            first = stop
