"""Stop strings, matched in the text of all attempts at a request. Pure: token ids in, a verdict out.

An engine sees the text of its own attempt only, so that a stop string which lies across a take-over would
pass it by. The rules are vLLM's (`vllm/v1/engine/detokenizer.py`): text is released once it is whole UTF-8,
the stop string that completes first wins (in the order asked, if two complete at once), the token that
completes it is the last one kept, and nothing that ends within the first ``min_tokens`` tokens counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol

from belayer_rollout.errors import InvalidRequest

__all__ = ["StopWatch", "TextDecoder", "decode_function"]

PRIMED_TOKENS = 5
"""So much of the prompt is decoded with the first token: some tokenizers drop a text's leading space.
Source: vLLM's INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET."""

MOST_HELD = 8
"""Tokens that may wait for the rest of a character, twice what UTF-8 can need. Without a limit a model that
emits lone bytes would make the window, and the time for a token, grow for ever."""

_LONGEST_CHARACTER = 4
_REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """A tokenizer's way back to text: `tokenizers.Tokenizer` and those of transformers have it."""

    @property
    def decode(self) -> Callable[..., str]:
        """Token ids -> text."""
        ...


def decode_function(
    tokenizer: TextDecoder, *, skip_special_tokens: bool = True
) -> Callable[[Sequence[int]], str]:
    """``tokenizer.decode`` with the options that vLLM decodes with, as far as it knows them."""
    wanted = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    try:
        known = set(inspect.signature(tokenizer.decode).parameters)
    except ValueError:
        # Written in Rust, without a signature: tokenizers.Tokenizer, which knows the first option.
        known = {"skip_special_tokens"}
    options = {name: value for name, value in wanted.items() if name in known}
    return lambda token_ids: tokenizer.decode(token_ids, **options)


class StopWatch:
    """Reads the tokens of one request, over all its attempts, and says where its text must end."""

    __slots__ = (
        "_count",
        "_decode",
        "_longest",
        "_min_tokens",
        "_prefix",
        "_read",
        "_stop",
        "_tail",
        "_window",
    )

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        stop: Sequence[str],
        *,
        min_tokens: int = 0,
    ) -> None:
        """Raises:
        InvalidRequest: no stop string, or an empty one."""
        if not stop or not all(stop):
            raise InvalidRequest(f"stop strings must be there and not be empty: {stop!r}")
        self._decode = decode
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self._min_tokens = min_tokens
        self._count = 0
        # window[:read] has been released as text; window[prefix:read] is decoded again with what follows, for
        # tokenizers whose text of a token depends on its neighbour.
        self._window = list(prompt[-PRIMED_TOKENS:])
        self._prefix = 0
        self._read = len(self._window)
        self._tail = ""

    def feed(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Read some tokens. (how many of them to keep, the stop string) if one is complete: the request ends
        there, and the watch has nothing more to say."""
        for index, token in enumerate(token_ids):
            text = self._text_of(token)
            self._count += 1
            if not text:
                continue
            known = self._tail
            self._tail = (known + text)[-self._longest :]
            if self._count > self._min_tokens and (found := self._first_stop(known, text)):
                return index + 1, found
        return None

    def _first_stop(self, known: str, text: str) -> str | None:
        """The stop string that completes first within ``text``; ``known`` is what stands before it."""
        whole = known + text
        best: tuple[int, str] | None = None
        for stop in self._stop:
            # It must end within the new text: what ended before was looked at, or came too early to count.
            at = whole.find(stop, max(0, len(known) + 1 - len(stop)))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), stop)
        return best[1] if best else None

    def _text_of(self, token: int) -> str:
        """The text that this token releases: "" while a character is not whole yet."""
        window = self._window
        window.append(token)
        before = self._decode(window[self._prefix : self._read])
        after = self._decode(window[self._prefix :])
        upto = len(window)
        is_held = upto - self._read <= MOST_HELD
        if len(after) <= len(before):
            # A special token without text: the next one is decoded with what stands before both.
            if is_held:
                return ""
        elif after.endswith(_REPLACEMENT):
            if is_held:
                return ""
            # What can still become a character is within the last few tokens; the rest never will.
            upto -= _LONGEST_CHARACTER
            after = self._decode(window[self._prefix : upto])
        # Forget what is behind the window: it stays as short as the longest hold.
        held = window[self._read :]
        self._prefix, self._read = 0, upto - self._read
        self._window = held
        return after[len(before) :]
