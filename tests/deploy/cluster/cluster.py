"""The rendered manifests, running: pods in namespaces, Services, names and network policies."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.deploy.charts import Manifest, by_kind
from tests.deploy.cluster import endpoints
from tests.deploy.cluster.controllers import KINDS, Controller, LeaderWorkerSet
from tests.deploy.cluster.file_system import VolumeSources
from tests.deploy.cluster.node import Node
from tests.deploy.cluster.pod import Pod
from tests.deploy.cluster.pod_spec import PodSpec
from tests.deploy.cluster.policies import Opening, openings
from tests.deploy.cluster.sandbox import Sandbox
from tests.deploy.cluster.secret_volume import SecretData

COMPONENT = "app.kubernetes.io/component"
_POLL_S = 0.05


class Cluster:
    """A context manager. Nothing runs until `deploy`; the end of the test ends everything."""

    def __init__(
        self,
        manifests: list[Manifest],
        claims: dict[str, Path],
        folder: Path,
        secrets: dict[str, SecretData] | None = None,
    ) -> None:
        """claims: what lies in the volumes of PersistentVolumeClaims. secrets: data of Secrets that
        somebody else makes."""
        self.policies = by_kind(manifests, "NetworkPolicy")
        self.services = by_kind(manifests, "Service")
        self.controllers: dict[str, Controller] = {
            manifest["metadata"]["labels"][COMPONENT]: make(manifest)
            for kind, make in KINDS.items()
            for manifest in by_kind(manifests, kind)
        }
        maps = {m["metadata"]["name"]: m["data"] for m in by_kind(manifests, "ConfigMap")}
        self._sources = VolumeSources(maps, claims, secrets or {})
        self._folder = folder
        self.history: list[Pod] = []
        self.node = Node()
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._open: dict[tuple[str, str], list[Opening]] = {}
        self._is_closing = False
        self._recreating: list[threading.Thread] = []
        groups = [c for c in self.controllers.values() if isinstance(c, LeaderWorkerSet)]
        self.services += [group.service for group in groups]
        self.addresses = {
            endpoints.domain(service): self.node.service_address()
            for service in self.services
            if not endpoints.is_headless(service)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        for thread in self._recreating:
            thread.join()
        for pod in self.running():
            pod.deleted.set()
            pod.sandbox.kill_all()
        for pod in self.running():
            pod.gone.wait(30)
        self.node.close()

    def deploy(self, component: str) -> None:
        """Create the pods of a role."""
        controller = self.controllers[component]
        for index in range(controller.num_units):
            self._create_unit(component, index)

    def create(self, spec: PodSpec, changed: Callable[[Pod, str], None] | None = None) -> Pod:
        """Create one pod."""
        folder = self._folder / f"{next(self._numbers)}-{spec.name}"
        sandbox = Sandbox(spec, self.node, self._sources, folder)
        pod = Pod(spec, sandbox, self.node, folder, changed or self._pod_changed)
        with self._lock:
            for other in self.running():
                self._connect(pod, other)
                self._connect(other, pod)
            self.history.append(pod)
            self._publish()
        pod.start()
        return pod

    def renew_secret(self, name: str, data: SecretData) -> None:
        """Change a Secret, in every pod that has it too."""
        self._sources.renew_secret(name, data)

    def running(self, component: str = "") -> list[Pod]:
        """The pods that are not gone, of a role or all."""
        return [
            pod
            for pod in self.history
            if not pod.gone.is_set() and component in ("", pod.spec.labels.get(COMPONENT))
        ]

    def ready(self, component: str) -> list[Pod]:
        """Pods of a role that are ready and stay."""
        pods = self.running(component)
        return [pod for pod in pods if pod.is_ready and not pod.deleted.is_set()]

    def wait(self, is_so: Callable[[], object], seconds: float, what: str) -> None:
        """Returns once it is so; fails the test after that time, with the states of all pods."""
        give_up = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < give_up, f"not within {seconds} s: {what}\n{self.states()}"
            threading.Event().wait(_POLL_S)

    def settle(self, seconds: float) -> None:
        """Returns once every controller has all its pods, ready, and none is on its way out."""

        def is_settled() -> bool:
            return all(
                len(self.running(component))
                == len(self.ready(component))
                == controller.num_units * controller.unit_size
                for component, controller in self.controllers.items()
            )

        self.wait(is_settled, seconds, "all pods are ready")

    def states(self) -> str:
        """For messages: every pod, its last events and the end of its log."""
        lines = []
        for pod in self.history:
            happened = ", ".join(f"{event.what} {event.detail}".strip() for event in pod.events)
            log = pod.log.read_text(errors="replace")[-800:] if pod.log.exists() else ""
            lines.append(f"{pod.spec.name} {pod.address}: {happened}\n{log}")
        return "\n".join(lines)

    def allows(self, source: PodSpec, destination: Any, protocol: str, port: int) -> bool:
        """Whether policies let that connection through."""
        found = openings(self.policies, source, destination)
        return any(opening.covers(protocol, port) for opening in found)

    def _connect(self, source: Pod, destination: Pod) -> None:
        found = openings(self.policies, source.spec, destination.spec)
        self._open[source.address, destination.address] = found
        self.node.open(source.address, destination.address, found)

    def _disconnect(self, pod: Pod) -> None:
        for source, destination in [pair for pair in self._open if pod.address in pair]:
            self.node.shut(source, destination, self._open.pop((source, destination)))

    def _create_unit(self, component: str, index: int) -> None:
        unit: list[Pod] = []
        changed = functools.partial(self._unit_changed, component, index, unit)
        for spec in self.controllers[component].unit(index):
            unit.append(self.create(spec, changed))

    def _unit_changed(
        self, component: str, index: int, unit: list[Pod], pod: Pod, what: str
    ) -> None:
        """A Deployment replaces a pod as soon as it is deleted, a group once all of it is gone."""
        self._pod_changed(pod, what)
        is_group = self.controllers[component].ends_with_a_container
        if self._is_closing:
            return
        if what == "deleted" and not is_group:
            self._create_unit(component, index)
        elif what == "restarted" and is_group:
            thread = threading.Thread(target=self._recreate, args=(component, index, unit))
            self._recreating.append(thread)
            thread.start()

    def _recreate(self, component: str, index: int, unit: list[Pod]) -> None:
        if any(pod.deleted.is_set() for pod in unit):
            return
        for pod in unit:
            pod.delete()
        for pod in unit:
            pod.gone.wait()
        if not self._is_closing:
            self._create_unit(component, index)

    def _pod_changed(self, pod: Pod, what: str) -> None:
        with self._lock:
            if what == "gone":
                self._disconnect(pod)
            if not self._is_closing:
                self._publish()

    def _publish(self) -> None:
        """Names and routes of Services follow the pods."""
        pods = self.running()
        found = endpoints.records(self.services, pods, self.addresses)
        self.node.ask("names", records=found)
        for service in self.services:
            if address := self.addresses.get(endpoints.domain(service)):
                for route in endpoints.routes(service, address, pods, self._is_open):
                    self.node.ask("route", **route)

    def _is_open(self, source: Pod, destination: Pod, port: int) -> bool:
        found = self._open.get((source.address, destination.address), [])
        return any(opening.covers("TCP", port) for opening in found)
