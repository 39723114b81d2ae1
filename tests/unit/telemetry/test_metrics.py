from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.loop_lag import sample_loop_lag
from kvbraid.telemetry.metrics import CoordinatorMetrics, WorkerMetrics

UNITS = (
    "seconds", "bytes", "tokens", "pages", "requests", "sequences", "workers", "leases",
    "placements", "retries", "preemptions", "failures", "frames", "errors", "fallbacks",
    "expired", "mismatch", "info",
)  # fmt: skip
AREAS = ("rpc", "process", "coordinator", "engine", "kv", "handoff")
NAME = re.compile(rf"^kvbraid_({'|'.join(AREAS)})_([a-z]+_)*({'|'.join(UNITS)})(_total)?$")
LABELS = {
    "method", "code", "reason", "role", "version", "api", "outcome", "phase", "pool", "state",
    "path", "kind", "exchange", "rank", "direction", "mover", "layout",
}  # fmt: skip


def collectors(registry: CollectorRegistry) -> Iterator[Any]:
    yield from registry._collector_to_names


@pytest.fixture(params=["coordinator", "prefill", "decode"])
def registry(request: pytest.FixtureRequest) -> CollectorRegistry:
    if request.param == "coordinator":
        return CoordinatorMetrics().registry
    return WorkerMetrics(request.param).registry


def test_names_follow_the_convention(registry: CollectorRegistry) -> None:
    for metric in registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        assert NAME.match(name), name
        assert metric.type != "gauge" or not name.endswith("_total"), name
        assert not re.search(r"_(ms|us|mb|gb|percent)$", name), name


def test_labels_are_bounded_and_described(registry: CollectorRegistry) -> None:
    for collector in collectors(registry):
        assert set(collector._labelnames) <= LABELS, collector._name
        assert collector._documentation.endswith("."), collector._name


def test_time_buckets_reach_from_a_fast_step_to_a_long_queue() -> None:
    (family,) = [
        family
        for family in CoordinatorMetrics().registry.collect()
        if family.name == "kvbraid_coordinator_time_to_first_token_seconds"
    ]
    bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert bounds == sorted(bounds)
    assert bounds[0] <= 0.001
    assert bounds[-2] >= 600


def test_two_processes_worth_of_metrics_do_not_share_a_registry() -> None:
    first, second = WorkerMetrics("decode"), WorkerMetrics("decode")
    first.engine.preemptions_total.inc()
    name = "kvbraid_engine_preemptions_total"
    assert first.registry.get_sample_value(name) == 1
    assert second.registry.get_sample_value(name) == 0


def test_endpoint_serves_the_text_format_and_closes() -> None:
    metrics = WorkerMetrics("decode")
    metrics.handoff.bytes_total.labels(direction="in", mover="shared_memory").inc(4096)
    with MetricsEndpoint(metrics.registry, host="127.0.0.1", port=0) as endpoint:
        url = f"http://{endpoint.address}/metrics"
        with urllib.request.urlopen(url, timeout=5) as response:
            text = response.read().decode()
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    labels = (("direction", "in"), ("mover", "shared_memory"))
    assert samples["kvbraid_handoff_bytes_total", labels] == 4096
    assert not [name for name, _ in samples if name.endswith("_created")]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=1)


async def test_blocked_event_loop_shows_as_lag() -> None:
    lags: asyncio.Queue[float] = asyncio.Queue()
    sampler = asyncio.create_task(sample_loop_lag(lags.put_nowait, interval_s=0.01))
    await lags.get()
    time.sleep(0.2)  # noqa: ASYNC251 - blocking the loop is what is measured
    assert max(await lags.get(), await lags.get()) >= 0.15
    sampler.cancel()
