"""A cluster and a Prometheus that watches it, impatient: conditions of minutes last seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from tests.integration.observability.load import Load
from tools.fetch_prometheus import installed
from tools.prometheus_server import Prometheus

TINY_MLA = Path(__file__).parents[2] / "assets" / "tiny-mla"
DRAFTER = TINY_MLA.with_name("tiny-mla-eagle3")
SMALL = "page_size=4,threads_per_rank=1"
# On a machine that runs other tests too a step may wait for drafts.
PATIENT = "draft_timeout_ms=2000,draft_timeout_fraction=100"
START_S = 110.0
ALERT_S = 90.0
_HOLD_S = 5

NEEDS_PROMETHEUS = pytest.mark.skipif(
    installed("prometheus") is None,
    reason="NOT CHECKED: prometheus is missing (python -m tools.fetch_prometheus)",
)


@contextmanager
def prometheus_of(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    """Scrapes every second."""
    with Prometheus(folder, targets, scrape_s=1, hold_s=_HOLD_S) as prometheus:
        yield prometheus


def await_firing(prometheus: Prometheus, wanted: set[str], seconds: float = ALERT_S) -> None:
    """Returns once each of the alerts has fired. Raises AssertionError naming those that did."""
    seen: set[str] = set()
    give_up = time.monotonic() + seconds
    while not wanted <= seen:
        assert time.monotonic() < give_up, f"{wanted - seen} did not fire, but {seen} did"
        time.sleep(0.5)
        seen |= prometheus.firing()


def await_data(prometheus: Prometheus, expression: str, seconds: float = ALERT_S) -> None:
    """Returns once the expression has samples."""
    give_up = time.monotonic() + seconds
    while not prometheus.query(expression):
        assert time.monotonic() < give_up, f"no data: {expression}"
        time.sleep(0.2)


@dataclass(frozen=True)
class Watched:
    """A running cluster and the Prometheus that watches it."""

    cluster: LocalCluster
    prometheus: Prometheus

    def load(self) -> Load:
        """Clients, while the block lasts."""
        return Load(self.cluster.coordinator.http, self.cluster.coordinator.grpc, "tiny")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process of the cluster."""
        os.kill(self.cluster.children[name].pid, number)


@contextmanager
def watched_cluster(folder: Path, spec: ClusterSpec) -> Iterator[Watched]:
    """Start both; frozen processes are woken at the end, so that they can be stopped."""
    with LocalCluster(spec, folder / "logs") as cluster:
        cluster.start(timeout_s=START_S)
        reports = {"coordinator": cluster.coordinator, **cluster.workers}
        targets = {name: report.metrics for name, report in reports.items()}
        with prometheus_of(folder, targets) as prometheus:
            try:
                yield Watched(cluster, prometheus)
            finally:
                for child in cluster.children.values():
                    if child.is_running:
                        os.killpg(child.pid, signal.SIGCONT)
