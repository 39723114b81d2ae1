"""What labels say. Each is bounded: by a list of values here, or by what is deployed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

from kvbraid import errors
from kvbraid.request import FinishReason

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

_CROSSING_ERRORS = (
    errors.InvalidRequestError,
    errors.NotFoundError,
    errors.OverloadedError,
    errors.IncompatibleError,
    errors.LeaseLostError,
    errors.UnavailableError,
    errors.DeadlineError,
    errors.DataLossError,
    errors.RequestCancelledError,
    errors.KVBraidError,
)
ERROR_REASONS = tuple(error.reason for error in _CROSSING_ERRORS)
ERROR_PAIRS = tuple((error.grpc_code, error.reason) for error in _CROSSING_ERRORS)
"""(code, reason) of every error that crosses the wire."""

RETRY_REASONS = ("UNAVAILABLE", "LEASE_LOST", "DATA_LOSS", "OVERLOADED")
OUTCOMES = (
    *(reason.value for reason in FinishReason),
    *(reason.lower() for reason in ERROR_REASONS),
)
APIS = ("grpc", "http")
DIRECTIONS = ("in", "out")
MOVERS = ("auto", "shared_memory", "grpc_push", "mixed")
POOLS = ("prefill", "decode")
WORKER_STATES = ("down", "loading", "up", "draining", "incompatible")
PATHS = ("handoff", "local")
STEP_KINDS = ("extend", "decode", "mixed")
PAGE_STATES = ("free", "active", "leased", "cached")
WASTE_REASONS = ("preempted", "aborted", "failed")
FALLBACK_REASONS = ("no_prefill_worker", "handoffs_failed")
TTFT_PHASES = (
    "intake", "retry", "queue", "decode_admit", "prefill_queue", "prefill_compute",
    "prefill_delivery", "prefill", "local_prefill",
)  # fmt: skip

LABELS = {
    "api": "the API that the client used",
    "code": "gRPC status code; at most 17",
    "direction": "in: rows arrive at this worker; out: they leave it",
    "exchange": "how partial results are merged over a stripe, as configured: ag_rs, a2a, fused",
    "kind": "what a step did: extend prompts, decode, or both",
    "layout": "source and destination as tpTdcpC-tpTdcpC; as many as pairs of worker shapes are "
    "deployed",
    "method": "gRPC method of one of our services",
    "mover": "how rows travel. out: what was used, shared_memory, grpc_push, or mixed where the "
    "ranks of the other worker are on several hosts; in: as configured, auto or one of them",
    "outcome": "finish reason, or error reason in lower case",
    "part": "part of a step",
    "path": "handoff: a prefill worker, then a decode worker; local: the decode worker alone",
    "phase": "part of the time to the first token",
    "pool": "which phase the worker is configured for",
    "position": "place of a draft behind the anchor, 1 to 16; later ones count as 16",
    "rank": "rank of the worker, 0 to tp_size - 1",
    "reason": "why; a list for each metric",
    "role": "coordinator, prefill, decode or draft",
    "setting": "the setting that names the file: tls_certificate, tls_client_certificate, "
    "tls_client_ca or tls_server_ca",
    "state": "a list for each metric",
    "version": "version of KVBraid",
}
"""Meaning and bound of every label."""


def with_values(metric: Metric, **values: Sequence[str]) -> Metric:
    """`metric`, with the series of every combination of these label values begun at 0.

    A series that first appears with its first event has no increase that a query could see, and an
    alert on rare events would miss the first one.
    """
    for combination in itertools.product(*values.values()):
        metric.labels(**dict(zip(values, combination, strict=True)))
    return metric
