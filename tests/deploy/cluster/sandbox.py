"""A pod's namespaces and the processes that containers run in them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.deploy.cluster.file_system import HOME, VolumeSources, setup_script
from tests.deploy.cluster.namespaces import Holder, children
from tests.deploy.cluster.node import Node
from tests.deploy.cluster.pod_spec import PodSpec, command

_ALL = ("net", "mount", "pid", "ipc", "uts", "root")


class Process:
    """A container's main process. `nsenter` stands between it and us and ends as it does."""

    def __init__(self, outer: subprocess.Popen[bytes]) -> None:
        self.outer = outer

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number after one."""
        return self.outer.poll()

    def send(self, number: signal.Signals) -> None:
        """Signal the process itself, which may not be there yet. Nothing happens once it ended."""
        while self.outer.poll() is None:
            if pids := children(self.outer.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[0], number)
                return


class Sandbox:
    """Namespaces with an address and a file system, connected to the node."""

    def __init__(self, spec: PodSpec, node: Node, sources: VolumeSources, folder: Path) -> None:
        self.spec = spec
        self.address = node.pod_address()
        self._folder = folder
        root = folder / "root"
        setup = setup_script(spec, self.address, sources, folder)
        self._holder = Holder(setup, root=str(root))
        node.connect(self._holder, self.address)

    def start(self, container: dict[str, Any], log: Path) -> Process:
        """Run a container's command; both its outputs are appended to the file."""
        environment = self.spec.environment(container, self.address)
        argv = [*self._entered(container, environment), *command(container, environment)]
        with open(log, "ab") as output:
            outer = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        return Process(outer)

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        """`kubectl exec`: a command in the container's surroundings."""
        container = self.spec.container
        environment = self.spec.environment(container, self.address)
        return subprocess.Popen([*self._entered(container, environment), *argv], **options)

    def _entered(self, container: dict[str, Any], environment: dict[str, str]) -> list[str]:
        variables = [f"{name}={value}" for name, value in environment.items()]
        enter = [*self._holder.enter(*_ALL), f"--wdns={HOME}"]
        return [*enter, "env", "-i", *variables, *self._confined(container)]

    def _confined(self, container: dict[str, Any]) -> list[str]:
        """The command that gives up what the security contexts take."""
        pod, own = self.spec.spec["securityContext"], container["securityContext"]
        assert pod["runAsNonRoot"]
        assert pod["runAsUser"] > 0
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["allowPrivilegeEscalation"] is False
        groups = [pod["fsGroup"], *pod.get("supplementalGroups", [])]
        return [
            *("setpriv", f"--reuid={pod['runAsUser']}", f"--regid={pod['runAsGroup']}"),
            *(f"--groups={','.join(map(str, groups))}", "--inh-caps=-all"),
            *("--bounding-set=-all", "--no-new-privs"),
        ]

    def pids(self) -> list[int]:
        """Every process in it but the one that holds it, as the test numbers them."""
        mine = os.readlink(f"/proc/{self._holder.pid}/ns/pid")
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                inside = os.readlink(f"/proc/{name}/ns/pid") == mine
            except OSError:
                continue
            if inside and int(name) != self._holder.pid:
                found.append(int(name))
        return sorted(found)

    def kill_all(self) -> None:
        """What a container runtime does when a container's main process has ended."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """End the namespaces and all that runs in them."""
        self._holder.close()
