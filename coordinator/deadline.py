"""The time a request has from arrival to its last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

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

    @contextmanager
    def limited(self) -> Iterator[ClientWait]:
        """Inside, the running task waits for its client in the block that this gives, and there no
        longer than until the deadline.

            with deadline.limited() as wait:
                async for delta in deltas:
                    with wait:
                        await context.write(delta)

        A client that does not read would otherwise keep its request, and what is promised to it on
        the workers, for as long as it likes.
        """
        wait = ClientWait(self)
        seconds = max(0.0, self.end_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(seconds, wait.expire)
        try:
            yield wait
        finally:
            timer.cancel()

    def error(self) -> DeadlineError:
        """What its passing is reported as."""
        return DeadlineError(f"the request took longer than its {self.seconds:.3g} s")


class ClientWait:
    """Blocks of one task, entered one after the other, that end at a deadline: asyncio.timeout for
    many of them with one timer. One for every message would cost the loop with every token.
    """

    def __init__(self, deadline: Deadline) -> None:
        """To be made by the task that waits."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancelling = task.cancelling()
        self._deadline = deadline
        self._is_waiting = False
        self._is_over = False

    def expire(self) -> None:
        """The deadline has passed: a block that runs ends now, a later one when it begins."""
        self._is_over = True
        if self._is_waiting:
            self._task.cancel()

    def __enter__(self) -> None:
        """Raises DeadlineError when the deadline has passed."""
        if self._is_over:
            raise self._deadline.error()
        self._is_waiting = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises DeadlineError when the deadline ended the block, and nothing else did too."""
        self._is_waiting = False
        if not self._is_over:
            return
        is_only_ours = self._task.uncancel() <= self._num_cancelling
        if is_only_ours and isinstance(error, asyncio.CancelledError):
            raise self._deadline.error() from error
