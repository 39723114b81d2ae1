"""Services: who is behind them, by which names and addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.deploy.charts import Manifest
from tests.deploy.cluster.pod import Pod

ZONE = "svc.cluster.local"
Allowed = Callable[[Pod, Pod, int], bool]


def members(service: Manifest, pods: Iterable[Pod]) -> list[Pod]:
    """The pods whose addresses it publishes."""
    spec, namespace = service["spec"], service["metadata"]["namespace"]
    found = [
        pod
        for pod in pods
        if pod.spec.namespace == namespace and spec["selector"].items() <= pod.spec.labels.items()
    ]
    if spec.get("publishNotReadyAddresses"):
        return found
    return [pod for pod in found if pod.is_ready and not pod.deleted.is_set()]


def is_headless(service: Manifest) -> bool:
    """Whether its name stands for its pods' addresses."""
    return bool(service["spec"].get("clusterIP") == "None")


def domain(service: Manifest) -> str:
    """Its whole name."""
    metadata = service["metadata"]
    return f"{metadata['name']}.{metadata['namespace']}.{ZONE}"


def records(
    services: list[Manifest], pods: list[Pod], addresses: dict[str, str]
) -> dict[str, list[str]]:
    """What the name server says. addresses: of those Services that have one, by domain."""
    found: dict[str, list[str]] = {}
    for service in services:
        name = domain(service)
        if not is_headless(service):
            found[name] = [addresses[name]]
            continue
        behind = members(service, pods)
        found[name] = [pod.address for pod in behind]
        if not service["spec"]["ports"]:
            found |= {f"{pod.spec.name}.{name}": [pod.address] for pod in behind}
    return found


def routes(
    service: Manifest, address: str, pods: list[Pod], allowed: Allowed
) -> list[dict[str, Any]]:
    """For each of its ports what the Service proxy has to know."""
    found = []
    for port in service["spec"]["ports"]:
        behind = [
            (pod, number)
            for pod in members(service, pods)
            if (number := pod.spec.port_number(port["targetPort"])) is not None
        ]
        by_source = {
            source.address: [
                (pod.address, number) for pod, number in behind if allowed(source, pod, number)
            ]
            for source in pods
        }
        found.append({"address": address, "port": port["port"], "allowed": by_source})
    return found
