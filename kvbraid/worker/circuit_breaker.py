"""When to leave a peer alone that keeps failing, and when to try it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MAX_BACKOFF = 64


class CircuitBreaker:
    """Closed: calls are made. Open, after `max_failures` in a row: none are; a probe may be sent
    every `probe_s`. A probe that succeeds lets one call through: its success closes the breaker,
    its failure opens it for twice as long, up to 64 times `probe_s`. Thread-safe.

    clock: seconds, monotonic.
    """

    def __init__(
        self, *, max_failures: int, probe_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures = max_failures
        self._probe_s = probe_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._backoff = 1
        self._opened_at: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether calls are to be made."""
        return self._opened_at is None

    @property
    def seconds_to_probe(self) -> float | None:
        """Time until a probe is due, 0 when it is; None while no probe is needed."""
        with self._lock:
            if self._opened_at is None:
                return None
            due = self._opened_at + self._probe_s * self._backoff
            return max(0.0, due - self._clock())

    def record_success(self) -> None:
        """A call was answered."""
        with self._lock:
            self._num_failures = 0
            self._backoff = 1
            self._opened_at = None

    def record_failure(self) -> bool:
        """A call failed; returns whether this opened the breaker."""
        with self._lock:
            self._num_failures += 1
            if self._opened_at is not None or self._num_failures < self._max_failures:
                return False
            self._opened_at = self._clock()
            return True

    def record_probe(self, succeeded: bool) -> None:
        """The probe's outcome; without an open breaker it does not matter."""
        with self._lock:
            if self._opened_at is None:
                return
            # Also after a success: a peer that answers probes may still be too slow for calls.
            self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
            if succeeded:
                self._opened_at = None
                self._num_failures = self._max_failures - 1
            else:
                self._opened_at = self._clock()
