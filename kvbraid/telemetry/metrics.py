"""Every metric of the project, by role; nothing here computes one.

A process builds the groups of its role once, over its own registry:

    metrics = WorkerMetrics(role="decode")             # or CoordinatorMetrics()
    metrics.engine.running_sequences.set(3)
    metrics.handoff.bytes_total.labels(direction="in", mover="shared_memory").inc(4096)
    endpoint = MetricsEndpoint(metrics.registry, host="127.0.0.1", port=0)   # telemetry.endpoint

Names are kvbraid_<area>_<noun>_<unit>[_total], base units; docs/metrics.md is made from them.
Labels are bounded (`telemetry.labels`): never a request id or an address.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, disable_created_metrics

from kvbraid.telemetry.coordinator_metrics import PlacementMetrics, RequestMetrics
from kvbraid.telemetry.engine_metrics import EngineMetrics
from kvbraid.telemetry.kv_metrics import HandoffMetrics, KvMetrics
from kvbraid.telemetry.process_metrics import ProcessMetrics, RpcMetrics
from kvbraid.telemetry.rank_metrics import AllRanks, RankMetrics
from kvbraid.telemetry.speculation_metrics import DraftMetrics, SpeculationMetrics

__all__ = [
    "AllRanks",
    "CoordinatorMetrics",
    "DraftMetrics",
    "DraftServiceMetrics",
    "EngineMetrics",
    "HandoffMetrics",
    "KvMetrics",
    "PlacementMetrics",
    "ProcessMetrics",
    "RankMetrics",
    "RequestMetrics",
    "RpcMetrics",
    "SpeculationMetrics",
    "WorkerMetrics",
]

# One creation time a series would double what is scraped and nothing reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


class CoordinatorMetrics:
    """What a coordinator exports."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.process = ProcessMetrics(self.registry, "coordinator")
        self.request = RequestMetrics(self.registry)
        self.placement = PlacementMetrics(self.registry)


class WorkerMetrics:
    """What a prefill or decode worker exports, through rank 0.

    Ranks above 0 export `rank.registry`, which rank 0 collects once it was told their addresses
    (`all_ranks.follow`).
    """

    def __init__(
        self, role: str, registry: CollectorRegistry | None = None, *, rank: int = 0
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.process = ProcessMetrics(self.registry, role)
        self.engine = EngineMetrics(self.registry)
        self.kv = KvMetrics(self.registry)
        self.handoff = HandoffMetrics(self.registry)
        self.speculation = SpeculationMetrics(self.registry)
        self.rank = RankMetrics(rank)
        self.all_ranks = AllRanks(self.rank.registry)
        self.registry.register(self.all_ranks)


class DraftServiceMetrics:
    """What a draft service exports."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.rpc = RpcMetrics(self.registry)
        self.process = ProcessMetrics(self.registry, "draft")
        self.draft = DraftMetrics(self.registry)
