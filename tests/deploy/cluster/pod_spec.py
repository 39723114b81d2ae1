"""A pod template as a kubelet reads it. What is neither interpreted nor listed here is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.charts import ROOT, Manifest

_POD_KEYS = {
    "containers", "initContainers", "volumes", "securityContext", "terminationGracePeriodSeconds",
    "shareProcessNamespace", "enableServiceLinks",
}  # fmt: skip
_CONTAINER_KEYS = {
    "name", "command", "args", "env", "ports", "startupProbe", "readinessProbe", "livenessProbe",
    "lifecycle", "securityContext", "volumeMounts",
}  # fmt: skip
# There is one node, one image, no API to have a token of, and no limit on what a process takes.
_WITHOUT_EFFECT = {
    "image", "imagePullPolicy", "resources", "serviceAccountName", "automountServiceAccountToken",
    "topologySpreadConstraints", "nodeSelector", "tolerations", "affinity",
}  # fmt: skip


@dataclass(frozen=True)
class PodSpec:
    """Everything of a pod but its address."""

    name: str
    namespace: str
    labels: dict[str, str]
    spec: dict[str, Any]
    # What a controller adds to every container's environment.
    extra_env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_unknown("pod", self.spec, _POD_KEYS)
        for container in [*self.spec.get("initContainers", []), *self.spec["containers"]]:
            _refuse_unknown("container", container, _CONTAINER_KEYS)
        assert len(self.spec["containers"]) == 1, "one container a pod is what is interpreted"
        assert self.spec["shareProcessNamespace"], "the pause process is process 1"
        assert not self.spec["enableServiceLinks"], "links are not made"

    @property
    def container(self) -> dict[str, Any]:
        """The one container."""
        container: dict[str, Any] = self.spec["containers"][0]
        return container

    def port_number(self, port: int | str) -> int | None:
        """Number of a port; None where the pod has none of that name."""
        if isinstance(port, int):
            return port
        named = {p["name"]: p["containerPort"] for p in self.container.get("ports", [])}
        return named.get(port)

    def probe(self, kind: str) -> dict[str, Any] | None:
        """A probe with numbers for ports."""
        found: dict[str, Any] | None = self.container.get(kind)
        if found is None:
            return None
        (action,) = found.keys() & {"grpc", "httpGet", "tcpSocket", "exec"}
        port = found[action].get("port")
        return found | {action: found[action] | {"port": self.port_number(port)}}

    def environment(self, container: dict[str, Any], pod_ip: str) -> dict[str, str]:
        """What the container's process finds: of the image, of controllers, of the manifest."""
        fields = {"status.podIP": pod_ip, "metadata.name": self.name}
        found = image_environment() | self.extra_env
        for variable in container.get("env", []):
            source = variable.get("valueFrom")
            value = fields[source["fieldRef"]["fieldPath"]] if source else variable["value"]
            found[variable["name"]] = value
        return found


def command(container: dict[str, Any], environment: dict[str, str]) -> list[str]:
    """Command and arguments with $(NAME) replaced where there is such a variable."""

    def replaced(match: re.Match[str]) -> str:
        return environment.get(match[1], match[0])

    parts = [*container["command"], *container.get("args", [])]
    return [re.sub(r"\$\(([A-Za-z_]\w*)\)", replaced, part) for part in parts]


def image_environment() -> dict[str, str]:
    """ENV of the stage that every image is built from."""
    text = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
    stage = text.split("FROM base AS runtime\n")[1].split("\nFROM ")[0]
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", stage, re.MULTILINE)
    return dict(part.split("=", 1) for part in block.replace("\\\n", " ").split())


def from_template(
    template: Manifest, name: str, namespace: str, **extra: dict[str, str]
) -> PodSpec:
    """A pod of a workload. extra: labels and env that its controller adds."""
    labels = template["metadata"]["labels"] | extra.get("labels", {})
    return PodSpec(name, namespace, labels, template["spec"], extra.get("env", {}))


def _refuse_unknown(what: str, found: dict[str, Any], known: set[str]) -> None:
    unknown = found.keys() - known - _WITHOUT_EFFECT
    assert not unknown, f"the runner does not interpret these keys of a {what}: {unknown}"
