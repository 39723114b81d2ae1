"""Connections with old credentials end with their last call, not before and not much later."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvbraid.rpc.renewed_channel import RenewedChannel
from kvbraid.v1 import decode_pb2, decode_pb2_grpc


class Credentials:
    """Something that changes, and the channels made with it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.made: list[grpc.aio.Channel] = []
        self.current = object()

    def open(self) -> RenewedChannel[object]:
        return RenewedChannel(lambda: self.current, self._make)

    def renew(self) -> None:
        self.current = object()

    def closed(self) -> list[bool]:
        return [channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in self.made]

    def _make(self, credentials: object) -> grpc.aio.Channel:
        assert credentials is self.current
        self.made.append(grpc.aio.insecure_channel(self._address))
        return self.made[-1]


@pytest.fixture
def credentials(loopback: Any) -> Credentials:
    return Credentials(loopback.server.address)


async def abort(channel: grpc.aio.Channel) -> None:
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    await stub.Abort(decode_pb2.AbortRequest(), timeout=5)


async def until_closed(credentials: Credentials, expected: list[bool]) -> None:
    async with asyncio.timeout(5):
        while True:
            if credentials.closed() == expected:
                return
            await asyncio.sleep(0)


async def start_stream(loopback: Any, channel: grpc.aio.Channel) -> tuple[asyncio.Event, Any]:
    """A call that ends when the event is set."""
    ended = asyncio.Event()

    async def answers(_: Any) -> Any:
        yield decode_pb2.DecodeResponse(num_cached_tokens=1)
        await ended.wait()

    loopback.decode.on_decode = answers
    call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest(), timeout=20)
    await call.read()
    return ended, call


async def test_nothing_changes_while_the_credentials_do_not(credentials: Credentials) -> None:
    async with credentials.open() as channel:
        for _ in range(3):
            await abort(channel)
        assert len(credentials.made) == 1


async def test_an_idle_connection_is_closed_at_the_next_call(credentials: Credentials) -> None:
    async with credentials.open() as channel:
        await abort(channel)
        credentials.renew()
        await abort(channel)
        await until_closed(credentials, [True, False])
    assert credentials.closed() == [True, True]


async def test_a_stream_keeps_its_connection_to_its_end(
    loopback: Any, credentials: Credentials
) -> None:
    async with credentials.open() as channel:
        ended, call = await start_stream(loopback, channel)
        credentials.renew()
        await abort(channel)
        credentials.renew()
        await abort(channel)
        await until_closed(credentials, [False, True, False])
        ended.set()
        assert await call.read() is grpc.aio.EOF
        await until_closed(credentials, [True, True, False])


async def test_a_cancelled_stream_is_over_too(loopback: Any, credentials: Credentials) -> None:
    async with credentials.open() as channel:
        _, call = await start_stream(loopback, channel)
        credentials.renew()
        await abort(channel)
        call.cancel()
        await until_closed(credentials, [True, False])


async def test_closing_ends_the_calls_of_old_connections(
    loopback: Any, credentials: Credentials
) -> None:
    channel = credentials.open()
    _, call = await start_stream(loopback, channel)
    credentials.renew()
    await abort(channel)
    await channel.close()
    assert await call.code() is grpc.StatusCode.CANCELLED
    assert credentials.closed() == [True, True]
