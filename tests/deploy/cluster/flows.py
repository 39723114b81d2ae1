"""Which connections pods of a cluster tried, by role, and whether policies allow them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.deploy.cluster import endpoints
from tests.deploy.cluster.cluster import COMPONENT, Cluster
from tests.deploy.cluster.node import DNS_ADDRESS
from tests.deploy.cluster.policies import Peer


@dataclass(frozen=True)
class Elsewhere:
    """What is not a pod of ours: the name server, or an address that nobody has."""

    name: str
    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict, hash=False)

    def port_number(self, port: int | str) -> int | None:
        """It has no named ports."""
        return port if isinstance(port, int) else None


_DNS = Elsewhere("dns", "kube-system", {"k8s-app": "kube-dns"})


@dataclass(frozen=True, order=True)
class Flow:
    """A connection that was tried: names are roles, and of pods elsewhere their own."""

    source: str
    destination: str
    protocol: str
    port: int
    is_allowed: bool


def flows(cluster: Cluster) -> set[Flow]:
    """Everything that was tried since the cluster began, of pods that are gone as well."""
    pods = {pod.address: pod.spec for pod in cluster.history}
    found = set()
    for source, destination, protocol, port in cluster.node.ask("flows"):
        elsewhere = _DNS if destination == DNS_ADDRESS else Elsewhere(destination)
        direct = (pods.get(destination, elsewhere), port)
        peer, number = _service_pod(cluster, destination, port) or direct
        allowed = cluster.allows(pods[source], peer, protocol, number)
        found.add(Flow(_name(pods[source]), _name(peer), protocol, number, allowed))
    return found


def _service_pod(cluster: Cluster, address: str, port: int) -> tuple[Peer, int] | None:
    """A pod that stands behind a Service's address, and the port there; None for another one."""
    for service in cluster.services:
        if cluster.addresses.get(endpoints.domain(service)) != address:
            continue
        (target,) = (p["targetPort"] for p in service["spec"]["ports"] if p["port"] == port)
        selector = service["spec"]["selector"].items()
        spec = next(pod.spec for pod in cluster.history if selector <= pod.spec.labels.items())
        number = spec.port_number(target)
        assert number is not None
        return spec, number
    return None


def _name(peer: Peer) -> str:
    return peer.labels.get(COMPONENT, peer.name)
