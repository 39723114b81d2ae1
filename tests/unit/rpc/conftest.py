from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import RpcMetrics
from kvbraid.v1 import decode_pb2, decode_pb2_grpc, kv_transfer_pb2, kv_transfer_pb2_grpc

DECODE = "kvbraid.v1.DecodeService"


class ScriptedDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Runs what a test puts in: `on_abort(request)` and `on_decode(request)`."""

    def __init__(self) -> None:
        self.on_abort: Callable[[Any], Any] = lambda _: decode_pb2.AbortResponse(found=True)
        self.on_decode: Callable[[Any], AsyncIterator[Any]] | None = None
        self.unwound = asyncio.Event()

    async def Abort(self, request: Any, context: Any) -> Any:
        return self.on_abort(request)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        assert self.on_decode is not None
        try:
            async for answer in self.on_decode(request):
                yield answer
        finally:
            self.unwound.set()


class CountingTransfer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Push counts frames; PushShared echoes a number through context.write."""

    async def Push(self, request_iterator: Any, context: Any) -> Any:
        count = 0
        async for _ in request_iterator:
            count += 1
        return kv_transfer_pb2.PushResponse(num_rows=count)

    async def PushShared(self, request_iterator: Any, context: Any) -> None:
        async for request in request_iterator:
            await context.write(
                kv_transfer_pb2.PushSharedResponse(free_slots=[request.num_slots_wanted])
            )


class Loopback:
    """A started server with both servicers and a pool that reaches it."""

    def __init__(self, server: RpcServer, registry: CollectorRegistry) -> None:
        self.server = server
        self.registry = registry
        self.decode = ScriptedDecode()
        self.pool = ChannelPool(server.settings)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.pool.channel(self.server.address)

    @property
    def stub(self) -> Any:
        return decode_pb2_grpc.DecodeServiceStub(self.channel)

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def drain_seconds() -> float:
    return 5.0


@pytest.fixture
async def loopback(drain_seconds: float) -> AsyncIterator[Loopback]:
    registry = CollectorRegistry()
    server = RpcServer(
        role="decode",
        settings=ServerSettings(drain_seconds=drain_seconds),
        metrics=RpcMetrics(registry),
    )
    running = Loopback(server, registry)
    server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, running.decode, DECODE)
    server.add(
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
        CountingTransfer(),
        "kvbraid.v1.KvTransferService",
    )
    await server.start()
    await server.set_serving(True)
    yield running
    await running.pool.close()
    await server.stop()
