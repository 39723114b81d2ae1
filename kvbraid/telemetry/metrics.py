"""Every metric of the project, and nothing that computes one.

A process builds the groups of its role once, over its own registry:

    metrics = WorkerMetrics(role="decode")             # or CoordinatorMetrics()
    metrics.engine.running_sequences.set(3)
    metrics.handoff.bytes_total.labels(direction="in", mover="shared_memory").inc(4096)
    endpoint = MetricsEndpoint(metrics.registry, host="127.0.0.1", port=0)   # telemetry.endpoint

Names are kvbraid_<area>_<noun>_<unit>[_total], base units. Labels are bounded: never a request id
or an address. Phases of the time to first token sum to it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from kvbraid import __version__

# 1 ms to 10 minutes: an idle CPU worker and a queued 1M-token prompt both resolve.
REQUEST_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
    80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
EXCHANGE_BUCKETS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0)
LENGTH_BUCKETS = (
    1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288,
    1048576,
)  # fmt: skip
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

TTFT_PHASES = ("queue", "prefill", "handoff_wait", "transfer", "decode_admit", "first_step")

# One creation time a series would double what is scraped and nothing reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class RpcMetrics:
    """gRPC server side, every role."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests_total = Counter(
            "kvbraid_rpc_requests_total", "Finished calls.", ["method", "code"], registry=registry
        )
        self.duration_seconds = Histogram(
            "kvbraid_rpc_duration_seconds", "Time from a call's arrival to its end.",
            ["method"], buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.errors_total = Counter(
            "kvbraid_rpc_errors_total", "Failed calls by status code and reason.",
            ["code", "reason"], registry=registry,
        )  # fmt: skip
        self.in_flight_requests = Gauge(
            "kvbraid_rpc_in_flight_requests", "Calls being served.", registry=registry
        )


class ProcessMetrics:
    """The process itself, every role."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        self.info = Gauge(
            "kvbraid_process_info", "Always 1.", ["role", "version"], registry=registry
        )
        self.info.labels(role=role, version=__version__).set(1)
        self.loop_lag_seconds = Histogram(
            "kvbraid_process_loop_lag_seconds", "How late the asyncio loop ran what was due.",
            buckets=LAG_BUCKETS, registry=registry,
        )  # fmt: skip
        self.fallbacks_total = Counter(
            "kvbraid_process_fallbacks_total", "Times that a slower way was taken.",
            ["reason"], registry=registry,
        )  # fmt: skip


class RequestMetrics:
    """One client request as the coordinator sees it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests_total = Counter(
            "kvbraid_coordinator_requests_total",
            "Finished requests; outcome is a finish reason or an error reason.",
            ["api", "outcome"], registry=registry,
        )  # fmt: skip
        self.in_flight_requests = Gauge(
            "kvbraid_coordinator_in_flight_requests", "Requests being served.", registry=registry
        )
        self.queued_requests = Gauge(
            "kvbraid_coordinator_queued_requests",
            "Requests waiting for a place.",
            registry=registry,
        )
        self.duration_seconds = Histogram(
            "kvbraid_coordinator_request_duration_seconds", "Arrival to last token.",
            ["api"], buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.time_to_first_token_seconds = Histogram(
            "kvbraid_coordinator_time_to_first_token_seconds", "Arrival to first token.",
            buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.ttft_phase_seconds = Histogram(
            "kvbraid_coordinator_ttft_phase_seconds",
            f"Parts of the time to first token: {', '.join(TTFT_PHASES)}.",
            ["phase"], buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.inter_token_latency_seconds = Histogram(
            "kvbraid_coordinator_inter_token_latency_seconds", "Time between consecutive tokens.",
            buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
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
        self.workers = Gauge(
            "kvbraid_coordinator_workers", "Configured workers by pool and state.",
            ["pool", "state"], registry=registry,
        )  # fmt: skip
        self.placements_total = Counter(
            "kvbraid_coordinator_placements_total",
            "Attempts by path: handoff (prefill worker, then decode worker) or local.",
            ["path"], registry=registry,
        )  # fmt: skip
        self.retries_total = Counter(
            "kvbraid_coordinator_retries_total", "Attempts after the first.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.wasted_tokens_total = Counter(
            "kvbraid_coordinator_wasted_tokens_total", "Tokens computed and thrown away.",
            ["reason"], registry=registry,
        )  # fmt: skip


class EngineMetrics:
    """The batch of a worker and its steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running_sequences = Gauge(
            "kvbraid_engine_running_sequences", "Sequences in the batch.", registry=registry
        )
        self.waiting_sequences = Gauge(
            "kvbraid_engine_waiting_sequences", "Sequences waiting for room.", registry=registry
        )
        self.waiting_prompt_tokens = Gauge(
            "kvbraid_engine_waiting_prompt_tokens",
            "Prompt tokens not computed yet.",
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "kvbraid_engine_queue_seconds", "Time from arrival to the first step.",
            buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.step_seconds = Histogram(
            "kvbraid_engine_step_seconds", "Time of a step by kind: extend, decode or mixed.",
            ["kind"], buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        self.step_sequences = Histogram(
            "kvbraid_engine_step_sequences", "Sequences of a step.",
            buckets=BATCH_BUCKETS, registry=registry,
        )  # fmt: skip
        self.step_tokens = Histogram(
            "kvbraid_engine_step_tokens", "Tokens of a step.",
            buckets=LENGTH_BUCKETS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens_total = Counter(
            "kvbraid_engine_prompt_tokens_total", "Prompt tokens computed.", registry=registry
        )
        self.generated_tokens_total = Counter(
            "kvbraid_engine_generated_tokens_total", "Tokens sampled.", registry=registry
        )
        self.preemptions_total = Counter(
            "kvbraid_engine_preemptions_total", "Sequences sent back to wait.", registry=registry
        )
        self.wasted_tokens_total = Counter(
            "kvbraid_engine_wasted_tokens_total", "Tokens computed and thrown away.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.cancel_to_free_seconds = Histogram(
            "kvbraid_engine_cancel_to_free_seconds", "Time from a cancel to its pages being free.",
            buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        self.step_age_seconds = Gauge(
            "kvbraid_engine_step_age_seconds", "Age of the last step while work is queued, else 0.",
            registry=registry,
        )  # fmt: skip
        self.dcp_exchange_seconds = Histogram(
            "kvbraid_engine_dcp_exchange_seconds", "Sampled time of merging partial results.",
            ["exchange"], buckets=EXCHANGE_BUCKETS, registry=registry,
        )  # fmt: skip


class KvMetrics:
    """The KV pool of a worker and its prefix cache."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pages = Gauge(
            "kvbraid_kv_pages", "Pages by state: free, active, cached or leased.",
            ["state"], registry=registry,
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
    """KV rows moved between workers. direction is in or out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes_total = Counter(
            "kvbraid_handoff_bytes_total", "Payload bytes moved.",
            ["direction", "mover"], registry=registry,
        )  # fmt: skip
        self.duration_seconds = Histogram(
            "kvbraid_handoff_duration_seconds",
            "First frame to last acknowledgement; layout is tp1dcp1-tp2dcp2 (source-destination).",
            ["direction", "mover", "layout"], buckets=REQUEST_BUCKETS, registry=registry,
        )  # fmt: skip
        self.failures_total = Counter(
            "kvbraid_handoff_failures_total",
            "Handoffs that did not finish; LEASE_LOST: ran out, DATA_LOSS: rows were refused.",
            ["direction", "reason"], registry=registry,
        )  # fmt: skip
        self.open_leases = Gauge(
            "kvbraid_handoff_open_leases", "Handoffs under way.",
            ["direction"], registry=registry,
        )  # fmt: skip


class CoordinatorMetrics:
    """What a coordinator exports."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.process = ProcessMetrics(self.registry, "coordinator")
        self.request = RequestMetrics(self.registry)
        self.placement = PlacementMetrics(self.registry)


class WorkerMetrics:
    """What a prefill, decode or draft worker exports."""

    def __init__(self, role: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.process = ProcessMetrics(self.registry, role)
        self.engine = EngineMetrics(self.registry)
        self.kv = KvMetrics(self.registry)
        self.handoff = HandoffMetrics(self.registry)
