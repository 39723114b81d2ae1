"""A cluster and a Prometheus that watches it, impatient: conditions of minutes last seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.settings import TlsSettings
from kvbraid.settings.fields import settings_of
from kvbraid.testing.certificates import CertificateAuthority
from tests.integration.observability.load import Load
from tools.fetch_prometheus import installed
from tools.prometheus_server import Prometheus

TINY_MLA = Path(__file__).parents[2] / "assets" / "tiny-mla"
DRAFTER = TINY_MLA.with_name("tiny-mla-eagle3")
SMALL = "page_size=4,threads_per_rank=1"
# On a machine that runs other tests too a step may wait for drafts.
PATIENT = "draft_timeout_ms=2000,draft_timeout_fraction=100"
PLAINTEXT = TlsSettings()
# No alert is about certificates that last so long.
LASTING = timedelta(days=29)
START_S = 110.0
ALERT_S = 90.0
HOLD_S = 5
# Long enough for an alert that fires on well-being to have data, to hold and to fire.
SILENCE_S = 15.0

NEEDS_PROMETHEUS = pytest.mark.skipif(
    installed("prometheus") is None,
    reason="NOT CHECKED: prometheus is missing (python -m tools.fetch_prometheus)",
)


@contextmanager
def prometheus_of(folder: Path, targets: dict[str, str], scrape_s: int = 1) -> Iterator[Prometheus]:
    """Scrapes, and evaluates alerts, every scrape_s."""
    with Prometheus(folder, targets, scrape_s=scrape_s, hold_s=HOLD_S) as prometheus:
        yield prometheus


def await_firing(prometheus: Prometheus, wanted: Collection[str], seconds: float = ALERT_S) -> None:
    """Returns once each of the alerts has fired. Raises AssertionError naming those that did."""
    missing, seen = set(wanted), set[str]()
    give_up = time.monotonic() + seconds
    while not missing <= seen:
        assert time.monotonic() < give_up, f"{missing - seen} did not fire, but {seen} did"
        time.sleep(0.5)
        seen |= prometheus.firing()


def await_silence(
    prometheus: Prometheus, alerts: Collection[str], seconds: float = ALERT_S
) -> None:
    """Returns once none of the alerts has fired for a while."""
    began = silent_since = time.monotonic()
    while (now := time.monotonic()) - silent_since < SILENCE_S:
        if firing := prometheus.firing() & set(alerts):
            silent_since = now
            assert now - began < seconds, f"{firing} fire"
        time.sleep(0.5)


def await_data(prometheus: Prometheus, expression: str, seconds: float = ALERT_S) -> None:
    """Returns once the expression has samples."""
    give_up = time.monotonic() + seconds
    while not prometheus.query(expression):
        assert time.monotonic() < give_up, f"no data: {expression}"
        time.sleep(0.2)


def await_served(prometheus: Prometheus, num_requests: int = 20) -> None:
    """Returns once that many requests have been seen to end well."""
    ended = 'kvbraid_coordinator_requests_total{outcome=~"stop|length"}'
    await_data(prometheus, f"sum({ended}) >= {num_requests}")


def lasting_authority(folder: Path) -> CertificateAuthority:
    """Its files go to a new folder in `folder`."""
    directory = folder / "tls"
    directory.mkdir()
    return CertificateAuthority(directory, ends=LASTING)


def _flags(tls: TlsSettings) -> list[str]:
    given = {setting.flag: getattr(tls, name) for name, setting in settings_of(TlsSettings).items()}
    return [f"{flag}={value}" for flag, value in given.items() if value]


@dataclass(frozen=True)
class Watched:
    """A running cluster and the Prometheus that watches it. tls: of all its processes, and of
    clients."""

    cluster: LocalCluster
    prometheus: Prometheus
    tls: TlsSettings

    def load(self) -> Load:
        """Clients, while the block lasts."""
        coordinator = self.cluster.coordinator
        return Load(coordinator.http, coordinator.grpc, "tiny", self.tls)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process of the cluster."""
        os.kill(self.cluster.children[name].pid, number)


@contextmanager
def watched_cluster(
    folder: Path, spec: ClusterSpec, scrape_s: int = 1, tls: TlsSettings = PLAINTEXT
) -> Iterator[Watched]:
    """Start both; frozen processes are woken at the end, so that they can be stopped."""
    secured = replace(spec, everyone=(*spec.everyone, *_flags(tls)))
    with LocalCluster(secured, folder / "logs") as cluster:
        cluster.start(timeout_s=START_S)
        reports = {"coordinator": cluster.coordinator, **cluster.workers}
        targets = {name: report.metrics for name, report in reports.items()}
        with prometheus_of(folder, targets, scrape_s) as prometheus:
            try:
                yield Watched(cluster, prometheus, tls)
            finally:
                for child in cluster.children.values():
                    if child.is_running:
                        os.killpg(child.pid, signal.SIGCONT)
