from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvbraid.errors import StartupError, UnavailableError
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.rpc.lifecycle import EXIT_FAILED, run_until_signal
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.v1 import decode_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Gate:
    """A Decode that answers once, then ends when opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, _: Any) -> AsyncIterator[Any]:
        yield decode_pb2.DecodeResponse(num_cached_tokens=1)
        await self.opened.wait()
        yield decode_pb2.DecodeResponse(num_cached_tokens=2)


async def start_decode(loopback: Any) -> tuple[Gate, Any]:
    gate = Gate()
    loopback.decode.on_decode = gate
    call = loopback.stub.Decode(decode_pb2.DecodeRequest(), timeout=30)
    await call.read()
    return gate, call


async def call_until_refused(loopback: Any) -> None:
    while True:
        with translated_rpc_errors("p"):
            call = loopback.stub.Decode(decode_pb2.DecodeRequest(), timeout=5)
            await call.read()
            call.cancel()


async def wait_refusing(loopback: Any) -> None:
    with pytest.raises(UnavailableError, match="draining"):
        await call_until_refused(loopback)


@pytest.mark.parametrize("service", ["", "decode"])
async def test_health_follows_the_role_through_check_and_watch(loopback: Any, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(loopback.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    assert (await stub.Check(request, timeout=5)).status == SERVING
    watch = stub.Watch(request, timeout=10)
    assert (await watch.read()).status == SERVING
    await loopback.server.set_serving(False)
    assert (await watch.read()).status == NOT_SERVING
    await loopback.server.set_serving(True)
    assert (await watch.read()).status == SERVING
    assert await loopback.server.drain()
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_a_process_is_live_whether_it_serves_or_not(loopback: Any) -> None:
    stub = health_pb2_grpc.HealthStub(loopback.channel)
    request = health_pb2.HealthCheckRequest(service="live")
    watch = stub.Watch(request, timeout=10)
    assert (await watch.read()).status == SERVING
    await loopback.server.set_serving(False)
    assert await loopback.server.drain()
    assert (await stub.Check(request, timeout=5)).status == SERVING
    await loopback.server.set_live(False)
    assert (await watch.read()).status == NOT_SERVING
    await loopback.server.set_live(True)
    assert (await watch.read()).status == SERVING
    watch.cancel()


async def test_nothing_serves_again_after_a_drain(loopback: Any) -> None:
    assert await loopback.server.drain()
    await loopback.server.set_serving(True)
    request = health_pb2.HealthCheckRequest(service="decode")
    answer = await health_pb2_grpc.HealthStub(loopback.channel).Check(request, timeout=5)
    assert answer.status == NOT_SERVING


async def test_server_listens_before_it_serves() -> None:
    server = RpcServer(
        role="prefill", settings=ServerSettings(), metrics=WorkerMetrics("prefill").rpc
    )
    await server.start()
    async with asyncio.timeout(5):
        async with ChannelPool(server.settings) as pool:
            stub = health_pb2_grpc.HealthStub(pool.channel(server.address))
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="prefill"), timeout=5)
            assert answer.status == NOT_SERVING
    await server.stop()


async def test_drain_finishes_running_calls_and_refuses_new_ones(loopback: Any) -> None:
    gate, call = await start_decode(loopback)
    drain = asyncio.create_task(loopback.server.drain())
    await wait_refusing(loopback)
    assert not drain.done()
    gate.opened.set()
    assert (await call.read()).num_cached_tokens == 2
    assert await drain


async def test_draining_still_takes_kv_of_admitted_requests_and_aborts(loopback: Any) -> None:
    gate, call = await start_decode(loopback)
    drain = asyncio.create_task(loopback.server.drain())
    await wait_refusing(loopback)
    transfer = kv_transfer_pb2_grpc.KvTransferServiceStub(loopback.channel)
    assert (await transfer.Push(iter([kv_transfer_pb2.PushRequest()]), timeout=5)).num_rows == 1
    assert (await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)).found
    gate.opened.set()
    assert await drain
    call.cancel()


@pytest.mark.parametrize("drain_seconds", [0.05])
async def test_drain_gives_up_after_its_time_and_stop_unwinds_the_rest(loopback: Any) -> None:
    await start_decode(loopback)
    assert not await loopback.server.drain()
    await loopback.server.stop()
    assert loopback.decode.unwound.is_set()


async def test_reflection_lists_our_services(loopback: Any) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(loopback.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]), timeout=5)
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"kvbraid.v1.DecodeService", "grpc.health.v1.Health"} <= names
    call.cancel()


async def test_taken_port_is_a_startup_error(loopback: Any) -> None:
    second = RpcServer(
        role="decode",
        settings=ServerSettings(port=loopback.server.port),
        metrics=WorkerMetrics("decode").rpc,
    )
    with pytest.raises(StartupError, match=str(loopback.server.port)):
        await second.start()


async def test_sigterm_drains_then_exits_with_zero(loopback: Any) -> None:
    gate, call = await start_decode(loopback)
    order: list[str] = []

    async def close_leases() -> None:
        order.append("leases")

    running = asyncio.create_task(run_until_signal(loopback.server, drained=close_leases))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await wait_refusing(loopback)
    assert order == []
    gate.opened.set()
    assert (await call.read()).num_cached_tokens == 2
    assert await running == 0
    assert order == ["leases"]


async def test_second_signal_stops_at_once(loopback: Any) -> None:
    await start_decode(loopback)
    running = asyncio.create_task(run_until_signal(loopback.server))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await wait_refusing(loopback)
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(3):
        assert await running == 0
        await loopback.decode.unwound.wait()


async def test_worker_failure_stops_with_its_own_exit_code(
    loopback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failure = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_until_signal(loopback.server, failure=failure))
    failure.set_result("rank 1 is gone")
    assert await running == EXIT_FAILED
    assert "rank 1 is gone" in caplog.text
