"""Several clusters of this machine beside one another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc

from kvbraid.cluster.local_cluster import ClusterSpec, LocalCluster
from kvbraid.rpc.tls import Caller
from kvbraid.settings import tls_from_environment

_START_S = 300.0
# Which of three parts of the cores a role's processes share.
_PLACES = {"decode": 0, "prefill": 1, "draft": 1, "coordinator": 2}
_FEWEST_CORES = 12


def open_channel(target: str) -> grpc.aio.Channel:
    """To a service that was started here: it has its certificates from the same environment."""
    return Caller(tls_from_environment()).open(target, [])


class Clusters:
    """Running clusters. They end with the context, and with the thread that started
    them, which is why the pool outlives them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor()
        self._clusters: dict[str, LocalCluster] = {}
        self._cores = sorted(os.sched_getaffinity(0))

    def __enter__(self) -> Clusters:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._pool.shutdown()
        _pin(os.getpid(), self._cores)

    def start(self, specs: Mapping[str, ClusterSpec]) -> dict[str, str]:
        """Start all at once; coordinators' gRPC addresses by name."""
        found = {name: LocalCluster(spec) for name, spec in specs.items()}
        for cluster in found.values():
            self._stack.enter_context(cluster)
        list(self._pool.map(lambda cluster: cluster.start(timeout_s=_START_S), found.values()))
        self._clusters |= found
        return {name: cluster.coordinator.grpc for name, cluster in found.items()}

    def decode_metrics(self) -> dict[str, str]:
        """Where the metrics of each cluster's first decode worker are, by the cluster's name."""
        return {name: c.workers["decode-0"].metrics for name, c in self._clusters.items()}

    def share_cores(self) -> None:
        """Give each role of all clusters the same cores, and this process some of its own.

        Clusters that answer in turn then differ by what they do and not by where they were placed,
        which lasts for as long as they run: on a virtual machine one core is slower than another
        by as much as is to be measured. So the main thread of each process, with its event loop,
        has one core to itself. To be called again now and then, for threads that were started
        since. Nothing is done where there are fewer cores than a few for each.
        """
        if len(self._cores) < _FEWEST_CORES:
            return
        quarter = len(self._cores) // 4
        own, shared = self._cores[:quarter], self._cores[quarter:]
        for cluster in self._clusters.values():
            for name, child in cluster.children.items():
                place = _PLACES[name.split("-")[0]]
                first, *others = shared[place * quarter : (place + 1) * quarter]
                _pin(child.pid, others, main=[first])
        _pin(os.getpid(), own)


def _pin(pid: int, cores: list[int], main: list[int] | None = None) -> None:
    """All threads of a process; main: of its main thread. Those that are started later inherit
    it."""
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, main if main and thread == pid else cores)
