from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbraid.errors import StartupError
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.testing.loopback import has_ipv6

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def server_on(**settings: Any) -> RpcServer:
    return RpcServer(
        role="decode", settings=ServerSettings(**settings), metrics=WorkerMetrics("decode").rpc
    )


async def is_reached(address: str) -> bool:
    async with ChannelPool(ServerSettings()) as pool:
        stub = health_pb2_grpc.HealthStub(pool.channel(address))
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="live"), timeout=10)
        return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_server_on_ipv6_is_reached_at_the_address_it_gives(host: str) -> None:
    server = server_on(host=host, health_port=0)
    await server.start()
    try:
        assert server.address == f"[::1]:{server.port}"
        assert await is_reached(server.address)
        assert await is_reached(server.ready_report(metrics="").health)
    finally:
        await server.stop()


async def test_every_address_is_both_families_and_the_advertised_one_gets_its_brackets() -> None:
    server = server_on(host="::", advertise_host="::1")
    await server.start()
    try:
        assert server.address == f"[::1]:{server.port}"
        assert await is_reached(server.address)
        assert await is_reached(f"127.0.0.1:{server.port}")
    finally:
        await server.stop()


async def test_a_taken_ipv6_port_is_named_with_its_brackets() -> None:
    first = server_on(host="::1")
    await first.start()
    second = server_on(host="::1", port=first.port)
    try:
        with pytest.raises(StartupError, match=rf"cannot listen on \[::1\]:{first.port}"):
            await second.start()
    finally:
        await first.stop()


async def test_nobody_listens_on_the_other_family() -> None:
    server = server_on(host="::1")
    await server.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError):
            await is_reached(f"127.0.0.1:{server.port}")
    finally:
        await server.stop()
