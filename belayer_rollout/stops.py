"""Stop strings, matched in the text of all attempts at a request. Pure: token ids in, a verdict out.

An engine sees the text of its own attempt only, so that a stop string which lies across a take-over would
pass it by. The rules are vLLM's (`vllm/v1/engine/detokenizer.py`): text is released once it is whole UTF-8,
the stop string that completes first wins (in the order asked, if two complete at once), the token that
completes it is the last one kept, and nothing that ends within the first ``min_tokens`` tokens counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from belayer_rollout.errors import InvalidRequest
from belayer_rollout.text import IncrementalText

__all__ = ["StopWatch"]


class StopWatch:
    """Reads the tokens of one request, over all its attempts, and says where its text must end."""

    __slots__ = ("_count", "_longest", "_min_tokens", "_stop", "_tail", "_text")

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
        self._text = IncrementalText(decode, prompt)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self._min_tokens = min_tokens
        self._count = 0
        self._tail = ""

    def feed(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Read some tokens. (how many of them to keep, the stop string) if one is complete: the request ends
        there, and the watch has nothing more to say."""
        for index, token in enumerate(token_ids):
            text = self._text.feed(token)
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
