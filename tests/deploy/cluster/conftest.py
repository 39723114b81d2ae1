"""The laptop example with two of most things, started from what `helm template` renders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.charts import Values, example, render
from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.outsider import Outsider
from tests.deploy.cluster.running import START_S, running_cluster

AGE_S = 2
_ONE_CORE = {"limits": {"cpu": "1", "memory": "2Gi"}}
# Prefill spans two hosts, a LeaderWorkerSet; decode has two ranks in a pod and two pods.
VALUES: Values = {
    "settings": {"model": "/models/tiny-mla"},
    "model_volume": {"pull": "tiny-mla"},
    "coordinator": {"replicas": 2, "settings": {"max_connection_age_seconds": AGE_S}},
    "prefill": {
        "hosts_per_worker": 2,
        "settings": {"tp_size": 2, "dcp_size": 2},
        "resources": _ONE_CORE,
    },
    "decode": {"replicas": 2},
    "draft": {
        "replicas": 1,
        "settings": {"drafter": "/models/tiny-mla-dspark"},
        "resources": _ONE_CORE,
    },
}
# The one forbidden connection that a test tries, from the client's pod.
FORBIDDEN = ("client", "decode", 50053)


@pytest.fixture(scope="package")
def values() -> Values:
    """What the cluster is rendered with, beside the example's own."""
    return VALUES


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Everything is ready. At its end, nothing tried what no policy allows."""
    manifests = render(example("laptop-cpu"), values=VALUES)
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(manifests, folder, forbidden={FORBIDDEN}) as running:
        yield running


@pytest.fixture
def settled(cluster: Cluster) -> Cluster:
    """The cluster, after whatever the test before did to it."""
    cluster.settle(START_S)
    return cluster


@pytest.fixture(scope="package")
def client(cluster: Cluster) -> Outsider:
    """A pod of another namespace."""
    return Outsider(cluster, "client", "clients")


@pytest.fixture(scope="package")
def connection_age_s() -> float:
    """After how long coordinators send clients elsewhere."""
    return AGE_S
