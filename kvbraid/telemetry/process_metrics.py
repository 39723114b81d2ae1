"""Metrics that every process has: its RPCs and itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kvbraid import __version__
from kvbraid.telemetry.buckets import LAG_BUCKETS, REQUEST_BUCKETS
from kvbraid.telemetry.labels import ERROR_PAIRS, FALLBACK_REASONS, with_values
from kvbraid.telemetry.tls_metrics import TlsMetrics


class RpcMetrics:
    """gRPC server side and certificates, every role."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tls = TlsMetrics(registry)
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
        for code, reason in ERROR_PAIRS:
            self.errors_total.labels(code=code, reason=reason)
        self.in_flight_requests = Gauge(
            "kvbraid_rpc_in_flight_requests", "Calls being served.", registry=registry
        )


class ProcessMetrics:
    """The process itself, every role; with the standard process_* metrics of Prometheus clients."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        ProcessCollector(registry=registry)
        self.info = Gauge(
            "kvbraid_process_info", "Always 1.", ["role", "version"], registry=registry
        )
        self.info.labels(role=role, version=__version__).set(1)
        self.loop_lag_seconds = Histogram(
            "kvbraid_process_loop_lag_seconds", "How late the asyncio loop ran what was due.",
            buckets=LAG_BUCKETS, registry=registry,
        )  # fmt: skip
        self.fallbacks_total = with_values(
            Counter(
                "kvbraid_process_fallbacks_total",
                "Times that a slower way was taken; no_prefill_worker: the decode worker computed "
                "a prompt because no prefill worker was up; handoffs_failed: it did because the "
                "rows that prefill workers pushed did not get to it.",
                ["reason"], registry=registry,
            ),
            reason=FALLBACK_REASONS,
        )  # fmt: skip
