"""Faults of real clusters, and the alerts that each must fire.

A scenario is a generator. It yields the Prometheus that watches its cluster twice: first while all
is well, then once the fault is there; it ends the fault when it is closed.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from kvbraid.cluster.child import Child
from kvbraid.cluster.local_cluster import SERVICE_COMMANDS, ClusterSpec
from kvbraid.cluster.worker_spec import WorkerSpec
from tests.integration.observability.crowd import Crowd
from tests.integration.observability.idle_prefill import IdlePrefill
from tests.integration.observability.other_weights import copy_with_other_weights
from tests.integration.observability.stutter import stuttering
from tests.integration.observability.watched import (
    DRAFTER,
    LASTING,
    PATIENT,
    SMALL,
    TINY_MLA,
    await_data,
    await_firing,
    await_served,
    lasting_authority,
    prometheus_of,
    watched_cluster,
)
from tools.process_growth import family
from tools.prometheus_server import Prometheus

Phases = Generator[Prometheus, None, None]

POOL = f"kv_cache_tokens=4096,{SMALL}"
# The decode worker has room for many long prompts, the prefill worker for two.
ROOMY = f"kv_cache_tokens=131072,max_num_seqs=64,{SMALL}"
LEASE_S = 12


@dataclass(frozen=True)
class Scenario:
    """One fault. run: gets a folder for logs and data."""

    name: str
    alerts: frozenset[str]
    run: Callable[[Path], Phases]


SCENARIOS: list[Scenario] = []


def fires(*alerts: str) -> Callable[[Callable[[Path], Phases]], Callable[[Path], Phases]]:
    """Enters a scenario and what it fires, without the prefix of every alert."""

    def enter(run: Callable[[Path], Phases]) -> Callable[[Path], Phases]:
        names = frozenset(f"KVBraid{alert}" for alert in alerts)
        SCENARIOS.append(Scenario(run.__name__, names, run))
        return run

    return enter


def spec(*decode: str, coordinator: tuple[str, ...] = (), draft: bool = False) -> ClusterSpec:
    """One prefill worker, a decode worker for each text, and on demand a draft service."""
    service = WorkerSpec.parse("draft", f"drafter={DRAFTER},draft_kv_tokens=8192")
    return ClusterSpec(
        model=str(TINY_MLA),
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{POOL}"),),
        decode=tuple(WorkerSpec.parse("decode", text) for text in decode),
        draft=(service,) if draft else (),
        coordinator=("--poll-seconds=0.2", "--served-model-name=tiny", *coordinator),
        drain_seconds=3.0,
    )


@fires("DraftsMissing", "PrefillFallback", "WorkerDown")
def a_draft_service_hangs_and_a_prefill_worker_dies(folder: Path) -> Phases:
    cluster = spec(f"tp=1,dcp=1,draft_policy=fixed,{PATIENT},{POOL}", draft=True)
    with watched_cluster(folder, cluster) as watched, watched.load():
        await_served(watched.prometheus)
        yield watched.prometheus
        watched.signal("draft-0", signal.SIGSTOP)
        watched.signal("prefill-0", signal.SIGKILL)
        yield watched.prometheus


@fires("RetriesHigh")
def a_prefill_worker_freezes_again_and_again(folder: Path) -> Phases:
    # Without a fallback, so that requests wait for the worker that loses their leases.
    cluster = spec(f"tp=1,dcp=1,lease_seconds=1,{POOL}", coordinator=("--prefill-fallback=false",))
    with watched_cluster(folder, cluster) as watched, watched.load():
        await_served(watched.prometheus)
        yield watched.prometheus
        with stuttering(watched, "prefill-0", stop_s=3.0, run_s=1.0):
            yield watched.prometheus


@fires("EventLoopBlocked", "InterTokenBudgetFast")
def a_decode_worker_stutters(folder: Path) -> Phases:
    with watched_cluster(folder, spec(f"tp=1,dcp=1,{POOL}")) as watched, watched.load():
        await_served(watched.prometheus)
        yield watched.prometheus
        # More than a seventh of the gaps must be late: the quieter the machine, the more tokens
        # come in time between two pauses. Scrapes need their part of the runs as well.
        with stuttering(watched, "decode-0", stop_s=0.35, run_s=0.02):
            yield watched.prometheus


@fires("RankMissing", "EngineStuck")
def a_rank_hangs(folder: Path) -> Phases:
    # Heartbeats would end the worker first.
    cluster = spec(f"tp=2,dcp=2,heartbeat_seconds=600,{POOL}")
    # Rank 0 waits a second for the metrics of the other one, and Prometheus for those of rank 0.
    with watched_cluster(folder, cluster, scrape_s=4) as watched, watched.load():
        await_served(watched.prometheus)
        yield watched.prometheus
        leader, rank, *_ = family(watched.cluster.children["decode-0"].pid)
        assert leader != rank
        os.kill(rank, signal.SIGSTOP)
        yield watched.prometheus


@fires("KvPoolFull", "HandoffsFailing", "RequestsRefused", "TtftBudgetFast")
def handoffs_never_come(folder: Path) -> Phases:
    cluster = spec(
        f"tp=1,dcp=1,kv_cache_tokens=1024,lease_seconds={LEASE_S},{SMALL}",
        coordinator=("--max-queued-requests=2",),
    )
    with watched_cluster(folder, cluster) as watched, ExitStack() as stack:
        decode = watched.cluster.workers["decode-0"].grpc
        with Crowd(watched.cluster.coordinator.grpc, num_clients=2, num_prompt_tokens=100):
            await_served(watched.prometheus)
        yield watched.prometheus
        idle = stack.enter_context(IdlePrefill(decode))
        idle.hold([16] * 6 + [900])
        coordinator = watched.cluster.coordinator.grpc
        stack.enter_context(Crowd(coordinator, num_clients=30, num_prompt_tokens=100))
        yield watched.prometheus


@fires("KvDataLoss")
def a_row_is_damaged(folder: Path) -> Phases:
    with watched_cluster(folder, spec(f"tp=1,dcp=1,{POOL}")) as watched:
        # A counter that was never seen at 0 does not increase.
        await_data(watched.prometheus, 'kvbraid_handoff_failures_total{instance="decode-0"} == 0')
        yield watched.prometheus
        with IdlePrefill(watched.cluster.workers["decode-0"].grpc) as idle:
            call, grant = idle.take_grant(40)
            idle.send_damaged(grant)
            with pytest.raises(grpc.RpcError) as lost:
                list(call)
            assert lost.value.code() is grpc.StatusCode.DATA_LOSS  # type: ignore[attr-defined]
            yield watched.prometheus


@fires("PromptQueueLong")
def a_crowd_brings_long_prompts(folder: Path) -> Phases:
    with watched_cluster(folder, spec(f"tp=1,dcp=1,{ROOMY}")) as watched:
        coordinator = watched.cluster.coordinator.grpc
        with Crowd(coordinator, num_clients=1, num_prompt_tokens=100):
            await_served(watched.prometheus)
        yield watched.prometheus
        with Crowd(coordinator, num_clients=60, num_prompt_tokens=1500):
            yield watched.prometheus


@fires("IncompatibleWorker")
def a_worker_comes_back_with_other_weights(folder: Path) -> Phases:
    options = f"tp=1,dcp=1,{POOL}"
    with watched_cluster(folder, spec(options, options)) as watched, watched.load():
        await_served(watched.prometheus)
        yield watched.prometheus
        watched.cluster.children["decode-1"].kill()
        port = watched.cluster.workers["decode-1"].grpc.rpartition(":")[2]
        command = [
            *SERVICE_COMMANDS["decode"], *WorkerSpec.parse("decode", options).flags(),
            f"--model={copy_with_other_weights(TINY_MLA, folder / 'other')}", f"--port={port}",
        ]  # fmt: skip
        replaced = Child("replaced", command, folder)
        try:
            yield watched.prometheus
        finally:
            replaced.kill()


@fires("CertificateExpiring", "CertificateAlmostExpired", "RenewalRefused")
def certificates_are_renewed_for_hours_and_then_by_half(folder: Path) -> Phases:
    authority = lasting_authority(folder)
    tls = authority.mutual("service", ends=LASTING)
    expiry = 'kvbraid_tls_certificate_expiry_timestamp_seconds{setting="tls_certificate"}'
    with watched_cluster(folder, spec(f"tp=1,dcp=1,{POOL}"), tls=tls) as watched:
        everyone = len(watched.cluster.children)
        await_data(watched.prometheus, f"count({expiry}) == {everyone}")
        yield watched.prometheus
        authority.issue("service", ends=timedelta(hours=12))
        await_data(watched.prometheus, f"count({expiry} - time() < 86400) == {everyone}")
        Path(tls.tls_private_key).write_text("only the first ha")
        yield watched.prometheus


@fires("NoDecodeWorker", "WorkerDown", "ErrorBudgetFast")
def the_only_decode_worker_dies(folder: Path) -> Phases:
    with watched_cluster(folder, spec(f"tp=1,dcp=1,{POOL}")) as watched, watched.load():
        await_served(watched.prometheus)
        yield watched.prometheus
        watched.signal("decode-0", signal.SIGKILL)
        yield watched.prometheus


@fires("Restarting", "NoCoordinator")
def a_coordinator_restarts_and_then_is_gone(folder: Path) -> Phases:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *SERVICE_COMMANDS["coordinator"], f"--model={TINY_MLA}", f"--metrics-port={port}",
        "--prefill-workers=127.0.0.1:9", "--decode-workers=127.0.0.1:9",
    ]  # fmt: skip
    with ExitStack() as stack:
        child = stack.enter_context(_coordinator(command, folder))
        targets = {"coordinator": f"127.0.0.1:{port}"}
        prometheus = stack.enter_context(prometheus_of(folder, targets))
        await_data(prometheus, "process_start_time_seconds")
        yield prometheus
        for _ in range(3):
            # Every restart must be scraped: changes() counts what samples show.
            [(_, started_s)] = prometheus.query("process_start_time_seconds")
            child.kill()
            child = stack.enter_context(_coordinator(command, folder))
            await_data(prometheus, f"process_start_time_seconds > {started_s}")
        await_firing(prometheus, {"KVBraidRestarting"})
        child.kill()
        yield prometheus


@contextmanager
def _coordinator(command: list[str], folder: Path) -> Iterator[Child]:
    child = Child("coordinator", command, folder)
    try:
        yield child
    finally:
        child.kill()
