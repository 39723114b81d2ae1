"""Several clusters of this machine beside one another."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc

from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.rpc.tls import Caller
from kvbraid.settings import tls_from_environment

_START_S = 300.0


def open_channel(target: str) -> grpc.aio.Channel:
    """To a service that was started here: it has its certificates from the same environment."""
    return Caller(tls_from_environment()).open(target, [])


class Clusters:
    """Running clusters. They end with the context, and with the thread that started
    them, which is why the pool outlives them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor()

    def __enter__(self) -> Clusters:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._pool.shutdown()

    def start(self, specs: Mapping[str, ClusterSpec]) -> dict[str, str]:
        """Start all at once; coordinators' gRPC addresses by name."""
        found = {name: LocalCluster(spec) for name, spec in specs.items()}
        for cluster in found.values():
            self._stack.enter_context(cluster)
        list(self._pool.map(lambda cluster: cluster.start(timeout_s=_START_S), found.values()))
        return {name: cluster.coordinator.grpc for name, cluster in found.items()}
