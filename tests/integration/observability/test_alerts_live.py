"""Faults of a real cluster fire their alerts in Prometheus: every alert with `for` up to two
minutes that test_dashboards_live does not see. Minutes: `make test-alerts`."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from kvbraid.cluster.child import Child
from kvbraid.cluster.local_cluster import SERVICE_COMMANDS, ClusterSpec
from kvbraid.cluster.worker_spec import WorkerSpec
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2
from tests.integration.observability.idle_prefill import IdlePrefill
from tests.integration.observability.watched import (
    DRAFTER,
    NEEDS_PROMETHEUS,
    SMALL,
    TINY_MLA,
    Watched,
    await_data,
    await_firing,
    prometheus_of,
    watched_cluster,
)
from tools.process_growth import family

pytestmark = [NEEDS_PROMETHEUS, pytest.mark.slow, pytest.mark.timeout(300)]

POOL = f"kv_cache_tokens=4096,{SMALL}"
WARM_S = 8.0


def spec(decode: str, *coordinator: str, draft: bool = False) -> ClusterSpec:
    service = WorkerSpec.parse("draft", f"drafter={DRAFTER},draft_kv_tokens=8192")
    return ClusterSpec(
        model=str(TINY_MLA),
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{POOL}"),),
        decode=(WorkerSpec.parse("decode", decode),),
        draft=(service,) if draft else (),
        coordinator=("--poll-seconds=0.2", "--served-model-name=tiny", *coordinator),
        drain_seconds=3.0,
    )


@contextmanager
def stuttering(watched: Watched, name: str, stop_s: float, run_s: float) -> Iterator[None]:
    """The process stands still again and again."""
    ending = threading.Event()

    def stutter() -> None:
        while not ending.wait(run_s):
            watched.signal(name, signal.SIGSTOP)
            ending.wait(stop_s)
            watched.signal(name, signal.SIGCONT)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def test_a_lost_draft_service_then_a_lost_prefill_worker(tmp_path: Path) -> None:
    cluster = spec(f"tp=1,dcp=1,draft_policy=fixed,{POOL}", draft=True)
    with watched_cluster(tmp_path, cluster) as watched, watched.load():
        time.sleep(WARM_S)
        watched.signal("draft-0", signal.SIGSTOP)
        await_firing(watched.prometheus, {"KVBraidDraftsMissing"})
        watched.signal("prefill-0", signal.SIGKILL)
        await_firing(watched.prometheus, {"KVBraidPrefillFallback", "KVBraidWorkerDown"})


def test_a_prefill_worker_that_freezes_again_and_again(tmp_path: Path) -> None:
    with (
        watched_cluster(tmp_path, spec(f"tp=1,dcp=1,{POOL}")) as watched,
        watched.load(),
        stuttering(watched, "prefill-0", 5.0, 3.0),
    ):
        await_firing(watched.prometheus, {"KVBraidRetriesHigh"}, 120)


def test_a_decode_worker_that_stutters(tmp_path: Path) -> None:
    with (
        watched_cluster(tmp_path, spec(f"tp=1,dcp=1,{POOL}")) as watched,
        watched.load(),
        stuttering(watched, "decode-0", 0.6, 0.05),
    ):
        wanted = {"KVBraidEventLoopBlocked", "KVBraidInterTokenBudgetFast"}
        await_firing(watched.prometheus, wanted, 120)


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    with watched_cluster(tmp_path, spec(f"tp=2,dcp=2,{POOL}")) as watched, watched.load():
        time.sleep(WARM_S)
        leader, rank, *_ = family(watched.cluster.children["decode-0"].pid)
        assert leader != rank
        os.kill(rank, signal.SIGSTOP)
        await_firing(watched.prometheus, {"KVBraidRankMissing", "KVBraidEngineStuck"})


def test_handoffs_that_never_come_hold_the_pool(tmp_path: Path) -> None:
    decode = f"tp=1,dcp=1,kv_cache_tokens=1024,lease_seconds=15,{SMALL}"
    with (
        watched_cluster(tmp_path, spec(decode, "--max-queued-requests=2")) as watched,
        IdlePrefill(watched.cluster.workers["decode-0"].grpc) as idle,
        crowd(watched),
    ):
        time.sleep(WARM_S)
        for _ in range(6):
            idle.take_grant(16)
        idle.take_grant(900)
        wanted = {
            "KVBraidKvPoolFull", "KVBraidHandoffsFailing", "KVBraidRequestsRefused",
            "KVBraidTtftBudgetFast",
        }  # fmt: skip
        await_firing(watched.prometheus, wanted)


def test_a_damaged_row(tmp_path: Path) -> None:
    with (
        watched_cluster(tmp_path, spec(f"tp=1,dcp=1,{POOL}")) as watched,
        IdlePrefill(watched.cluster.workers["decode-0"].grpc) as idle,
    ):
        # A counter that was never seen at 0 does not increase.
        await_data(watched.prometheus, 'kvbraid_handoff_failures_total{instance="decode-0"} == 0')
        call, grant = idle.take_grant(40)
        idle.send_damaged(grant)
        with pytest.raises(grpc.RpcError) as lost:
            list(call)
        assert lost.value.code() is grpc.StatusCode.DATA_LOSS  # type: ignore[attr-defined]
        await_firing(watched.prometheus, {"KVBraidKvDataLoss"}, 30)


def test_a_coordinator_that_restarts_and_then_is_gone(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *SERVICE_COMMANDS["coordinator"], f"--model={TINY_MLA}", f"--metrics-port={port}",
        "--prefill-workers=127.0.0.1:9", "--decode-workers=127.0.0.1:9",
    ]  # fmt: skip
    with prometheus_of(tmp_path, {"coordinator": f"127.0.0.1:{port}"}) as prometheus:
        for start in range(4):
            child = Child("coordinator", command, tmp_path)
            # Scraped, and not the process before it.
            started = f"process_start_time_seconds > {time.time() - 1}"
            await_data(prometheus, started)
            if start < 3:
                child.kill()
        await_firing(prometheus, {"KVBraidRestarting"}, 30)
        child.kill()
        await_firing(prometheus, {"KVBraidNoCoordinator"}, 30)


@contextmanager
def crowd(watched: Watched, num_clients: int = 30) -> Iterator[None]:
    """More clients than a small decode worker has room for; what they are refused is wanted."""
    ending = threading.Event()

    def ask() -> None:
        request = coordinator_pb2.GenerateRequest(
            prompt_ids=coordinator_pb2.TokenIds(ids=range(5, 105)),
            sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=8),
        )
        with grpc.insecure_channel(watched.cluster.coordinator.grpc) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            while not ending.wait(0.2):
                try:
                    list(stub.Generate(request, timeout=60))
                except grpc.RpcError:
                    ending.wait(0.5)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()
