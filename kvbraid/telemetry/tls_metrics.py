"""Metrics of certificate files, every role."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge


class TlsMetrics:
    """No expiry where a process has no certificates: nothing there expires."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.expiry_s = Gauge(
            "kvbraid_tls_certificate_expiry_timestamp_seconds",
            "Unix time at which what is used of a certificate file expires. A certificate: with "
            "the first of its chain; authorities: with the last of them.",
            ["setting"], registry=registry,
        )  # fmt: skip
        self.refused_renewals = Gauge(
            "kvbraid_tls_refused_renewals",
            "1 while changed certificate files cannot be used, so that the old ones still are; "
            "else 0.",
            registry=registry,
        )
