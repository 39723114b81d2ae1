"""All services on this machine, each in its own process: what `kvbraid up` and tests start."""

from __future__ import annotations

from kvbraid.cluster.child import ChildError
from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.cluster.worker_spec import WorkerSpec

__all__ = ["ChildError", "ClusterSpec", "LocalCluster", "WorkerSpec"]
