"""Probes from the first process to readiness."""

from __future__ import annotations

import pytest

from tests.deploy.cluster.cluster import COMPONENT, Cluster
from tests.deploy.cluster.pod import Pod

# The first test of the folder waits for the whole cluster.
pytestmark = pytest.mark.timeout(300)


def first_events(pod: Pod) -> list[str]:
    """What happened to it up to its first readiness."""
    names = [event.what for event in pod.events]
    return names[: names.index("ready") + 1]


def first_pods(cluster: Cluster, component: str) -> list[Pod]:
    controller = cluster.controllers[component]
    pods = [p for p in cluster.history if p.spec.labels.get(COMPONENT) == component]
    return pods[: controller.num_units * controller.unit_size]


def test_workers_are_ready_once_they_serve(cluster: Cluster) -> None:
    for component in ("prefill", "decode", "draft"):
        for pod in first_pods(cluster, component):
            happened = first_events(pod)
            assert happened == [
                *("init", "started", "startup succeeded", "readiness succeeded", "ready")
            ], pod.spec.name


def test_coordinators_live_without_workers_and_are_not_ready(cluster: Cluster) -> None:
    first_worker = min(pod.times("started")[0] for pod in first_pods(cluster, "decode"))
    for pod in first_pods(cluster, "coordinator"):
        happened = first_events(pod)
        assert happened.index("startup succeeded") < happened.index("readiness failed")
        assert pod.times("readiness failed")[0] < first_worker < pod.times("ready")[0]
        assert not any(name.startswith("killed") for name in happened)
