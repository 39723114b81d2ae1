"""The time a request has from arrival to its last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Inside, what waits for the client waits no longer than this. Raises DeadlineError then.

        A client that does not read would otherwise keep its request, and what is promised to it on
        the workers, for as long as it likes.
        """
        timeout = asyncio.timeout(self.end_s - time.monotonic())
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise self.error() from error

    def error(self) -> DeadlineError:
        """What its passing is reported as."""
        return DeadlineError(f"the request took longer than its {self.seconds:.3g} s")
