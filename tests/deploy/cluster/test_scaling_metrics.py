"""What HorizontalPodAutoscalers and ScaledObjects ask for is what the pods say."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.charts import Manifest, Values, by_kind, example, render
from tests.deploy.cluster import endpoints
from tests.deploy.cluster.cluster import COMPONENT, Cluster
from tests.deploy.cluster.outsider import Outsider

# The first test of the folder waits for the whole cluster.
pytestmark = pytest.mark.timeout(300)

WORKERS = ("prefill", "decode", "draft")
# Given to every series by the monitor: where it was scraped.
TARGET_LABELS = {"namespace", "service"}

Sample = tuple[str, dict[str, str]]


def scaled(values: Values, kind: str) -> list[Manifest]:
    given = copy.deepcopy(values)
    for role in WORKERS:
        given[role]["autoscaling"] = {"kind": kind}
    given["decode"]["autoscaling"]["reserved_pages"] = 100
    return render(example("laptop-cpu"), values=given)


def monitored_pods(cluster: Cluster, scaler: Manifest) -> list[Any]:
    """The pods behind the headless Service of what it scales, which is what is scraped."""
    namespace = scaler["metadata"]["namespace"]
    name = f"{scaler['spec']['scaleTargetRef']['name']}-pods.{namespace}.{endpoints.ZONE}"
    (service,) = (s for s in cluster.services if endpoints.domain(s) == name)
    pods = endpoints.members(service, cluster.running())
    role = scaler["metadata"]["labels"][COMPONENT]
    assert {pod.spec.labels[COMPONENT] for pod in pods} == {role}
    return pods


def samples(client: Outsider, pod: Any) -> list[Sample]:
    port = pod.spec.port_number("metrics")
    (page,) = client.results("get", url=f"http://{pod.address}:{port}/metrics")
    families = text_string_to_metric_families(page["text"])
    return [(sample.name, sample.labels) for family in families for sample in family.samples]


def test_every_pod_has_what_the_hpa_names(
    settled: Cluster, client: Outsider, values: Values
) -> None:
    scalers = by_kind(scaled(values, "hpa"), "HorizontalPodAutoscaler")
    assert len(scalers) == len(WORKERS)
    for scaler in scalers:
        (metric,) = (entry["pods"]["metric"] for entry in scaler["spec"]["metrics"])
        pods = monitored_pods(settled, scaler)
        assert pods
        for pod in pods:
            found = [labels for name, labels in samples(client, pod) if name == metric["name"]]
            assert found, metric["name"]
            for expression in metric.get("selector", {}).get("matchExpressions", []):
                assert expression["operator"] == "In"
                values_there = {labels[expression["key"]] for labels in found}
                assert set(expression["values"]) <= values_there


@pytest.mark.parametrize("role", WORKERS)
def test_every_pod_has_what_keda_asks_for(
    role: str, settled: Cluster, client: Outsider, values: Values
) -> None:
    scalers = by_kind(scaled(values, "keda"), "ScaledObject")
    (scaler,) = (s for s in scalers if s["metadata"]["labels"][COMPONENT] == role)
    (trigger,) = scaler["spec"]["triggers"]
    series = re.findall(r"(\w+)\{([^}]*)\}", trigger["metadata"]["query"])
    assert series
    pods = monitored_pods(settled, scaler)
    for pod in pods:
        found = samples(client, pod)
        for name, selector in series:
            matchers = re.findall(r'(\w+)(=~?)"([^"]*)"', selector)
            where = {label: value for label, _, value in matchers if label in TARGET_LABELS}
            service = f"{scaler['spec']['scaleTargetRef']['name']}-pods"
            assert where == {"namespace": "serving", "service": service}
            own = [m for m in matchers if m[0] not in TARGET_LABELS]
            assert any(n == name and is_selected(labels, own) for n, labels in found), name


def is_selected(labels: dict[str, str], matchers: list[tuple[str, str, str]]) -> bool:
    """Whether PromQL's matchers, anchored at both ends, take a series with these labels."""
    return all(
        label in labels
        and (labels[label] == value if sign == "=" else re.fullmatch(value, labels[label]))
        for label, sign, value in matchers
    )
