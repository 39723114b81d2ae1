"""A running pod: what a kubelet does with it from its creation to its end."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.cluster.node import Node
from tests.deploy.cluster.pod_spec import PodSpec
from tests.deploy.cluster.probe_loop import TIME_FACTOR, ProbeLoop
from tests.deploy.cluster.sandbox import Process, Sandbox

_TICK_S = 0.05
# CrashLoopBackOff: none the first time, then this.
_BACKOFF_S = 10 * TIME_FACTOR


@dataclass(frozen=True)
class Event:
    """What happened to a pod; at: monotonic seconds."""

    what: str
    at: float
    detail: str = ""


class Pod:
    """Runs in a thread of its own. changed: told whenever readiness or the end changes."""

    def __init__(
        self,
        spec: PodSpec,
        sandbox: Sandbox,
        node: Node,
        folder: Path,
        changed: Callable[[Pod, str], None],
    ) -> None:
        self.spec = spec
        self.sandbox = sandbox
        self.address = sandbox.address
        self.log = folder / "container.log"
        self.events: list[Event] = []
        self.is_ready = False
        self.num_restarts = 0
        self.process: Process | None = None
        self.gone = threading.Event()
        self.deleted = threading.Event()
        self._node = node
        self._changed = changed
        self._thread = threading.Thread(target=self._run, name=spec.name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def delete(self) -> None:
        """Ask for its end; `gone` is set after it."""
        self._note("deleted")
        self.deleted.set()
        self._changed(self, "deleted")

    def times(self, what: str) -> list[float]:
        """When that happened."""
        return [event.at for event in self.events if event.what == what]

    def _note(self, what: str, detail: str = "") -> None:
        self.events.append(Event(what, time.monotonic(), detail))

    def _run(self) -> None:
        for container in self.spec.spec.get("initContainers", []):
            self._run_to_end(container)
        while not self.deleted.is_set():
            self.process = self.sandbox.start(self.spec.container, self.log)
            self._note("started")
            self._watch(self.process)
            if not self.deleted.is_set():
                self._restart()
        self._set_ready(False)
        self.sandbox.close()
        self._note("gone")
        self.gone.set()
        self._changed(self, "gone")

    def _restart(self) -> None:
        self.num_restarts += 1
        self._changed(self, "restarted")
        if self.num_restarts > 1:
            self.deleted.wait(_BACKOFF_S)

    def _run_to_end(self, container: dict[str, Any]) -> None:
        process = self.sandbox.start(container, self.log)
        while process.exit_code() is None and not self.deleted.wait(_TICK_S):
            pass
        self._note("init", str(process.exit_code()))

    def _watch(self, process: Process) -> None:
        """Probe it until it has ended, and end it when the pod is deleted."""
        startup, ready, live = (self._probe(kind) for kind in ("startup", "readiness", "liveness"))
        self._set_ready(ready is None)
        while process.exit_code() is None:
            if self.deleted.is_set():
                self._terminate(process, ready)
                break
            if startup is not None and startup.state is not True:
                self._advance("startup", startup, process)
            else:
                self._advance("readiness", ready, process)
                self._advance("liveness", live, process)
            self.deleted.wait(_TICK_S)
        self._note("exited", str(process.outer.wait()))
        self.sandbox.kill_all()
        self._set_ready(False)

    def _probe(self, kind: str) -> ProbeLoop | None:
        spec = self.spec.probe(f"{kind}Probe")
        return ProbeLoop(spec, time.monotonic()) if spec is not None else None

    def _advance(self, kind: str, loop: ProbeLoop | None, process: Process) -> None:
        """Probe where it is time, and do what follows from the result."""
        if loop is None or not loop.is_due(time.monotonic()):
            return
        before = loop.state
        loop.take(self._execute(loop.spec))
        if loop.state != before:
            self._note(f"{kind} {'succeeded' if loop.state else 'failed'}", loop.last)
        if kind == "readiness":
            self._set_ready(loop.state is True)
        elif loop.state is False:
            self._note(f"killed: {kind} probe", loop.last)
            process.send(signal.SIGTERM)

    def _execute(self, spec: dict[str, Any]) -> str:
        if "exec" not in spec:
            return str(self._node.ask("probe", spec=spec, address=self.address))
        done = self.sandbox.popen(spec["exec"]["command"], stdout=subprocess.DEVNULL)
        try:
            code = done.wait(timeout=spec.get("timeoutSeconds", 1))
        except subprocess.TimeoutExpired:
            done.kill()
            return f"no answer in time, killed: {done.wait()}"
        return "" if code == 0 else f"exit code {code}"

    def _terminate(self, process: Process, ready: ProbeLoop | None) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace is over. Readiness is probed to the end."""
        sleep_s = self._pre_stop_s()
        grace_s = self.spec.spec["terminationGracePeriodSeconds"] - sleep_s * (1 - TIME_FACTOR)
        begin = time.monotonic()
        term_at, kill_at = begin + sleep_s * TIME_FACTOR, begin + grace_s
        told = killed = False
        while process.exit_code() is None:
            now = time.monotonic()
            if not told and now >= term_at:
                self._note("SIGTERM")
                process.send(signal.SIGTERM)
                told = True
            if not killed and now >= kill_at:
                self._note("SIGKILL")
                self.sandbox.kill_all()
                killed = True
            self._advance("readiness", ready, process)
            self.gone.wait(_TICK_S)

    def _pre_stop_s(self) -> float:
        hook = self.spec.container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        seconds: float = hook["sleep"]["seconds"]
        return seconds

    def _set_ready(self, is_ready: bool) -> None:
        if is_ready == self.is_ready:
            return
        self.is_ready = is_ready
        self._note("ready" if is_ready else "not ready")
        self._changed(self, "readiness")
