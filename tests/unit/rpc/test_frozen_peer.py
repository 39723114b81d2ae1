from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.ready import read_ready
from kvbraid.settings import ServerSettings

SERVER = """
import asyncio, os, sys
from kvbraid.rpc.lifecycle import run_until_signal
from kvbraid.rpc.ready import ReadyReport, write_ready
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import WorkerMetrics

async def serve():
    metrics = WorkerMetrics("decode").rpc
    server = RpcServer(role="decode", settings=ServerSettings(), metrics=metrics)
    await server.start()
    write_ready(sys.argv[1], ReadyReport("decode", os.getpid(), server.address, ""))
    return await run_until_signal(server)

sys.exit(asyncio.run(serve()))
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    ready = tmp_path / "ready"
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(ready)])
    give_up = time.monotonic() + 30
    report = read_ready(ready)
    while report is None and time.monotonic() < give_up:
        report = read_ready(ready)
    assert report is not None
    yield process, report.grpc
    process.kill()
    process.wait()


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "killed"])
async def test_silent_stream_to_a_lost_peer_fails_within_three_seconds(
    peer: tuple[subprocess.Popen[bytes], str], is_frozen: bool
) -> None:
    process, address = peer
    async with ChannelPool(ServerSettings()) as pool:
        stub: Any = health_pb2_grpc.HealthStub(pool.channel(address))
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="decode"), timeout=60)
        await watch.read()
        process.send_signal(signal.SIGSTOP if is_frozen else signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(10):
                await watch.read()
        assert time.monotonic() - started < 3.0
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_silent_peer_that_answers_pings_is_kept(
    peer: tuple[subprocess.Popen[bytes], str],
) -> None:
    _, address = peer
    quick = ServerSettings(keepalive_seconds=0.2, keepalive_timeout_seconds=1.0)
    async with ChannelPool(quick) as pool:
        stub: Any = health_pb2_grpc.HealthStub(pool.channel(address))
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="decode"), timeout=60)
        await watch.read()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await watch.read()
