"""A sample's book: the model's half of an episode, as the env's ledger is the other half. Pure.

The ledger holds each step's action and observation, but not the tokens and logprobs that the model said the
action with, and only those can be trained on. So each turn is written down before its step begins. After the
process has died the two halves are laid together (`resumption`): a turn without a step is one whose step has
to run still; a step without a turn cannot be."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer_integrations.openrlhf.played import Played
from belayer_integrations.openrlhf.sampling import Turn
from blake3 import blake3

from belayer_env import Rollback

__all__ = [
    "BookedTurn",
    "Past",
    "attempt_record",
    "context_digest",
    "episode_record",
    "lost_record",
    "played_record",
    "read_records",
    "seed_record",
    "turn_record",
    "undo_record",
]

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BookedTurn:
    """A turn of the model, and the digest of the tokens that it answered."""

    turn: Turn
    context: str


@dataclass(slots=True)
class Past:
    """What a book says happened. ``num_draws``: turns that were sampled in this attempt, those that were
    undone later included. ``tally``: its numbers as of the last record."""

    seed: int | None = None
    attempt: int = 0
    episode_id: str | None = None
    store: Path | None = None
    turns: list[BookedTurn] = field(default_factory=list)
    num_draws: int = 0
    rollbacks: list[Rollback] = field(default_factory=list)
    tally: dict[str, Any] = field(default_factory=dict)
    played: Played | None = None
    lost: str | None = None

    @classmethod
    def of(cls, records: Iterable[Record]) -> Past:
        """Laid together, oldest first."""
        past = cls()
        for record in records:
            past.add(record)
        return past

    @property
    def is_under_way(self) -> bool:
        """An episode had begun, and was not over."""
        return self.episode_id is not None and self.played is None and self.lost is None

    def add(self, record: Record) -> None:
        """What happened next.

        Raises:
            KeyError, TypeError, ValueError: it is no record."""
        self.tally = record.get("tally", self.tally)
        match record["is"]:
            case "seed":
                self.seed = record["seed"]
            case "attempt":
                self.attempt = record["number"]
                self.episode_id, self.store = None, None
                self.turns, self.rollbacks, self.num_draws = [], [], 0
            case "episode":
                self.episode_id, self.store = record["id"], Path(record["store"])
                self.turns, self.rollbacks, self.num_draws = [], [], 0
            case "turn":
                turn = Turn(record["token_ids"], record["logprobs"], is_cut=record["is_cut"])
                self.turns.append(BookedTurn(turn, record["context"]))
                self.num_draws += 1
            case "undo":
                self.rollbacks.append(Rollback(to_step=record["to_step"], reason=record["reason"]))
                del self.turns[record["to_step"] :]
            case "played":
                self.played = Played.from_json(record["played"])
            case "lost":
                self.lost = record["error"]
            case other:
                raise ValueError(f"a book holds no {other!r}")


def seed_record(seed: int) -> Record:
    """What the sample's draws come from."""
    return {"is": "seed", "seed": seed}


def attempt_record(number: int, tally: Record) -> Record:
    """The next attempt begins; the one before is over."""
    return {"is": "attempt", "number": number, "tally": tally}


def episode_record(episode_id: str, store: Path) -> Record:
    """An env was reset: its episode, and where that is catalogued."""
    return {"is": "episode", "id": episode_id, "store": str(store)}


def turn_record(turn: Turn, context: str, tally: Record) -> Record:
    """The model has spoken; whatever comes of it has not begun."""
    return {
        "is": "turn",
        "token_ids": list(turn.token_ids),
        "logprobs": list(turn.logprobs),
        "is_cut": turn.is_cut,
        "context": context,
        "tally": tally,
    }


def undo_record(rollback: Rollback, tally: Record) -> Record:
    """The env went back, and the conversation with it."""
    return {"is": "undo", "to_step": rollback.to_step, "reason": rollback.reason, "tally": tally}


def played_record(played: Played, tally: Record) -> Record:
    """The episode is over."""
    return {"is": "played", "played": played.to_json(), "tally": tally}


def lost_record(error: str, tally: Record) -> Record:
    """The sample cannot be had."""
    return {"is": "lost", "error": error, "tally": tally}


def context_digest(token_ids: Sequence[int]) -> str:
    """What the model was told, in one word."""
    return blake3(array("q", token_ids).tobytes()).hexdigest()[:32]


def read_records(text: str) -> list[Record]:
    """A book's lines.

    Raises:
        ValueError: one is no record."""
    records = [json.loads(line) for line in text.splitlines()]
    if not all(isinstance(record, dict) and "is" in record for record in records):
        raise ValueError("a line of the book is no record")
    return records
