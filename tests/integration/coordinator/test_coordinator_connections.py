"""Clients of a coordinator are told to open new connections, and lose nothing by it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import aiohttp
import grpc

from kvbraid.testing import FakeCluster, Fault, LossyProxy
from kvbraid.v1 import coordinator_pb2_grpc, info_pb2, info_pb2_grpc

AGE_S = 0.3


async def test_a_stream_outlives_the_age_of_its_connection(start_stack: Any) -> None:
    stack = await start_stack(connections={"max_connection_age_seconds": AGE_S})
    may_go_on = asyncio.Event()
    stack.cluster.decode[0].faults.append(Fault("token", may_go_on.wait, after=3))
    call = stack.call()
    answers = aiter(call)
    tokens = [*(await anext(answers)).chunk.token_ids]
    info = info_pb2_grpc.InfoServiceStub(stack.channel)
    # The channel leaves its connection, which the call goes on using, and then the next one.
    for _ in range(2):
        async with asyncio.timeout(10):
            await stack.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await info.Info(info_pb2.InfoRequest(), timeout=10)
    may_go_on.set()
    async for response in answers:
        tokens.extend(response.chunk.token_ids)
    assert tokens == stack.expected()


async def test_an_old_http_connection_ends_behind_an_answer(start_stack: Any) -> None:
    stack = await start_stack(connections={"max_connection_age_seconds": AGE_S})
    opened: list[int] = []
    told: list[bool] = []

    async def note_opened(*_: object) -> None:
        opened.append(len(told))

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(note_opened)
    url = f"http://{stack.server.http_address}/v1/completions"
    body = {"prompt": "hi", "max_tokens": 3, "stream": True}
    async with asyncio.timeout(20), aiohttp.ClientSession(trace_configs=[trace]) as client:
        while told.count(True) < 2:
            async with client.post(url, json=body) as answer:
                told.append(answer.headers.get("Connection") == "close")
                assert (await answer.text()).endswith("data: [DONE]\n\n")
    # A new connection behind each answer that said so, and behind no other.
    assert opened == [0, *(n for n, is_last in enumerate(told[:-1], 1) if is_last)]
    assert not told[0], "it was new"


async def test_without_an_age_http_connections_stay(stack: Any) -> None:
    for _ in range(3):
        async with stack.http.get("/health") as answer:
            assert "Connection" not in answer.headers


async def test_a_draining_coordinator_sends_clients_to_another_one(start_stack: Any) -> None:
    async with FakeCluster() as cluster:
        leaving, other = [await start_stack(nullcontext(cluster)) for _ in range(2)]
        both = LossyProxy(leaving.server.address, other.server.address)
        async with both as front, grpc.aio.insecure_channel(front.address) as channel:
            client = replace(leaving, stub=coordinator_pb2_grpc.CoordinatorServiceStub(channel))
            may_go_on = asyncio.Event()
            cluster.decode[0].faults.append(Fault("token", may_go_on.wait, after=3))
            running = asyncio.create_task(client.generate())
            async with asyncio.timeout(10):
                while not leaving.server.num_running:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            draining = asyncio.create_task(leaving.server.drain())
            async with asyncio.timeout(10):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert (await client.generate(range(500, 540))).tokens[0] == client.expected(
                range(500, 540)
            )
            assert other.metric("kvbraid_coordinator_requests_total") == 1
            may_go_on.set()
            assert (await running).tokens[0] == client.expected()
            assert await draining


async def test_a_draining_coordinator_keeps_no_http_connection(stack: Any) -> None:
    async with stack.http.get("/health") as answer:
        assert "Connection" not in answer.headers
    assert await stack.server.drain()
    async with stack.http.get("/health") as answer:
        assert (answer.status, answer.headers["Connection"]) == (503, "close")
