"""What NetworkPolicies let one pod do to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tests.deploy.charts import Manifest

_ALL_PORTS = (1, 65535)
PROTOCOLS = ("TCP", "UDP")


class Peer(Protocol):
    """A pod, as far as policies look at it."""

    @property
    def name(self) -> str:
        """Its own."""

    @property
    def namespace(self) -> str:
        """The one that it is in."""

    @property
    def labels(self) -> dict[str, str]:
        """What selectors look at."""

    def port_number(self, port: int | str) -> int | None:
        """Number of a port; None where the pod has none of that name."""


@dataclass(frozen=True)
class Opening:
    """Ports that connections may go to."""

    protocol: str
    first: int
    last: int

    def covers(self, protocol: str, port: int) -> bool:
        """Whether a connection to that port goes through."""
        return self.protocol == protocol and self.first <= port <= self.last

    def selectors(self) -> tuple[str, str]:
        """`ip rule` selectors of what goes there and of what comes back."""
        way = f"ipproto {self.protocol.lower()}"
        if (self.first, self.last) == _ALL_PORTS:
            return way, way
        ports = f"{self.first}-{self.last}"
        return f"{way} dport {ports}", f"{way} sport {ports}"


def openings(policies: list[Manifest], source: Peer, destination: Peer) -> list[Opening]:
    """Where `source` may connect to on `destination`: its egress and the other's ingress agree."""
    out = _side(policies, "Egress", source, destination, destination)
    into = _side(policies, "Ingress", destination, source, destination)
    both = []
    for one in out:
        for other in into:
            first, last = max(one.first, other.first), min(one.last, other.last)
            if one.protocol == other.protocol and first <= last:
                both.append(Opening(one.protocol, first, last))
    return sorted(set(both), key=lambda found: (found.protocol, found.first, found.last))


def _side(
    policies: list[Manifest], direction: str, own: Peer, other: Peer, destination: Peer
) -> list[Opening]:
    """What the policies of `own` say; everything where none of this direction selects it."""
    mine = [p for p in policies if direction in p["spec"]["policyTypes"] and _selects(p, own)]
    if not mine:
        return [Opening(protocol, *_ALL_PORTS) for protocol in PROTOCOLS]
    peers = "from" if direction == "Ingress" else "to"
    found = []
    for policy in mine:
        for rule in policy["spec"].get(direction.lower(), []):
            if peers not in rule or any(_fits(policy, peer, other) for peer in rule[peers]):
                found += _ports(rule, destination)
    return found


def _ports(rule: dict[str, Any], destination: Peer) -> list[Opening]:
    if "ports" not in rule:
        return [Opening(protocol, *_ALL_PORTS) for protocol in PROTOCOLS]
    found = []
    for port in rule["ports"]:
        number = destination.port_number(port["port"])
        if number is not None:
            found.append(Opening(port["protocol"], number, port.get("endPort", number)))
    return found


def _selects(policy: Manifest, pod: Peer) -> bool:
    in_namespace = policy["metadata"]["namespace"] == pod.namespace
    return in_namespace and matches(policy["spec"]["podSelector"], pod.labels)


def _fits(policy: Manifest, peer: dict[str, Any], pod: Peer) -> bool:
    unknown = peer.keys() - {"podSelector", "namespaceSelector"}
    assert not unknown, f"not interpreted: {unknown}"
    if "namespaceSelector" in peer:
        labels = {"kubernetes.io/metadata.name": pod.namespace}
        if not matches(peer["namespaceSelector"], labels):
            return False
    elif policy["metadata"]["namespace"] != pod.namespace:
        return False
    return matches(peer.get("podSelector", {}), pod.labels)


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector selects something with these labels."""
    unknown = selector.keys() - {"matchLabels"}
    assert not unknown, f"not interpreted: {unknown}"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
