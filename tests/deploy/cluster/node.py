"""The node: a router between pods that lets through what the network policies allow.

Each pod has a cable to it and an address. Rules of the routing table are the firewall, so that no
tool beyond iproute2 is needed: packets from a pod are dropped unless a rule for both addresses and
the port, or for the answers to it, sends them on.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

from tests.deploy.charts import ROOT
from tests.deploy.cluster.namespaces import Holder
from tests.deploy.cluster.policies import Opening

GATEWAY = "169.254.1.1"
DNS_ADDRESS = "10.96.0.10"
_ALLOW, _DENY = 100, 200
_ANSWER_S = 30.0


class Node:
    """Network namespace and agent process of the node."""

    def __init__(self) -> None:
        self._holder = Holder("mount -t proc proc /proc; echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._numbers = itertools.count(2)
        self._services = itertools.count(20)
        self._users: Counter[str] = Counter()
        self._ip("link set lo up", f"addr add {DNS_ADDRESS}/32 dev lo")
        self._agent = AgentLink(self._holder)

    def _ip(self, *lines: str) -> None:
        if lines:
            self._holder.run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")

    def pod_address(self) -> str:
        """A new address for a pod."""
        return f"10.244.0.{next(self._numbers)}"

    def connect(self, pod: Holder, address: str) -> None:
        """Give the pod its address, and nothing that it may reach but the node."""
        cable = f"pod{address.rpartition('.')[2]}"
        self._ip(
            f"link add {cable} type veth peer name eth0 netns {pod.pid}",
            f"addr add {GATEWAY}/32 dev {cable}",
            f"link set {cable} up",
            f"route add {address}/32 dev {cable}",
            f"rule add pref {_DENY} iif {cable} prohibit",
        )
        inside = [
            "link set lo up",
            f"addr add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add {GATEWAY} dev eth0 scope link",
            f"route add default via {GATEWAY} dev eth0",
        ]
        pod.run(["ip", "-batch", "-"], stdin="\n".join(inside) + "\n")

    def service_address(self) -> str:
        """A new address that the node answers for."""
        address = f"10.96.0.{next(self._services)}"
        self._ip(f"addr add {address}/32 dev lo")
        return address

    def open(self, source: str, destination: str, openings: list[Opening]) -> None:
        """Let connections of one pod to another through."""
        rules = _rules(source, destination, openings)
        self._ip(*(f"rule add {rule}" for rule in rules if self._users[rule] == 0))
        self._users.update(rules)

    def shut(self, source: str, destination: str, openings: list[Opening]) -> None:
        """Take back what `open` allowed."""
        rules = _rules(source, destination, openings)
        self._users.subtract(rules)
        self._ip(*(f"rule del {rule}" for rule in rules if self._users[rule] == 0))

    def ask(self, action: str, **arguments: Any) -> Any:
        """The agent's result."""
        return self._agent.ask(action, **arguments)

    def close(self) -> None:
        """End the agent and the network."""
        self._agent.close()
        self._holder.close()


def _rules(source: str, destination: str, openings: list[Opening]) -> set[str]:
    """For what goes there and for the answers. Two pairs may have the same rule."""
    rules = set()
    for opening in openings:
        forth, back = opening.selectors()
        rules.add(f"pref {_ALLOW} from {source} to {destination} {forth} lookup main")
        rules.add(f"pref {_ALLOW} from {destination} to {source} {back} lookup main")
    return rules


class AgentLink:
    """The agent process and what it is asked."""

    def __init__(self, holder: Holder) -> None:
        command = [sys.executable, "-m", "tests.deploy.cluster.node_agent", DNS_ADDRESS]
        self._process = subprocess.Popen(
            [*holder.enter("net"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, action: str, **arguments: Any) -> Any:
        """Its result. Raises TimeoutError when it does not answer."""
        future: Future[Any] = Future()
        assert self._process.stdin is not None
        with self._lock:
            ident = next(self._numbers)
            self._waiting[ident] = future
            self._process.stdin.write(json.dumps({"id": ident, "do": action} | arguments) + "\n")
            self._process.stdin.flush()
        return future.result(timeout=_ANSWER_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer["result"])

    def close(self) -> None:
        """Its input ends, and it with that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
