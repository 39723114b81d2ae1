"""Plain steps that a draft policy allowed in advance, so that it need not be asked for each."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq
from typing import NamedTuple

from kvbraid.engine.sequence import Sequence


class Untold(NamedTuple):
    """Plain steps that the policy was not told of, and the sequences in them."""

    num_steps: int = 0
    num_windows: int = 0


class QuietSteps:
    """Of one engine. A step is quiet when the same sequences decode as when steps were allowed."""

    def __init__(self) -> None:
        self._sequences: Seq[Sequence] = ()
        self._num_left = 0
        self._untold = Untold()

    def allow(self, decoding: Seq[Sequence], num_steps: int) -> None:
        """So many more steps of these sequences need no plan."""
        self._sequences, self._num_left = decoding, num_steps

    @property
    def is_allowed(self) -> bool:
        """Whether the next step may be one, should the sequences be the same."""
        return self._num_left > 0

    def begin(self, decoding: Seq[Sequence]) -> bool:
        """Whether the next step, of these sequences, is quiet."""
        if self._num_left <= 0 or len(decoding) != len(self._sequences):
            return False
        if not all(map(operator.is_, decoding, self._sequences)):
            return False
        self._num_left -= 1
        return True

    def ran(self, num_windows: int) -> None:
        """A quiet step of so many sequences was executed."""
        self._untold = Untold(self._untold.num_steps + 1, self._untold.num_windows + num_windows)

    def end(self) -> Untold:
        """What has run since the last call of this; nothing is allowed any more."""
        untold, self._untold = self._untold, Untold()
        self.allow((), 0)
        return untold
