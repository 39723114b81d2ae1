"""What both APIs share: a request is admitted, run, counted and logged here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from coordinator.completion import CompletionDelta
from coordinator.deadline import Deadline
from coordinator.intake import Intake, RequestDraft
from coordinator.merging import merge
from coordinator.pipeline import Pipeline
from kvbraid.errors import InvalidRequestError, KVBraidError
from kvbraid.request import GenerateRequest
from kvbraid.telemetry.context import bind_request_id
from kvbraid.telemetry.metrics import RequestMetrics

logger = logging.getLogger(__name__)

_CANCELLED = "cancelled"
_INTERNAL = "internal"


class Front:
    """Requests in, streams of deltas out. api: "grpc" or "http", for metrics."""

    def __init__(self, intake: Intake, pipeline: Pipeline, metrics: RequestMetrics) -> None:
        self.intake = intake
        self._pipeline = pipeline
        self._metrics = metrics

    async def admit(self, drafts: Sequence[RequestDraft], api: str) -> list[GenerateRequest]:
        """`Intake.admit` of what a client asks for at once, with refusals counted.

        Raises InvalidRequestError also for more completions than could run or wait if there were
        no other client: "come back later" would be wrong for ever.
        """
        try:
            requests = [await self.intake.admit(draft) for draft in drafts]
            self._check_places(requests)
        except KVBraidError as error:
            self._metrics.requests_total.labels(api=api, outcome=error.reason.lower()).inc()
            raise
        for request in requests:
            self._metrics.prompt_length_tokens.observe(len(request.prompt_ids))
            self._metrics.prompt_tokens_total.inc(len(request.prompt_ids))
        return requests

    def _check_places(self, requests: Sequence[GenerateRequest]) -> None:
        num_completions = sum(request.sampling.n for request in requests)
        num_places = self._pipeline.num_places()
        if num_completions > num_places:
            raise InvalidRequestError(
                f"n is {requests[0].sampling.n}, times {len(requests)} prompts: {num_completions} "
                f"completions; accepted: up to {num_places}, what decode workers run and let wait",
                field="n",
            )

    async def run(
        self, request: GenerateRequest, deadline: Deadline, api: str
    ) -> AsyncGenerator[CompletionDelta]:
        """Deltas of all n completions of an admitted request. Leaving it early ends the work."""
        bind_request_id(request.request_id)
        tally = _Tally(request)
        self._metrics.in_flight_requests.inc()
        try:
            with self.intake.running(request.request_id):
                indices = range(request.sampling.n)
                streams = [self._pipeline.run(request, index, deadline) for index in indices]
                async with aclosing(merge(streams)) as deltas:
                    async for delta in deltas:
                        tally.add(delta)
                        yield delta
        except KVBraidError as error:
            tally.outcome = error.reason.lower()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            tally.leave()
            raise
        finally:
            self._metrics.in_flight_requests.dec()
            self._finish(tally, deadline, api)

    def _finish(self, tally: _Tally, deadline: Deadline, api: str) -> None:
        seconds = time.monotonic() - deadline.arrived_s
        self._metrics.requests_total.labels(api=api, outcome=tally.outcome).inc()
        self._metrics.duration_seconds.labels(api=api).observe(seconds)
        self._metrics.cached_tokens_total.inc(tally.num_cached_tokens)
        logger.info(
            "request ended",
            extra={
                "api": api,
                "outcome": tally.outcome,
                "num_prompt_tokens": len(tally.request.prompt_ids),
                "num_completion_tokens": tally.num_completion_tokens,
                "num_cached_tokens": tally.num_cached_tokens,
                "seconds": round(seconds, 6),
            },
        )


class _Tally:
    """Counts of one request. What ends it before every completion has finished, and is neither an
    error of ours nor the client's leaving, is a bug: it counts as internal."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.outcome = _INTERNAL
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self._num_running = request.sampling.n

    def leave(self) -> None:
        """The client goes away, maybe only because it has everything."""
        if self._num_running > 0:
            self.outcome = _CANCELLED

    def add(self, delta: CompletionDelta) -> None:
        self.num_completion_tokens += len(delta.chunk.token_ids)
        if delta.usage is None or delta.chunk.finish_reason is None:
            return
        self.num_cached_tokens = max(self.num_cached_tokens, delta.usage.num_cached_tokens)
        self._num_running -= 1
        if self._num_running == 0:
            self.outcome = delta.chunk.finish_reason.value
