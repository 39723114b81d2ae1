"""How late the asyncio loop runs what is due: the first sign that it is blocked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL_S = 0.05


async def sample_loop_lag(
    observe: Callable[[float], object], interval_s: float = INTERVAL_S
) -> None:
    """Report seconds of lag every `interval_s` until cancelled.

    Usage: `asyncio.create_task(sample_loop_lag(metrics.process.loop_lag_seconds.observe))`.
    """
    while True:
        # Not the loop's own clock: uvloop reads it once a turn, in whole milliseconds.
        due = time.monotonic() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, time.monotonic() - due))
