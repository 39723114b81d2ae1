"""Prefill workers, decode workers, draft services and a coordinator on this machine.

spec = ClusterSpec(model="models/smollm2", decode=(WorkerSpec.parse("decode", "tp=2,dcp=2"),))
with LocalCluster(spec) as cluster:
    cluster.start(timeout_s=120)
    cluster.coordinator.grpc, cluster.coordinator.http, cluster.workers["decode-0"].metrics
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvbraid.cluster.child import Child
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.errors import ConfigError, UnavailableError
from kvbraid.rpc.ready import ReadyReport
from kvbraid.settings.openmp import with_brief_spinning

SERVICE_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "prefill": (sys.executable, "-m", "prefill_service"),
    "decode": (sys.executable, "-m", "decode_service"),
    "draft": (sys.executable, "-m", "draft_service"),
    "coordinator": (sys.executable, "-m", "coordinator"),
}
_POLL_S = 0.02
_COORDINATOR = "coordinator"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start.

    drafter: checkpoint that every worker runs itself, "" for none. draft: services that draft
    instead; worker n of a role gets service n modulo their number. coordinator, everyone: more
    flags for the coordinator and for all. commands: how a role is run. Raises ConfigError for
    drafter and draft at once, and for a draft service without a drafter.
    """

    model: str
    prefill: tuple[WorkerSpec, ...] = (WorkerSpec("prefill", ()),)
    decode: tuple[WorkerSpec, ...] = (WorkerSpec("decode", ()),)
    draft: tuple[WorkerSpec, ...] = ()
    drafter: str = ""
    coordinator: tuple[str, ...] = ()
    everyone: tuple[str, ...] = ()
    drain_seconds: float = 10.0
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SERVICE_COMMANDS)

    def __post_init__(self) -> None:
        if self.drafter and self.draft:
            raise ConfigError("accepted: a drafter in the workers or draft services, not both")
        for service in self.draft:
            service.option("drafter")


class LocalCluster:
    """The processes of a ClusterSpec. They end with this process, however it ends."""

    def __init__(self, spec: ClusterSpec, log_directory: str | Path | None = None) -> None:
        """Logs go to `log_directory`; without one they go to a temporary one, kept on failure."""
        self._spec = spec
        self._is_temporary = log_directory is None
        self.log_directory = Path(log_directory or tempfile.mkdtemp(prefix="kvbraid-"))
        self.log_directory.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, Child] = {}
        self._reports: dict[str, ReadyReport] = {}

    @property
    def coordinator(self) -> ReadyReport:
        """Where the coordinator serves."""
        return self._reports[_COORDINATOR]

    @property
    def workers(self) -> Mapping[str, ReadyReport]:
        """Where each worker and draft service serves, by name: prefill-0, decode-0, draft-0 ..."""
        return {name: report for name, report in self._reports.items() if name != _COORDINATOR}

    def start(
        self,
        *,
        timeout_s: float,
        progress: Progress = lambda _: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start draft services, the workers, then the coordinator; returns once all of them serve.

        Raises ChildError when one ends, UnavailableError after `timeout_s` or when `is_stopping`
        turns true.
        """
        give_up = time.monotonic() + timeout_s
        for index, service in enumerate(self._spec.draft):
            self._spawn(f"draft-{index}", service.role, service.flags())
        self._await_ready(give_up, progress, is_stopping)
        for workers in (self._spec.prefill, self._spec.decode):
            for index, worker in enumerate(workers):
                flags = [*self._drafting(index), *worker.flags()]
                self._spawn(f"{worker.role}-{index}", worker.role, flags)
        self._await_ready(give_up, progress, is_stopping)
        self._spawn(_COORDINATOR, _COORDINATOR, [*self._targets(), *self._spec.coordinator])
        self._await_ready(give_up, progress, is_stopping)

    def check(self) -> None:
        """Raise ChildError when a process has ended."""
        for child in self.children.values():
            child.check()

    def stop(self, is_impatient: Callable[[], bool] = lambda: False) -> bool:
        """End everything, the coordinator first so that running requests can finish.

        Each part gets the drain budget, then SIGKILL; `is_impatient` turning true kills at once.
        Returns whether every process was alive and then ended by itself.
        """
        was_healthy = all(child.is_running for child in self.children.values())
        coordinator = [c for n, c in self.children.items() if n == _COORDINATOR]
        workers = [c for n, c in self.children.items() if n != _COORDINATOR]
        ended = [self._stop_part(part, is_impatient) for part in (coordinator, workers)]
        self.children.clear()
        is_clean = was_healthy and all(ended)
        if self._is_temporary and is_clean:
            shutil.rmtree(self.log_directory, ignore_errors=True)
        return is_clean

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, name: str, role: str, flags: Sequence[str]) -> None:
        own = [f"--model={self._spec.model}", f"--drain-seconds={self._spec.drain_seconds}"]
        command = [*self._spec.commands[role], *own, *self._spec.everyone, *flags]
        # A prefill worker's threads that wait for one another take the cores from decode, whose
        # steps clients wait for; its own products are too large to miss the microseconds.
        environment = with_brief_spinning() if role == "prefill" else None
        self.children[name] = Child(name, command, self.log_directory, environment)

    def _drafting(self, index: int) -> list[str]:
        """What tells worker `index` of a role where its drafts come from."""
        spec = self._spec
        if spec.drafter:
            return [f"--drafter={spec.drafter}"]
        if not spec.draft:
            return []
        number = index % len(spec.draft)
        address = self._reports[f"draft-{number}"].grpc
        checkpoint = spec.draft[number].option("drafter")
        return [f"--draft-worker={address}", f"--tap-fusion={checkpoint}"]

    def _targets(self) -> list[str]:
        def of(role: str) -> str:
            return ",".join(report.grpc for report in self.workers.values() if report.role == role)

        return [f"--prefill-workers={of('prefill')}", f"--decode-workers={of('decode')}"]

    def _await_ready(
        self, give_up: float, progress: Progress, is_stopping: Callable[[], bool]
    ) -> None:
        while waiting := [name for name in self.children if name not in self._reports]:
            for name in waiting:
                report = self.children[name].ready()
                if report is not None:
                    self._reports[name] = report
                    progress(f"{name} serves on {report.grpc}")
            self.check()
            if is_stopping():
                raise UnavailableError("stopped while starting")
            if time.monotonic() > give_up:
                raise UnavailableError(f"not ready in time: {', '.join(waiting)}")
            time.sleep(_POLL_S)
        # In the order of the spec, whoever was ready first.
        self._reports = {name: self._reports[name] for name in self.children}

    def _stop_part(self, part: Sequence[Child], is_impatient: Callable[[], bool]) -> bool:
        give_up = time.monotonic() + self._spec.drain_seconds + 2.0
        for child in part:
            child.terminate()
        while any(child.is_running for child in part):
            if is_impatient() or time.monotonic() > give_up:
                break
            time.sleep(_POLL_S)
        graceful = not any(child.is_running for child in part)
        for child in part:
            child.kill()
        return graceful
