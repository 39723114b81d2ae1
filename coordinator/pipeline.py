"""The life of one completion, from placement to its last token."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator

from coordinator.clients import WorkerClients
from coordinator.completion import Completion, CompletionDelta
from coordinator.config import RoutingSettings
from coordinator.deadline import Deadline
from coordinator.legs import Legs
from coordinator.registry import Registry
from coordinator.retries import RETRYABLE, Retries
from coordinator.router import Placement, Router
from coordinator.timeline import Timeline
from kvbraid.errors import DeadlineError, OverloadedError, UnavailableError
from kvbraid.request import GenerateRequest
from kvbraid.telemetry.metrics import CoordinatorMetrics
from kvbraid.tokenizer import Tokenizer


class Pipeline:
    """Runs completions on the workers."""

    def __init__(
        self,
        *,
        registry: Registry,
        router: Router,
        clients: WorkerClients,
        tokenizer: Tokenizer,
        settings: RoutingSettings,
        metrics: CoordinatorMetrics,
        incarnation: int,
    ) -> None:
        """incarnation: of this process, for messages to workers."""
        self._registry = registry
        self._router = router
        self._clients = clients
        self._tokenizer = tokenizer
        self._settings = settings
        self._metrics = metrics
        self._incarnation = incarnation

    def num_places(self) -> int:
        """See Router."""
        return self._router.num_places()

    async def run(
        self, request: GenerateRequest, index: int, deadline: Deadline
    ) -> AsyncGenerator[CompletionDelta]:
        """Completion `index` of `request`; the last delta has finish reason and usage.

        A broken attempt is continued by the next one behind the tokens emitted so far, which are
        never sampled again. Leaving the iterator early ends the work on every worker. Raises the
        KVBraidError that ended the last attempt, DeadlineError when the time is up.
        """
        completion = Completion(request, index, self._tokenizer)
        timeline = Timeline(self._metrics.request, deadline.arrived_s)
        retries = Retries(self._registry, self._settings, self._metrics.placement)
        for attempt in itertools.count():
            placement: Placement | None = None
            legs: Legs | None = None
            try:
                placement = await self._place(completion, retries, deadline)
                timeline.mark("queue")
                work = completion.next_request(attempt, self._incarnation)
                legs = Legs(self._clients, placement, work, deadline, timeline.prefill_took)
                if placement.prefill is not None:
                    await legs.wait_granted()
                    timeline.mark("decode_admit")
                    first = await legs.first_token()
                    placement.prefill_is_done()
                    timeline.tokens(len(first.token_ids), "prefill")
                    yield completion.add(first, attempt, legs.num_cached_tokens)
                    if completion.is_finished:
                        return
                async for chunk in legs.decode_chunks():
                    retries.note_progress()
                    timeline.tokens(len(chunk.token_ids), "local_prefill")
                    yield completion.add(chunk, attempt, legs.num_cached_tokens)
                    if completion.is_finished:
                        return
                raise UnavailableError(f"{placement.decode.address}: ended before the last token")
            except RETRYABLE as error:
                retries.note_failure(error, completion, placement, legs)
            except DeadlineError as error:
                raise deadline.error() from error
            finally:
                if placement is not None:
                    placement.release()
                if legs is not None:
                    await legs.close()
                timeline.attempt_ended()
            await retries.back_off(deadline)
            timeline.mark("retry")

    async def _place(
        self, completion: Completion, retries: Retries, deadline: Deadline
    ) -> Placement:
        """A placement. A completion that broke waits a while for room or a worker, a new one only
        for workers that just went down."""
        while True:
            try:
                return self._router.place(
                    completion.request,
                    completion.emitted,
                    retries.failed_workers,
                    retries.broken_handoffs,
                )
            except (UnavailableError, OverloadedError) as error:
                patience_s = retries.recovery_s()
                if isinstance(error, UnavailableError):
                    patience_s = max(patience_s, self._registry.patience_s())
                patience_s = min(patience_s, deadline.remaining())
                if patience_s <= 0:
                    raise
                with self._metrics.request.queued_requests.track_inprogress():
                    await self._registry.wait_changed(patience_s)
