"""How often a sequence's output holds each token. Knows no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]


class SeenTokens(NamedTuple):
    """Distinct token ids [k] and how often each is in the output [k] (0: in the prompt only).

    Views of a growing array: valid until the sequence's next token.
    """

    ids: Int64Array
    counts: Int64Array


class TokenCounts:
    """Distinct token ids with their output counts, in arrays that grow in place."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids: Int64Array = np.empty(64, dtype=np.int64)
        self._counts: Int64Array = np.empty(64, dtype=np.int64)

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """The tokens are in the prompt."""
        for token_id in dict.fromkeys(token_ids):
            self._slot(token_id)

    def add_output(self, token_id: int) -> None:
        """One more token of the output."""
        slot = self._slot(token_id)
        self._counts[slot] += 1

    def after(self, assumed: Iterable[int]) -> SeenTokens:
        """What is seen once `assumed` follow the output; the counts themselves stay as they are."""
        ids, counts = self._ids[: len(self._index)], self._counts[: len(self._index)]
        if not (extra := Counter(assumed)):
            return SeenTokens(ids, counts)
        counts = counts.copy()
        new = []
        for token_id, count in extra.items():
            if token_id in self._index:
                counts[self._index[token_id]] += count
            else:
                new.append((token_id, count))
        added = np.array(new, dtype=np.int64).reshape(-1, 2)
        return SeenTokens(np.concatenate((ids, added[:, 0])), np.concatenate((counts, added[:, 1])))

    def _slot(self, token_id: int) -> int:
        slot = self._index.get(token_id)
        if slot is None:
            slot = self._index[token_id] = len(self._index)
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[slot], self._counts[slot] = token_id, 0
        return slot
