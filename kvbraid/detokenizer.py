"""Turns a stream of tokens into a stream of text with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from kvbraid.tokenizer import Tokenizer


class Detokenizer:
    """Text of one completion, token by token.

    The released texts never split a character, never contain a stop string or a part of one that
    was found, and together with `finish` equal `Tokenizer.decode` of all the tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = StopScanner(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; every later token is to be dropped."""
        return self._stop.found

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that can be shown now (often empty)."""
        self._num_tokens += 1
        if token_id in self._tokenizer.special_ids:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._num_tokens <= self._min_tokens:
            return text
        return self._stop.push(text)

    def finish(self) -> str:
        """Ends the text; returns what was withheld, empty after a stop string."""
        if self.stopped:
            return ""
        return self._stop.push(self._utf8.decode(b"", final=True)) + self._stop.finish()


class StopScanner:
    """Passes text through up to the first stop string.

    Of several stop strings the one that is complete first wins, the longest of those that are
    complete at the same character; so the result does not depend on how the text was cut.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._pending = ""
        self.found = False

    def push(self, text: str) -> str:
        """Takes more text; returns what cannot be part of a stop string any more."""
        if not self._stop:
            return text
        self._pending += text
        hit = self._first_hit()
        if hit is not None:
            self.found = True
            released, self._pending = self._pending[:hit], ""
            return released
        held = max(_overlap(self._pending, stop) for stop in self._stop)
        cut = len(self._pending) - held
        released, self._pending = self._pending[:cut], self._pending[cut:]
        return released

    def finish(self) -> str:
        """Releases the withheld text: no stop string was completed."""
        released, self._pending = self._pending, ""
        return released

    def _first_hit(self) -> int | None:
        """Start of the stop string that is complete first, None without one."""
        starts = [(self._pending.find(stop), stop) for stop in self._stop]
        hits = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(hits)[1] if hits else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
