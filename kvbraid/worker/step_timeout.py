"""How long an engine step may wait for drafts."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

_NUM_STEPS = 9


class StepTimeout:
    """The smaller of a fixed limit and a fraction of what a step takes without the wait.

    A step is measured as the time between two waits. The median of the last nine, so that an idle
    engine's pause does not count. clock: seconds, monotonic.
    """

    def __init__(
        self, *, limit_s: float, fraction: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._fraction = fraction
        self._clock = clock
        self._ended_at: float | None = None
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)

    def begin_wait(self) -> float:
        """A wait begins: seconds that it may last."""
        if self._ended_at is not None:
            self._seconds.append(self._clock() - self._ended_at)
        if not self._seconds:
            return self._limit_s
        return min(self._limit_s, self._fraction * statistics.median(self._seconds))

    def end_wait(self) -> None:
        """The wait is over."""
        self._ended_at = self._clock()
