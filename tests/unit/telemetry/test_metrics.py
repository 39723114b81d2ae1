from __future__ import annotations

import asyncio
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.registry import Pool, WorkerState
from coordinator.retries import RETRYABLE
from kvbraid import errors
from kvbraid.errors import StartupError
from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.labels import (
    ERROR_REASONS,
    LABELS,
    MOVERS,
    POOLS,
    RETRY_REASONS,
    WORKER_STATES,
    with_values,
)
from kvbraid.telemetry.loop_lag import sample_loop_lag
from kvbraid.telemetry.metrics import CoordinatorMetrics, DraftServiceMetrics, WorkerMetrics
from kvbraid.transport.mover import MoverChoice
from tools.fetch_prometheus import installed
from tools.metric_catalogue import DeclaredMetric, declared_metrics, registries

UNITS = (
    "seconds", "bytes", "tokens", "pages", "requests", "sequences", "workers", "leases", "rows",
    "placements", "retries", "resyncs", "preemptions", "failures", "errors", "fallbacks", "info",
    "up", "renewals",
)  # fmt: skip
AREAS = (
    "rpc", "tls", "process", "coordinator", "engine", "kv", "handoff", "rank", "speculation",
    "draft",
)  # fmt: skip
NAME = re.compile(rf"^kvbraid_({'|'.join(AREAS)})_([a-z]+_)*({'|'.join(UNITS)})(_total)?$")
# Bounded by what is deployed, so that no list is known.
OPEN_LABELS = {"method", "code", "role", "version", "rank", "exchange", "layout", "setting"}

METRICS = declared_metrics()
LISTED_LABELS = {label for m in METRICS for label, values in m.values.items() if values}


@pytest.fixture(params=["coordinator", "prefill", "decode", "draft"])
def registry(request: pytest.FixtureRequest) -> CollectorRegistry:
    return registries()[request.param]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_follows_the_conventions(metric: DeclaredMetric) -> None:
    if metric.name.startswith("process_"):
        return  # the standard names of client libraries
    assert NAME.match(metric.name), metric.name
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|us|mb|gb|percent)$", metric.name)
    assert metric.documentation.endswith(".")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_labels_are_bounded(metric: DeclaredMetric) -> None:
    assert set(metric.labels) <= set(LABELS)
    assert set(metric.labels) <= LISTED_LABELS | OPEN_LABELS, "which values has it?"


def test_every_label_is_used() -> None:
    assert {label for metric in METRICS for label in metric.labels} == set(LABELS)


def test_names_pass_promtools_lint(registry: CollectorRegistry) -> None:
    binary = installed("promtool")
    if binary is None:
        pytest.skip("NOT CHECKED: promtool is missing (python -m tools.fetch_prometheus)")
    done = subprocess.run(
        [binary, "check", "metrics"], input=generate_latest(registry), capture_output=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_lists_of_label_values_are_those_of_the_code() -> None:
    assert tuple(pool.value for pool in Pool) == POOLS
    assert {state.value for state in WorkerState} == set(WORKER_STATES)
    assert {error.reason for error in RETRYABLE} == set(RETRY_REASONS)
    assert {*get_args(MoverChoice), "mixed"} == set(MOVERS)
    crossing = set(subclasses(errors.KVBraidError)) - set(subclasses(errors.StartupError))
    crossing.discard(errors.StartupError)
    reasons = {error.reason for error in crossing} | {errors.KVBraidError.reason}
    assert reasons == set(ERROR_REASONS)


def subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        if child.__module__ == "kvbraid.errors":
            yield child
            yield from subclasses(child)


def test_series_with_known_labels_begin_at_zero() -> None:
    registry = CollectorRegistry()
    with_values(Counter("a", "A.", ["x", "y"], registry=registry), x=("1", "2"), y=("3",))
    with_values(Gauge("b", "B.", ["x"], registry=registry), x=("1",))
    assert registry.get_sample_value("a_total", {"x": "2", "y": "3"}) == 0
    assert registry.get_sample_value("b", {"x": "1"}) == 0
    failures = {"direction": "in", "reason": "DATA_LOSS"}
    metrics = WorkerMetrics("decode").registry
    assert metrics.get_sample_value("kvbraid_handoff_failures_total", failures) == 0


def test_time_buckets_reach_from_a_fast_step_to_a_long_queue() -> None:
    name = "kvbraid_coordinator_time_to_first_token_seconds"
    (bounds,) = [metric.bounds for metric in METRICS if metric.name == name]
    assert list(bounds) == sorted(bounds)
    assert bounds[0] <= 0.001
    assert bounds[-2] >= 600


def test_two_processes_worth_of_metrics_do_not_share_a_registry() -> None:
    first, second = WorkerMetrics("decode"), WorkerMetrics("decode")
    first.engine.preemptions_total.inc()
    name = "kvbraid_engine_preemptions_total"
    assert first.registry.get_sample_value(name) == 1
    assert second.registry.get_sample_value(name) == 0


@pytest.mark.parametrize(
    ("made", "role"),
    [
        (CoordinatorMetrics, "coordinator"),
        (lambda: WorkerMetrics("prefill"), "prefill"),
        (DraftServiceMetrics, "draft"),
    ],
)
def test_a_process_says_its_role_once(made, role: str) -> None:
    text = generate_latest(made().registry).decode()
    assert re.findall(r'kvbraid_process_info\{role="(\w+)"', text) == [role]
    assert "process_start_time_seconds " in text


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


def test_a_taken_port_stops_the_start_and_is_named() -> None:
    first = MetricsEndpoint(CollectorRegistry(), host="127.0.0.1", port=0)
    with first, pytest.raises(StartupError, match=f"cannot serve metrics on {first.address}"):
        MetricsEndpoint(CollectorRegistry(), host="127.0.0.1", port=first.port)


async def test_blocked_event_loop_shows_as_lag() -> None:
    lags: asyncio.Queue[float] = asyncio.Queue()
    sampler = asyncio.create_task(sample_loop_lag(lags.put_nowait, interval_s=0.01))
    await lags.get()
    time.sleep(0.2)  # noqa: ASYNC251 - blocking the loop is what is measured
    assert max(await lags.get(), await lags.get()) >= 0.15
    sampler.cancel()
