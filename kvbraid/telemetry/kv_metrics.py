"""Metrics of a worker's KV cache: the pool, its prefix cache, and rows moved between workers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvbraid.telemetry.buckets import REQUEST_BUCKETS
from kvbraid.telemetry.labels import DIRECTIONS, ERROR_REASONS, MOVERS, PAGE_STATES, with_values


class KvMetrics:
    """The KV pool of a worker and its prefix cache. Pages are logical: the same on every rank."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pages = with_values(
            Gauge(
                "kvbraid_kv_pages",
                "Pages by state. active: of a running sequence; leased: of one whose handoff is "
                "open; cached: kept for later prompts, given up when room is needed.",
                ["state"], registry=registry,
            ),
            state=PAGE_STATES,
        )  # fmt: skip
        self.pool_tokens = Gauge(
            "kvbraid_kv_pool_tokens", "Tokens that the pool holds over a stripe.", registry=registry
        )
        self.pool_bytes = Gauge(
            "kvbraid_kv_pool_bytes", "Bytes of a rank's pool.", ["rank"], registry=registry
        )
        self.prefix_query_tokens_total = Counter(
            "kvbraid_kv_prefix_query_tokens_total", "Prompt tokens looked up.", registry=registry
        )
        self.prefix_hit_tokens_total = Counter(
            "kvbraid_kv_prefix_hit_tokens_total", "Prompt tokens found.", registry=registry
        )
        self.evicted_pages_total = Counter(
            "kvbraid_kv_evicted_pages_total", "Cached pages given up for room.", registry=registry
        )


class HandoffMetrics:
    """KV rows moved between workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes_total = with_values(
            Counter(
                "kvbraid_handoff_bytes_total", "Payload bytes moved.",
                ["direction", "mover"], registry=registry,
            ),
            direction=DIRECTIONS, mover=MOVERS,
        )  # fmt: skip
        self.duration_seconds = Histogram(
            "kvbraid_handoff_duration_seconds",
            "out: from the prompt's last computed chunk to the last acknowledged row, which is "
            "what the handoff adds. in: from the grant to the last row, prefill included.",
            ["direction", "mover", "layout"], buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.failures_total = with_values(
            Counter(
                "kvbraid_handoff_failures_total",
                "Handoffs that did not finish. LEASE_LOST: nothing came for the time of the lease; "
                "out also: the decode worker gave the request up, as when its client left. "
                "DATA_LOSS: rows were damaged, late or repeated and refused.",
                ["direction", "reason"], registry=registry,
            ),
            direction=DIRECTIONS, reason=ERROR_REASONS,
        )  # fmt: skip
        self.open_leases = with_values(
            Gauge(
                "kvbraid_handoff_open_leases", "Handoffs under way.",
                ["direction"], registry=registry,
            ),
            direction=DIRECTIONS,
        )  # fmt: skip
