"""Default deny, and exactly the edges that roles need."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.charts import DRAFTING, Manifest, by_kind, example, render, the

COMPONENT = "app.kubernetes.io/component"
ANYONE = "anyone"
Edge = tuple[str, str, int | str, int | str]

FRONT = {(ANYONE, "coordinator", "grpc", "grpc"), (ANYONE, "coordinator", "http", "http")}
DNS = 53


def component(peer: dict[str, Any]) -> str:
    return str(peer.get("podSelector", {}).get("matchLabels", {}).get(COMPONENT, ANYONE))


def edges(manifests: list[Manifest], direction: str) -> set[Edge]:
    """(from, to, first port, last port) that ingress or egress rules allow; no ports: 0 to 0."""
    found: set[Edge] = set()
    for policy in by_kind(manifests, "NetworkPolicy"):
        own = policy["spec"]["podSelector"]["matchLabels"].get(COMPONENT, "every pod")
        for rule in policy["spec"].get(direction, []):
            for peer in rule.get("from" if direction == "ingress" else "to", [{}]):
                ends = (component(peer), own) if direction == "ingress" else (own, component(peer))
                for port in rule.get("ports", [{"port": 0}]):
                    found.add((*ends, port["port"], port.get("endPort", port["port"])))
    return found


def between_roles(found: set[Edge]) -> set[Edge]:
    return {edge for edge in found if ANYONE not in edge}


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_roles_have_the_edges_that_they_need_and_no_others(direction: str) -> None:
    manifests = render(example("laptop-cpu"), values=DRAFTING)
    assert between_roles(edges(manifests, direction)) == {
        ("coordinator", "prefill", 50052, 50052),
        ("coordinator", "decode", 50053, 50053),
        # KV rows go to every rank.
        ("prefill", "decode", 50053, 50054),
        ("prefill", "draft", 50054, 50054),
        ("decode", "draft", 50054, 50054),
        # Steps past gRPC.
        ("decode", "draft", 50055, 50055),
    }


def test_outsiders_reach_the_front_and_nothing_else() -> None:
    ingress = edges(render(example("laptop-cpu")), "ingress")
    outside = {edge for edge in ingress if edge[0] == ANYONE and edge[2] != "metrics"}
    assert outside == FRONT


def test_pods_reach_dns_and_only_the_job_the_outside() -> None:
    egress = edges(render(example("laptop-cpu")), "egress")
    assert {edge for edge in egress if edge[1] == ANYONE} == {
        ("every pod", ANYONE, DNS, DNS),
        ("pull", ANYONE, 443, 443),
    }


def test_everything_else_is_denied() -> None:
    policy = the(render(example("laptop-cpu")), "NetworkPolicy", "")
    assert policy["spec"]["podSelector"]["matchLabels"].keys() == {
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
    }
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy["spec"]


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_hosts_of_a_worker_reach_each_other_on_any_port(direction: str) -> None:
    found = edges(render(example("dcp16-two-nodes")), direction)
    assert ("decode", "decode", 0, 0) in found
    assert ("prefill", "prefill", 0, 0) not in found
    # 8 ranks a pod, whichever pod it is.
    assert ("prefill", "decode", 50053, 50060) in found


def test_clients_and_scrapers_can_be_narrowed() -> None:
    policy = the(render(example("dcp16-two-nodes")), "NetworkPolicy", "coordinator")
    front, metrics = policy["spec"]["ingress"]
    for rule, name in ((front, "gateway"), (metrics, "monitoring")):
        labels = {"kubernetes.io/metadata.name": name}
        assert rule["from"] == [{"namespaceSelector": {"matchLabels": labels}}]


def test_they_can_be_turned_off() -> None:
    values = {"network_policy": {"enabled": False}}
    assert by_kind(render(example("laptop-cpu"), values=values), "NetworkPolicy") == []
