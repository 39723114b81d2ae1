"""Which pods a Deployment or a LeaderWorkerSet wants, and when it makes new ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.deploy.charts import Manifest
from tests.deploy.cluster.pod_spec import PodSpec, from_template

_LWS = "leaderworkerset.sigs.k8s.io"

Unit = list[PodSpec]


class Controller(Protocol):
    """A unit is what lives and ends together: a pod, or the pods of a group."""

    # Whether a unit ends when a container of it has ended.
    ends_with_a_container: bool

    @property
    def num_units(self) -> int:
        """How many it wants."""

    @property
    def unit_size(self) -> int:
        """Pods of a unit."""

    def unit(self, index: int) -> Unit:
        """The pods of a unit, new names where the kind gives new names."""


@dataclass
class Deployment:
    """apps/v1 Deployment: units are pods, which kubelets keep running."""

    manifest: Manifest
    ends_with_a_container: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def num_units(self) -> int:
        """spec.replicas."""
        return int(self.manifest["spec"]["replicas"])

    @property
    def unit_size(self) -> int:
        """1."""
        return 1

    def unit(self, index: int) -> Unit:
        """One pod of a new name."""
        del index
        metadata = self.manifest["metadata"]
        name = f"{metadata['name']}-{next(self._numbers)}"
        return [from_template(self.manifest["spec"]["template"], name, metadata["namespace"])]


@dataclass
class LeaderWorkerSet:
    """leaderworkerset.x-k8s.io/v1: units are groups, RecreateGroupOnPodRestart."""

    manifest: Manifest
    ends_with_a_container: bool = True

    def __post_init__(self) -> None:
        template = self.manifest["spec"]["leaderWorkerTemplate"]
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert self.manifest["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}

    @property
    def num_units(self) -> int:
        """spec.replicas."""
        return int(self.manifest["spec"]["replicas"])

    @property
    def unit_size(self) -> int:
        """spec.leaderWorkerTemplate.size."""
        return int(self.manifest["spec"]["leaderWorkerTemplate"]["size"])

    @property
    def service(self) -> Manifest:
        """The headless Service that the controller makes: host names of pods are below it."""
        metadata = self.manifest["metadata"]
        return {
            "kind": "Service",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {f"{_LWS}/name": metadata["name"]},
                "ports": [],
            },
        }

    def unit(self, index: int) -> Unit:
        """Leader and workers, always of the same names."""
        metadata, spec = self.manifest["metadata"], self.manifest["spec"]["leaderWorkerTemplate"]
        leader = f"{metadata['name']}-{index}"
        address = f"{leader}.{metadata['name']}.{metadata['namespace']}"
        pods = []
        for place in range(spec["size"]):
            labels = {f"{_LWS}/name": metadata["name"], f"{_LWS}/worker-index": str(place)}
            env = {
                "LWS_LEADER_ADDRESS": address,
                "LWS_GROUP_SIZE": str(spec["size"]),
                "LWS_WORKER_INDEX": str(place),
            }
            template = spec["leaderTemplate" if place == 0 else "workerTemplate"]
            name = leader if place == 0 else f"{leader}-{place}"
            pods.append(
                from_template(template, name, metadata["namespace"], labels=labels, env=env)
            )
        return pods


KINDS: dict[str, Callable[[Manifest], Controller]] = {
    "Deployment": Deployment,
    "LeaderWorkerSet": LeaderWorkerSet,
}
