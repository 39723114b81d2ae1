"""Steps that run without a plan, until the policy is told of them: how many, and what they took.

What a plain step costs is measured here. A planned one takes longer by what its plan and its books
do not find room for beside the device, and drafting would seem to pay where it does not.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from kvbraid.engine.sequence import Sequence

# Steps of one size that are timed between two calls of `take`.
_NUM_TIMED = 8


class Taken(NamedTuple):
    """num_windows: steps times sequences. seconds: of steps, by the number of their sequences."""

    num_steps: int
    num_windows: int
    seconds: Mapping[int, Seq[float]]


class QuietSteps:
    """Used by rank 0's engine thread."""

    def __init__(self) -> None:
        self._decoding: Seq[Sequence] = ()
        self._began_s = 0.0
        self._is_timed = False
        self._num_steps = 0
        self._num_windows = 0
        self._seconds: dict[int, list[float]] = defaultdict(list)

    def is_timing(self, num_sequences: int) -> bool:
        """Whether more is to be known of what a step of so many sequences takes."""
        return len(self._seconds.get(num_sequences, ())) < _NUM_TIMED

    def begin(self, decoding: Seq[Sequence], now_s: float) -> None:
        """A step of these sequences begins, so the one before is over. Where that was quiet and of
        the same ones, the time between was its own."""
        if self._is_timed and are_same(self._decoding, decoding):
            self._seconds[len(decoding)].append(now_s - self._began_s)
        self._decoding, self._began_s, self._is_timed = decoding, now_s, False

    def ran(self, num_windows: int, *, is_timed: bool) -> None:
        """A quiet step has run, for so many of its sequences. is_timed: False where its time says
        nothing, or it did not begin here."""
        self._num_steps += 1
        self._num_windows += num_windows
        self._is_timed = is_timed and num_windows == len(self._decoding)

    def take(self) -> Taken:
        """All since the last call of this."""
        taken = Taken(self._num_steps, self._num_windows, dict(self._seconds))
        self._num_steps = self._num_windows = 0
        self._seconds.clear()
        return taken


def are_same(some: Seq[Sequence], others: Seq[Sequence]) -> bool:
    """Whether these are the same sequences, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
