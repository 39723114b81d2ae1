"""What a rank alone knows, and rank 0's view of all ranks.

Every rank has a `RankMetrics` over a registry of its own, which it serves itself. Rank 0 serves its
own and, through `AllRanks`, those of the others: one address of a worker shows all its ranks.
"""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvbraid.telemetry.buckets import EXCHANGE_BUCKETS, LAG_BUCKETS

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 1.0
# Past http_proxy, which is for the world outside.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RankMetrics:
    """One rank of a worker."""

    def __init__(self, rank: int) -> None:
        self.registry = CollectorRegistry()
        self._rank = str(rank)
        own = {"rank": self._rank}
        self.loop_lag_seconds = Histogram(
            "kvbraid_rank_loop_lag_seconds",
            "How late the asyncio loop of a rank ran what was due.",
            ["rank"], buckets=LAG_BUCKETS, registry=self.registry,
        ).labels(**own)  # fmt: skip
        self.free_memory_bytes = Gauge(
            "kvbraid_rank_free_memory_bytes",
            "Memory that is free on a rank's device: GPU memory, or the host's on CPU.",
            ["rank"], registry=self.registry,
        ).labels(**own)  # fmt: skip
        self._exchange_seconds = Histogram(
            "kvbraid_rank_exchange_seconds",
            "Sampled time of merging a rank's partial attention results with its stripe's.",
            ["rank", "exchange"], buckets=EXCHANGE_BUCKETS, registry=self.registry,
        )  # fmt: skip

    def exchange_seconds(self, exchange: str) -> Histogram:
        """The histogram of one way to merge."""
        return self._exchange_seconds.labels(rank=self._rank, exchange=exchange)


class AllRanks(Collector):
    """Rank 0's metrics and, fetched when asked, those of the ranks that it follows."""

    def __init__(self, own: CollectorRegistry) -> None:
        self.own = own
        self._others: dict[int, str] = {}
        self._lost: set[int] = set()

    def follow(self, addresses: Mapping[int, str]) -> None:
        """The ranks above 0 and the host:port of their endpoints."""
        self._others = dict(addresses)

    def collect(self) -> Iterable[Metric]:
        """Every family once, with the samples of all ranks that answered, and who did."""
        up = GaugeMetricFamily(
            "kvbraid_rank_up", "Whether a rank of the worker answered rank 0.", labels=["rank"]
        )
        up.add_metric(["0"], 1)
        merged: dict[str, Metric] = {}
        _merge(merged, self.own.collect())
        for rank, families in self._fetch_all().items():
            up.add_metric([str(rank)], families is not None)
            _merge(merged, families or ())
        return [up, *merged.values()]

    def _fetch_all(self) -> dict[int, list[Metric] | None]:
        if not self._others:
            return {}
        with ThreadPoolExecutor(len(self._others)) as pool:
            return dict(zip(self._others, pool.map(self._fetch, self._others), strict=True))

    def _fetch(self, rank: int) -> list[Metric] | None:
        url = f"http://{self._others[rank]}/metrics"
        try:
            with _DIRECT.open(url, timeout=_FETCH_TIMEOUT_S) as response:
                families = list(text_string_to_metric_families(response.read().decode()))
        except (OSError, ValueError) as error:
            if rank not in self._lost:
                logger.warning("rank %d does not answer at %s: %s", rank, url, error)
            self._lost.add(rank)
            return None
        self._lost.discard(rank)
        return families


def _merge(merged: dict[str, Metric], families: Iterable[Any]) -> None:
    for family in families:
        if family.name in merged:
            merged[family.name].samples.extend(family.samples)
        else:
            merged[family.name] = family
