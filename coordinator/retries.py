"""When a broken completion is tried again, and where."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from coordinator.completion import Completion
from coordinator.config import RoutingSettings
from coordinator.deadline import Deadline
from coordinator.legs import Legs
from coordinator.registry import Pool, Registry, Worker
from coordinator.router import Handoff, Placement
from kvbraid.errors import (
    DataLossError,
    KVBraidError,
    LeaseLostError,
    OverloadedError,
    UnavailableError,
)
from kvbraid.telemetry.metrics import PlacementMetrics

logger = logging.getLogger(__name__)

RETRYABLE = (UnavailableError, LeaseLostError, DataLossError, OverloadedError)
"""A new attempt can help: the worker, the lease or the rows are gone, not the request wrong."""

_FIRST_BACKOFF_S = 0.02
_MOST_DOUBLINGS = 5  # to 0.64 s


class Retries:
    """The attempts of one completion."""

    def __init__(
        self, registry: Registry, settings: RoutingSettings, metrics: PlacementMetrics
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._num_tried = 0
        self._num_failed = 0
        self._broken_since_s: float | None = None
        self.failed_workers: list[Worker] = []
        self.broken_handoffs: list[Handoff] = []

    def note_progress(self) -> None:
        """A token came: the next break has the full time to recover again."""
        self._broken_since_s = None

    def recovery_s(self) -> float:
        """Seconds that the completion may still wait for a worker; 0 unless it broke before."""
        if self._broken_since_s is None:
            return 0.0
        return self._broken_since_s + self._settings.recovery_seconds - time.monotonic()

    def note_failure(
        self,
        error: KVBraidError,
        completion: Completion,
        placement: Placement | None,
        legs: Legs | None,
    ) -> None:
        """Takes a RETRYABLE failure; raises it when no further attempt is to be made.

        Without a placement there was no worker to try, so waiting has not helped already. A refusal
        for want of room is no attempt while a completion that broke may still wait for room: when a
        worker goes down, all that ran there asks the others at once.
        """
        is_new = not completion.emitted
        is_refusal = isinstance(error, OverloadedError) and not is_new
        self._num_tried += 1
        if not is_refusal or self.recovery_s() <= 0:
            self._num_failed += 1
        if placement is None or self._num_failed >= self._settings.max_attempts:
            raise error
        blames_prefill = legs is not None and legs.blames_prefill
        worker = placement.prefill if blames_prefill and placement.prefill else placement.decode
        if isinstance(error, UnavailableError):
            self._registry.suspect(worker)
        if isinstance(error, UnavailableError | OverloadedError):
            self.failed_workers.append(worker)
        if isinstance(error, LeaseLostError) and placement.prefill is not None:
            # Rows did not get from one to the other. Both may be well: another pair is tried.
            self.broken_handoffs.append((placement.prefill, placement.decode))
            self.failed_workers.append(placement.decode)
        if isinstance(error, OverloadedError) and is_new and not self._has_other(worker.pool):
            raise error
        if self._broken_since_s is None:
            self._broken_since_s = time.monotonic()
        num_wasted = len(completion.request.prompt_ids) + len(completion.emitted)
        self._metrics.retries_total.labels(reason=error.reason).inc()
        self._metrics.wasted_tokens_total.labels(reason=error.reason).inc(num_wasted)
        logger.warning(
            "an attempt failed: %s",
            error,
            extra={"attempt": self._num_tried - 1, "num_emitted": len(completion.emitted)},
        )

    async def back_off(self, deadline: Deadline) -> None:
        """Waits a moment before the next attempt, longer each time; never past the deadline."""
        pause = _FIRST_BACKOFF_S * 2 ** min(self._num_tried - 1, _MOST_DOUBLINGS)
        await asyncio.sleep(min(pause * random.uniform(0.5, 1.5), deadline.remaining()))

    def _has_other(self, pool: Pool) -> bool:
        return any(worker not in self.failed_workers for worker in self._registry.up(pool))
