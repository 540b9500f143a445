"""What `belayer rollout status` shows of a journal: requests and sessions, those of running processes too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from belayer_rollout.journal_codec import ID_BYTES, LogRow, Tail, replay
from belayer_rollout.journal_file import JournalFile
from belayer_rollout.journal_records import RequestSummary, SessionSummary

__all__ = ["list_requests", "log_rows", "sessions_of"]


def list_requests(
    db: JournalFile, session: str | None, live_pid: Callable[[int | None], int | None]
) -> list[RequestSummary]:
    """Every request, or those of one session, in the order in which they began. ``live_pid`` gives the
    process of a writer, if that one lives."""
    select = """
        SELECT r.id, request_id, session, length(c.prompt), owner, finish_reason,
            (SELECT count(*) FROM failovers f WHERE f.request = r.id),
            (SELECT coalesce(sum(length(ids)), 0) FROM tokens t WHERE t.request = r.id)
        FROM requests r JOIN contents c ON c.request = r.id
        WHERE ?1 IS NULL OR session = ?1 ORDER BY r.id"""
    rows = db.rows(select, (session,))
    lengths = {row[0]: row[7] // ID_BYTES for row in rows}
    tails = {row[0]: Tail(row[0], lengths[row[0]]) for row in rows if row[5] is None}
    lengths.update(_with_logs(db, tails))
    pids = {owner: live_pid(owner) for owner in {row[4] for row in rows}}
    return [
        RequestSummary(
            request_id=request_id,
            session=of,
            prompt_tokens=prompt_bytes // ID_BYTES,
            tokens=lengths[row],
            finish_reason=finish_reason,
            failovers=failovers,
            owner_pid=pids[owner],
        )
        for row, request_id, of, prompt_bytes, owner, finish_reason, failovers, _ in rows
    ]


def sessions_of(requests: Sequence[RequestSummary]) -> list[SessionSummary]:
    """The sessions of these requests, in the order in which they began."""
    of: dict[str, list[RequestSummary]] = {}
    for request in requests:
        of.setdefault(request.session, []).append(request)
    return [
        SessionSummary(
            session=session,
            requests=len(members),
            unfinished=sum(member.finish_reason is None for member in members),
            tokens=sum(member.tokens for member in members),
        )
        for session, members in of.items()
    ]


def log_rows(db: JournalFile, writer: int) -> list[LogRow]:
    """The log of one writer, in order."""
    select = "SELECT sources, heads, ids, logprobs, crc FROM log WHERE writer = ? ORDER BY seq"
    return [LogRow(*row) for row in db.rows(select, (writer,))]


def _with_logs(db: JournalFile, tails: dict[int, Tail]) -> dict[int, int]:
    """The lengths that the logs of all writers add up to."""
    lengths: dict[int, int] = {}
    for (writer,) in db.rows("SELECT DISTINCT writer FROM log"):
        owned = db.rows("SELECT id FROM requests WHERE owner = ?", (writer,))
        own = {row: tails[row] for (row,) in owned if row in tails}
        replay(log_rows(db, writer), own)
        lengths.update({row: tail.length for row, tail in own.items()})
    return lengths
