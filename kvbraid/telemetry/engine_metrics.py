"""Metrics of a worker's engine: the batch and its steps, as rank 0 schedules them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvbraid.telemetry.buckets import (
    BATCH_BUCKETS,
    LENGTH_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
)
from kvbraid.telemetry.labels import STEP_KINDS, WASTE_REASONS, with_values


class EngineMetrics:
    """The batch of a worker and its steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._add_queue(registry)
        self._add_steps(registry)
        self._add_tokens(registry)

    def _add_queue(self, registry: CollectorRegistry) -> None:
        self.running_sequences = Gauge(
            "kvbraid_engine_running_sequences", "Sequences in the batch.", registry=registry
        )
        self.waiting_sequences = Gauge(
            "kvbraid_engine_waiting_sequences", "Sequences waiting for room.", registry=registry
        )
        self.max_running_sequences = Gauge(
            "kvbraid_engine_max_running_sequences", "Most sequences in the batch (max_num_seqs).",
            registry=registry,
        )  # fmt: skip
        self.max_waiting_sequences = Gauge(
            "kvbraid_engine_max_waiting_sequences",
            "Most sequences that wait; more are refused (max_num_waiting).", registry=registry,
        )  # fmt: skip
        self.waiting_prompt_tokens = Gauge(
            "kvbraid_engine_waiting_prompt_tokens",
            "Prompt tokens that the worker has yet to compute itself.",
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "kvbraid_engine_queue_seconds", "Time from arrival to a place in the batch.",
            buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip

    def _add_steps(self, registry: CollectorRegistry) -> None:
        self.step_seconds = with_values(
            Histogram(
                "kvbraid_engine_step_seconds", "Time of a step.",
                ["kind"], buckets=TOKEN_BUCKETS, registry=registry,
            ),
            kind=STEP_KINDS,
        )  # fmt: skip
        self.step_sequences = Histogram(
            "kvbraid_engine_step_sequences", "Sequences of a step.",
            buckets=BATCH_BUCKETS, registry=registry,
        )  # fmt: skip
        self.step_tokens = Histogram(
            "kvbraid_engine_step_tokens", "Tokens of a step.",
            buckets=LENGTH_BUCKETS, registry=registry,
        )  # fmt: skip
        self.step_age_seconds = Gauge(
            "kvbraid_engine_step_age_seconds",
            "How long the engine has been in its step; 0 while it sleeps for want of work.",
            registry=registry,
        )  # fmt: skip
        self.cancel_to_free_seconds = Histogram(
            "kvbraid_engine_cancel_to_free_seconds", "Time from a cancel to its pages being free.",
            buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip

    def _add_tokens(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens_total = Counter(
            "kvbraid_engine_prompt_tokens_total", "Prompt tokens computed.", registry=registry
        )
        self.generated_tokens_total = Counter(
            "kvbraid_engine_generated_tokens_total", "Tokens sampled.", registry=registry
        )
        self.preemptions_total = Counter(
            "kvbraid_engine_preemptions_total",
            "Sequences that lost their pages and went back to wait.", registry=registry,
        )  # fmt: skip
        self.wasted_tokens_total = with_values(
            Counter(
                "kvbraid_engine_wasted_tokens_total",
                "Tokens whose KV was computed or received and given up: the sequence was preempted "
                "for room, aborted by its client, or failed.",
                ["reason"], registry=registry,
            ),
            reason=WASTE_REASONS,
        )  # fmt: skip
