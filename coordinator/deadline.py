"""The time a request has from arrival to its last token."""

from __future__ import annotations

import time

from kvbraid.errors import DeadlineError


class Deadline:
    """Counts from when it is made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.arrived_s = time.monotonic()

    @property
    def end_s(self) -> float:
        """When it passes, on the monotonic clock."""
        return self.arrived_s + self.seconds

    def remaining(self) -> float:
        """Seconds left, above 0. Raises DeadlineError when there are none."""
        left = self.end_s - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def error(self) -> DeadlineError:
        """What its passing is reported as."""
        return DeadlineError(f"the request took longer than its {self.seconds:.3g} s")
