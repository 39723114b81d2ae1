"""The laptop example with two of most things, started from what `helm template` renders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.charts import ROOT, Values, example, render
from tests.deploy.cluster import namespaces
from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.flows import flows
from tests.deploy.cluster.outsider import Outsider
from tools.chart_settings import role_settings

# The setting that limits how long a connection lives, whatever its unit suffix; empty: none has it.
AGE_SETTING = min(
    (name for name in role_settings("coordinator") if name.startswith("max_connection_age")),
    key=len,
    default="",
)
AGE_S = 2
_ONE_CORE = {"limits": {"cpu": "1", "memory": "2Gi"}}
# Prefill spans two hosts, a LeaderWorkerSet; decode has two ranks in a pod and two pods.
VALUES: Values = {
    "settings": {"model": "/models/tiny-mla"},
    "model_volume": {"pull": "tiny-mla"},
    "coordinator": {"replicas": 2, "settings": {AGE_SETTING: AGE_S} if AGE_SETTING else {}},
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
# Load beside the tests may slow a start down; it fails then with what every pod said.
_START_S = 100
# The one forbidden connection that a test tries, from the client's pod.
FORBIDDEN = ("client", "decode", 50053)


@pytest.fixture(scope="package")
def values() -> Values:
    """What the cluster is rendered with, beside the example's own."""
    return VALUES


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Everything is ready. At its end, nothing tried what no policy allows."""
    reason = namespaces.why_not()
    if ROOT.stat().st_mode & 0o005 != 0o005:
        reason = f"the pods' user may not read the checkout {ROOT}"
    if reason:
        pytest.skip(f"the chart's pods are NOT RUN on this machine: {reason}")
    manifests = render(example("laptop-cpu"), values=VALUES)
    claims = {"kv-kvbraid-models": ROOT / "tests/assets"}
    with Cluster(manifests, claims, tmp_path_factory.mktemp("cluster")) as running:
        _start(running)
        yield running
        tried = {
            (flow.source, flow.destination, flow.port)
            for flow in flows(running)
            if not flow.is_allowed
        }
        assert tried <= {FORBIDDEN}, tried


def _start(cluster: Cluster) -> None:
    """Coordinators first: they must live without any worker."""
    cluster.deploy("coordinator")
    pods = cluster.running("coordinator")
    cluster.wait(
        lambda: all(pod.times("startup succeeded") for pod in pods), _START_S, "coordinators live"
    )
    for component in ("draft", "prefill", "decode"):
        cluster.deploy(component)
    cluster.settle(_START_S)


@pytest.fixture
def settled(cluster: Cluster) -> Cluster:
    """The cluster, after whatever the test before did to it."""
    cluster.settle(_START_S)
    return cluster


@pytest.fixture(scope="package")
def client(cluster: Cluster) -> Outsider:
    """A pod of another namespace."""
    return Outsider(cluster, "client", "clients")


@pytest.fixture(scope="package")
def connection_age_s() -> float:
    """After how long coordinators send clients elsewhere; skips where they never do."""
    if not AGE_SETTING:
        pytest.skip("no setting of a coordinator limits the age of connections")
    return AGE_S
