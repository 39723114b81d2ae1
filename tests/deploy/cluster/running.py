"""A cluster from nothing to readiness, and what must be true when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.charts import ROOT, Manifest
from tests.deploy.cluster import namespaces
from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.flows import flows
from tests.deploy.cluster.secret_volume import SecretData

# Load beside the tests may slow a start down; it fails then with what every pod said.
START_S = 100

Attempt = tuple[str, str, int]


@contextmanager
def running_cluster(
    manifests: list[Manifest],
    folder: Path,
    *,
    forbidden: Set[Attempt] = frozenset(),
    secrets: dict[str, SecretData] | None = None,
) -> Iterator[Cluster]:
    """Everything is ready. At its end, nobody has tried what no policy allows but for `forbidden`:
    (source, destination, port). Skips where there can be no cluster."""
    reason = namespaces.why_not()
    if ROOT.stat().st_mode & 0o005 != 0o005:
        reason = f"the pods' user may not read the checkout {ROOT}"
    if reason:
        pytest.skip(f"the chart's pods are NOT RUN on this machine: {reason}")
    claims = {"kv-kvbraid-models": ROOT / "tests/assets"}
    with Cluster(manifests, claims, folder, secrets) as cluster:
        _start(cluster)
        yield cluster
        tried = {
            (flow.source, flow.destination, flow.port)
            for flow in flows(cluster)
            if not flow.is_allowed
        }
        assert tried <= forbidden, tried


def _start(cluster: Cluster) -> None:
    """Coordinators first: they must live without any worker. Drafters before who calls them."""
    cluster.deploy("coordinator")
    pods = cluster.running("coordinator")
    cluster.wait(
        lambda: all(pod.times("startup succeeded") for pod in pods), START_S, "coordinators live"
    )
    for component in ("draft", "prefill", "decode"):
        if component in cluster.controllers:
            cluster.deploy(component)
    cluster.settle(START_S)
