"""Streams of tokens whose reader falls behind: what is not read yet stays where it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvbraid.rpc.channels import ChannelPool, token_stream_options
from kvbraid.v1 import decode_pb2, decode_pb2_grpc, generation_pb2

MOST_UNREAD = 100


def message(*token_ids: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(chunk=generation_pb2.TokenChunk(token_ids=token_ids))


class Flood:
    """A worker that sends a token as soon as the one before it has gone."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def tokens(self, _: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        while True:
            self.num_sent += 1
            yield message(self.num_sent)


@pytest.fixture
async def stub(loopback: Any) -> AsyncIterator[decode_pb2_grpc.DecodeServiceAsyncStub]:
    async with ChannelPool(loopback.server.settings, token_stream_options()) as pool:
        yield decode_pb2_grpc.DecodeServiceStub(pool.channel(loopback.server.address))


async def stuck(flood: Flood, stub: Any) -> Any:
    """A call of which one message was read, once no more are sent."""
    call = stub.Decode(decode_pb2.DecodeRequest(), timeout=30)
    assert (await call.read()).chunk.token_ids == [1]
    num_before = 0
    while flood.num_sent > num_before:
        num_before = flood.num_sent
        await stub.Abort(decode_pb2.AbortRequest(), timeout=5)
    return call


async def test_few_messages_wait_for_a_reader_that_does_not_read(loopback: Any, stub: Any) -> None:
    flood = Flood()
    loopback.decode.on_decode = flood.tokens
    call = await stuck(flood, stub)
    assert flood.num_sent <= MOST_UNREAD
    for expected in range(2, 3 * MOST_UNREAD):
        assert (await call.read()).chunk.token_ids == [expected]


async def test_a_reader_that_leaves_unread_messages_is_no_error(
    loopback: Any, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    flood = Flood()
    loopback.decode.on_decode = flood.tokens
    call = await stuck(flood, stub)
    call.cancel()
    async with asyncio.timeout(5):
        await loopback.decode.unwound.wait()
    await loopback.server.drain()
    labels = {"method": "/kvbraid.v1.DecodeService/Decode", "code": "CANCELLED"}
    assert loopback.sample("kvbraid_rpc_requests_total", **labels) == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_messages_larger_than_what_may_wait_arrive(loopback: Any, stub: Any) -> None:
    sent = [message(*range(size)) for size in (1, 100_000, 1, 100_000)]

    async def answers(_: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        for answer in sent:
            yield answer

    loopback.decode.on_decode = answers
    call = stub.Decode(decode_pb2.DecodeRequest(), timeout=30)
    assert [answer async for answer in call] == sent
