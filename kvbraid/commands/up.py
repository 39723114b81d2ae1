"""`kvbraid up`: all services on this machine, until Ctrl-C or until one of them dies."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from types import FrameType

from kvbraid.cluster import ClusterSpec, LocalCluster, WorkerSpec
from kvbraid.commands.model_path import resolve_model
from kvbraid.commands.tls_flags import add_service_tls_arguments, service_flags

_CHECK_S = 0.1
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--model", required=True, help="folder, GGUF file or pulled model's name")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            action="append",
            metavar="KEY=VALUE,...",
            default=argparse.SUPPRESS,
            help=f"a {role} worker: tp=2,dcp=2 or any of its settings, as page_size=4; "
            "repeat for several [default: tp=1,dcp=1]",
        )
    parser.add_argument(
        "--drafter", metavar="DIR", default="", help="drafter that every worker runs itself"
    )
    parser.add_argument(
        "--draft",
        action="append",
        metavar="drafter=DIR,...",
        default=argparse.SUPPRESS,
        help="a draft service for the decode workers: its drafter and any of its settings, as "
        "device=cpu; repeat for several [default: none]",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address that everything listens on")
    parser.add_argument(
        "--grpc-port", type=int, metavar="PORT", default=0, help="coordinator's gRPC port; 0: any"
    )
    parser.add_argument(
        "--http-port", type=int, metavar="PORT", default=0, help="coordinator's HTTP port; 0: any"
    )
    parser.add_argument(
        "--drain-seconds", type=float, metavar="S", default=10.0, help="seconds to finish requests"
    )
    parser.add_argument(
        "--start-seconds", type=float, metavar="S", default=600.0, help="seconds to get ready"
    )
    parser.add_argument(
        "--log-level", default="info", choices=LOG_LEVELS, help="least severe record written"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="folder for logs [a temporary one]")
    parser.add_argument("--json", action="store_true", help="print the ready line as JSON")
    add_service_tls_arguments(parser)


def cluster_spec(arguments: argparse.Namespace) -> ClusterSpec:
    """What the flags ask for. Raises ConfigError or NotFoundError."""

    def workers(role: str, default: tuple[str, ...] = ("tp=1,dcp=1",)) -> tuple[WorkerSpec, ...]:
        texts = getattr(arguments, role, None) or default
        return tuple(WorkerSpec.parse(role, text) for text in texts)

    return ClusterSpec(
        model=str(resolve_model(arguments.model)),
        prefill=workers("prefill"),
        decode=workers("decode"),
        draft=workers("draft", ()),
        drafter=arguments.drafter,
        coordinator=(f"--port={arguments.grpc_port}", f"--http-port={arguments.http_port}"),
        everyone=(
            f"--host={arguments.host}",
            f"--log-level={arguments.log_level}",
            *service_flags(arguments),
        ),
        drain_seconds=arguments.drain_seconds,
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. Raises ChildError, hence exit code 1, when a process dies."""
    return serve_cluster(
        LocalCluster(cluster_spec(arguments), arguments.log_dir),
        start_seconds=arguments.start_seconds,
        as_json=arguments.json,
    )


def serve_cluster(cluster: LocalCluster, *, start_seconds: float, as_json: bool) -> int:
    """Start `cluster`, say so in one line on stdout, wait for a signal, stop it, return 0.

    Raises ChildError when one of its processes ends by itself; the others are stopped.
    """
    signals = StopSignals()
    try:
        cluster.start(timeout_s=start_seconds, progress=_say, is_stopping=signals.is_stopping)
        print(ready_line(cluster, as_json=as_json), flush=True)
        while not signals.is_stopping():
            cluster.check()
            time.sleep(_CHECK_S)
        _say("stopping; once more to stop at once")
    finally:
        cluster.stop(signals.is_impatient)
    return 0


def ready_line(cluster: LocalCluster, *, as_json: bool) -> str:
    """The one line that says everything serves and where."""
    coordinator = cluster.coordinator
    reports = {"coordinator": coordinator, **cluster.workers}
    if as_json:
        return json.dumps(
            {
                "grpc": coordinator.grpc,
                "http": coordinator.http,
                "metrics": {name: report.metrics for name, report in reports.items()},
                "workers": {name: report.grpc for name, report in cluster.workers.items()},
                "pids": {name: report.pid for name, report in reports.items()},
                "logs": str(cluster.log_directory),
            }
        )
    metrics = " ".join(f"{name}=http://{r.metrics}/metrics" for name, r in reports.items())
    scheme = "https" if coordinator.tls else "http"
    return (
        f"ready: gRPC {coordinator.grpc}, OpenAI API {scheme}://{coordinator.http}/v1, "
        f"metrics {metrics}, logs {cluster.log_directory}"
    )


class StopSignals:
    """SIGINT and SIGTERM from now on: the first asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self._num_received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, _: int, __: FrameType | None) -> None:
        # Counted and no more: an Event taken here while the main thread holds its lock deadlocks.
        self._num_received += 1

    def is_stopping(self) -> bool:
        """Whether one came."""
        return self._num_received > 0

    def is_impatient(self) -> bool:
        """Whether a second one came."""
        return self._num_received > 1


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
