"""A pod that is not of the release: its clients are commands that run in it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

from tests.deploy.charts import ROOT
from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.pod_spec import PodSpec

_END_S = 90


class Call:
    """A client at work. Iterating gives its results; `rest` waits for all of them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.results: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.results.append(json.loads(line))
            yield self.results[-1]

    def rest(self) -> list[dict[str, Any]]:
        """All results, those that were iterated over included. Fails when the client failed."""
        for _ in self:
            pass
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.wait(timeout=_END_S) == 0
        return self.results

    @property
    def tokens(self) -> list[int]:
        """Of a `generate` call, so far."""
        return [token for result in self.results for token in result.get("tokens", [])]


class Outsider:
    """Somebody else's pod in the cluster."""

    def __init__(self, cluster: Cluster, name: str, namespace: str) -> None:
        container = {
            "name": name,
            "command": ["sleep", "infinity"],
            "env": [{"name": "PYTHONPATH", "value": str(ROOT)}],
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        spec = {
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 2000, "runAsGroup": 2000, "fsGroup": 2000,
            },
            "terminationGracePeriodSeconds": 1,
            "shareProcessNamespace": True,
            "enableServiceLinks": False,
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        }  # fmt: skip
        self.pod = cluster.create(PodSpec(name, namespace, {"app": name}, spec))

    def call(self, do: str, **arguments: Any) -> Call:
        """Start a client (tests/deploy/cluster/client.py)."""
        wanted = json.dumps({"do": do} | arguments)
        argv = ["python", "-m", "tests.deploy.cluster.client", wanted]
        return Call(self.pod.sandbox.popen(argv, stdout=subprocess.PIPE, text=True))

    def results(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """What a client says, once it has ended."""
        return self.call(do, **arguments).rest()
