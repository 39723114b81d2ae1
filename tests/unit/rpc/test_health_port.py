"""Probes that cannot speak TLS ask on a port that says how the process is and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvbraid.errors import StartupError
from kvbraid.rpc.health import LIVE
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.testing.certificates import CertificateAuthority
from kvbraid.v1 import info_pb2, info_pb2_grpc

SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"


class Info(info_pb2_grpc.InfoServiceServicer):
    async def Info(self, request: object, context: object) -> info_pb2.InfoResponse:
        return info_pb2.InfoResponse(role="decode")


def made(settings: ServerSettings) -> RpcServer:
    server = RpcServer(role="decode", settings=settings, metrics=WorkerMetrics("decode").rpc)
    server.add(info_pb2_grpc.add_InfoServiceServicer_to_server, Info(), "kvbraid.v1.InfoService")
    return server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RpcServer]:
    """Over mutual TLS, but for the health port."""
    tls = CertificateAuthority(tmp_path).mutual("decode")
    server = made(ServerSettings(health_port=0, tls=tls, drain_seconds=5.0))
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def probe(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    """As a kubelet: plaintext, no certificate."""
    async with grpc.aio.insecure_channel(server.ready_report(metrics="").health) as channel:
        yield channel


async def status(channel: grpc.aio.Channel, service: str) -> str:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def statuses(channel: grpc.aio.Channel) -> list[str]:
    return [await status(channel, service) for service in ("", "decode", LIVE)]


async def test_it_follows_the_process_from_start_to_drain(server: RpcServer) -> None:
    async with probe(server) as channel:
        assert await statuses(channel) == [NOT_SERVING, NOT_SERVING, SERVING]
        await server.set_serving(True)
        assert await statuses(channel) == [SERVING, SERVING, SERVING]
        await server.set_live(False)
        assert await status(channel, LIVE) == NOT_SERVING
        await server.set_live(True)
        await server.drain()
        assert await statuses(channel) == [NOT_SERVING, NOT_SERVING, SERVING]


async def test_it_offers_nothing_else(server: RpcServer) -> None:
    async with probe(server) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await info_pb2_grpc.InfoServiceStub(channel).Info(info_pb2.InfoRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([listing]), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_it_closes_with_the_server(server: RpcServer) -> None:
    async with probe(server) as channel:
        await status(channel, LIVE)
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await status(channel, LIVE)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_there_is_none_unless_it_is_asked_for() -> None:
    server = made(ServerSettings())
    await server.start()
    assert server.ready_report(metrics="").health == ""
    await server.stop()


async def test_a_taken_health_port_is_a_startup_error(server: RpcServer) -> None:
    second = made(ServerSettings(health_port=server.health_port))
    with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{server.health_port}"):
        await second.start()
    await second.stop()
