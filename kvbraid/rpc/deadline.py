"""The time a call has left, handed down from the client to every queue and peer."""

from __future__ import annotations

from typing import Protocol

from kvbraid.errors import DeadlineError


class HasDeadline(Protocol):
    """A servicer context, as far as time is concerned."""

    def time_remaining(self) -> float | None:
        """Seconds left; None without a deadline."""
        ...


def remaining_seconds(context: HasDeadline, limit_s: float) -> float:
    """Seconds that the call may still take: what the client gave, at most `limit_s`.

    Raises DeadlineError when nothing is left.
    """
    remaining = context.time_remaining()
    if remaining is None:
        return limit_s
    if remaining <= 0:
        raise DeadlineError(f"the deadline passed {-remaining:.3f} s ago")
    return min(remaining, limit_s)
