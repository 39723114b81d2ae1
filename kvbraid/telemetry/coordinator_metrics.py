"""Metrics of the coordinator: requests as clients see them, and where they were placed."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvbraid.telemetry.buckets import LENGTH_BUCKETS, REQUEST_BUCKETS, TOKEN_BUCKETS
from kvbraid.telemetry.labels import (
    APIS,
    OUTCOMES,
    PATHS,
    POOLS,
    RETRY_REASONS,
    TTFT_PHASES,
    WORKER_STATES,
    with_values,
)

_PHASES = (
    "Parts of the time to the first token; they sum to it. intake: validation and tokenising; "
    "retry: failed attempts; queue: waiting for workers; decode_admit: waiting for room on the "
    "decode worker; prefill_queue, prefill_compute: as the prefill worker measured them; "
    "prefill_delivery: the rest until its first token was here; prefill: these three together "
    "where the worker did not tell them apart (the first token was the last, or it broke); "
    "local_prefill: queue and compute on a decode worker that ran the prompt itself."
)


class RequestMetrics:
    """One client request as the coordinator sees it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests_total = with_values(
            Counter(
                "kvbraid_coordinator_requests_total",
                "Finished requests; outcome is a finish reason or an error reason.",
                ["api", "outcome"], registry=registry,
            ),
            api=APIS, outcome=OUTCOMES,
        )  # fmt: skip
        self.in_flight_requests = Gauge(
            "kvbraid_coordinator_in_flight_requests", "Requests being served.", registry=registry
        )
        self.queued_requests = Gauge(
            "kvbraid_coordinator_queued_requests",
            "Completions waiting for a worker to come up or to have room.",
            registry=registry,
        )
        self.duration_seconds = with_values(
            Histogram(
                "kvbraid_coordinator_request_duration_seconds", "Arrival to last token.",
                ["api"], buckets=REQUEST_BUCKETS, registry=registry,
            ),
            api=APIS,
        )  # fmt: skip
        self._add_latencies(registry)
        self._add_tokens(registry)

    def _add_latencies(self, registry: CollectorRegistry) -> None:
        self.time_to_first_token_seconds = Histogram(
            "kvbraid_coordinator_time_to_first_token_seconds", "Arrival to first token.",
            buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.ttft_phase_seconds = with_values(
            Histogram(
                "kvbraid_coordinator_ttft_phase_seconds", _PHASES,
                ["phase"], buckets=REQUEST_BUCKETS, registry=registry,
            ),
            phase=TTFT_PHASES,
        )  # fmt: skip
        self.handoff_wait_seconds = Histogram(
            "kvbraid_coordinator_handoff_wait_seconds",
            "First token (from the prefill worker) to second token (from the decode worker): what "
            "a client waits for the handoff.",
            buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.inter_token_latency_seconds = Histogram(
            "kvbraid_coordinator_inter_token_latency_seconds",
            "Time between consecutive tokens, the wait for the handoff included.",
            buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip

    def _add_tokens(self, registry: CollectorRegistry) -> None:
        self.prompt_length_tokens = Histogram(
            "kvbraid_coordinator_prompt_length_tokens", "Prompt length of a request.",
            buckets=LENGTH_BUCKETS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens_total = Counter(
            "kvbraid_coordinator_prompt_tokens_total", "Prompt tokens taken in.", registry=registry
        )
        self.completion_tokens_total = Counter(
            "kvbraid_coordinator_completion_tokens_total", "Tokens streamed out.", registry=registry
        )
        self.cached_tokens_total = Counter(
            "kvbraid_coordinator_cached_tokens_total", "Prompt tokens served from a cache.",
            registry=registry,
        )  # fmt: skip


class PlacementMetrics:
    """Where the coordinator puts requests, and how its workers are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.workers = with_values(
            Gauge(
                "kvbraid_coordinator_workers", "Configured workers by pool and state.",
                ["pool", "state"], registry=registry,
            ),
            pool=POOLS, state=WORKER_STATES,
        )  # fmt: skip
        self.placements_total = with_values(
            Counter("kvbraid_coordinator_placements_total", "Attempts.", ["path"],
                registry=registry),
            path=PATHS,
        )  # fmt: skip
        self.retries_total = with_values(
            Counter(
                "kvbraid_coordinator_retries_total", "Attempts after the first.",
                ["reason"], registry=registry,
            ),
            reason=RETRY_REASONS,
        )  # fmt: skip
        self.wasted_tokens_total = with_values(
            Counter(
                "kvbraid_coordinator_wasted_tokens_total",
                "Prompt and emitted tokens of failed attempts: at most so many are computed again.",
                ["reason"], registry=registry,
            ),
            reason=RETRY_REASONS,
        )  # fmt: skip
