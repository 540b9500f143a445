"""Token ids to text, piece by piece. Pure.

The way is vLLM's (`vllm/tokenizers/detokenizer_utils.py`): a token's text is what decoding with it adds to
decoding without it, over a short window, and it is held back while it ends within a character."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["IncrementalText", "TextDecoder", "TextStream", "decode_function"]

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


class IncrementalText:
    """The text of a growing list of tokens; the time for a token does not depend on how many there are."""

    __slots__ = ("_decode", "_prefix", "_read", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # window[:read] has been released as text; window[prefix:read] is decoded again with what follows, for
        # tokenizers whose text of a token depends on its neighbour.
        self._window = list(prompt[-PRIMED_TOKENS:])
        self._prefix = 0
        self._read = len(self._window)

    def feed(self, token: int) -> str:
        """The text that this token releases: "" while a character is not whole yet."""
        window = self._window
        window.append(token)
        before, after = self._texts(len(window))
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
            before, after = self._texts(upto)
        return self._release(upto, before, after)

    def flush(self) -> str:
        """What is still held, now that no token follows: half a character is given as U+FFFD."""
        before, after = self._texts(len(self._window))
        return self._release(len(self._window), before, after)

    def _texts(self, upto: int) -> tuple[str, str]:
        return (
            self._decode(self._window[self._prefix : self._read]),
            self._decode(self._window[self._prefix : upto]),
        )

    def _release(self, upto: int, before: str, after: str) -> str:
        # Forget what is behind the window: it stays as short as the longest hold.
        self._window = self._window[self._read :]
        self._prefix, self._read = 0, upto - self._read
        return after[len(before) :]


class TextStream:
    """The text that a reader of a request sees: what may be the beginning of a stop string is held back, and
    from the stop string on there is nothing (unless ``keep_stop``)."""

    def __init__(
        self,
        tokenizer: TextDecoder,
        prompt: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._text = IncrementalText(decode_function(tokenizer), prompt)
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""
        self._is_over = False

    def feed(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The new text of these tokens; with ``is_last`` also what was held."""
        said = ""
        for token in token_ids:
            self._count += 1
            said += self._take(self._text.feed(token))
        if is_last and not self._is_over:
            said += self._take(self._text.flush()) + self._held
            self._held, self._is_over = "", True
        return said

    def _take(self, text: str) -> str:
        if self._is_over:
            return ""
        known = len(self._held)
        self._held += text
        if self._count > self._min_tokens:
            ends = [
                (at + len(stop), at)
                for stop in self._stop
                if (at := self._held.find(stop, max(0, known + 1 - len(stop)))) >= 0
            ]
            if ends:
                end, at = min(ends)
                said, self._held, self._is_over = self._held[: end if self._keep_stop else at], "", True
                return said
        keep = 0 if self._keep_stop else max(map(self._could_begin, self._stop), default=0)
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return said

    def _could_begin(self, stop: str) -> int:
        """How many of the last characters may be the beginning of this stop string."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)
