from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvbraid.errors import DeadlineError
from kvbraid.rpc.deadline import remaining_seconds
from kvbraid.telemetry.context import current_request_id
from kvbraid.v1 import decode_pb2, generation_pb2


async def endless(_: Any) -> AsyncIterator[Any]:
    yield decode_pb2.DecodeResponse(num_cached_tokens=1)
    await asyncio.Event().wait()


async def flood(_: Any) -> AsyncIterator[Any]:
    while True:
        yield decode_pb2.DecodeResponse(num_cached_tokens=1)


@pytest.mark.parametrize("behaviour", [endless, flood])
async def test_client_cancel_unwinds_the_handler_at_once(loopback: Any, behaviour: Any) -> None:
    loopback.decode.on_decode = behaviour
    call = loopback.stub.Decode(decode_pb2.DecodeRequest(), timeout=30)
    await call.read()
    call.cancel()
    async with asyncio.timeout(2):
        await loopback.decode.unwound.wait()
    await loopback.server.drain()
    labels = {"method": "/kvbraid.v1.DecodeService/Decode", "code": "CANCELLED"}
    assert loopback.sample("kvbraid_rpc_requests_total", **labels) == 1


async def test_deadline_ends_the_call_and_unwinds_the_handler(loopback: Any) -> None:
    loopback.decode.on_decode = endless
    call = loopback.stub.Decode(decode_pb2.DecodeRequest(), timeout=0.2)
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(2):
        await loopback.decode.unwound.wait()


async def test_handler_knows_the_request_id_of_metadata_or_message(loopback: Any) -> None:
    seen = []

    def remember(_: Any) -> Any:
        seen.append(current_request_id())
        return decode_pb2.AbortResponse()

    loopback.decode.on_abort = remember
    request = decode_pb2.AbortRequest(ref=generation_pb2.RequestRef(request_id="from-message"))
    await loopback.stub.Abort(request, timeout=5)
    await loopback.stub.Abort(request, timeout=5, metadata=(("x-request-id", "from-metadata"),))
    await loopback.stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    assert seen == ["from-message", "from-metadata", ""]


class Clock:
    def __init__(self, remaining: float | None) -> None:
        self._remaining = remaining

    def time_remaining(self) -> float | None:
        return self._remaining


@pytest.mark.parametrize(
    ("client", "limit", "expected"), [(None, 60.0, 60.0), (3.0, 60.0, 3.0), (90.0, 60.0, 60.0)]
)
def test_remaining_seconds_is_the_tighter_of_client_and_limit(
    client: float | None, limit: float, expected: float
) -> None:
    assert remaining_seconds(Clock(client), limit) == expected


@pytest.mark.parametrize("client", [0.0, -0.5])
def test_remaining_seconds_refuses_a_passed_deadline(client: float) -> None:
    with pytest.raises(DeadlineError):
        remaining_seconds(Clock(client), 60.0)
