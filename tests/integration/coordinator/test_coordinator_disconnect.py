"""Clients that go away at any moment: both workers are free at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, web

from kvbraid.testing import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANCELLED = {"outcome": "cancelled"}
REQUESTS = "kvbraid_coordinator_requests_total"
STAGES = [
    ("prefill", "arrived", 0),
    ("prefill", "first", 0),
    ("decode", "arrived", 0),
    ("decode", "granted", 0),
    ("decode", "token", 0),
    ("decode", "token", 5),
]
_numbers = iter(range(10**6))


def hold_at(stack: Any, pool: str, stage: str, after: int) -> asyncio.Event:
    """The next call that comes there stays for ever; the event says that it came."""
    reached = asyncio.Event()

    async def act() -> None:
        reached.set()
        await asyncio.get_running_loop().create_future()

    getattr(stack.cluster, pool)[0].faults.append(Fault(stage, act, after))
    return reached


def new_prompt() -> list[int]:
    """A prompt that no test had before, so that no cache knows it."""
    first = 10 + next(_numbers)
    return list(range(first, first + 40))


@pytest.mark.parametrize(("pool", "stage", "after"), STAGES)
async def test_a_cancelled_call_frees_both_workers(
    shared_stack: Any, pool: str, stage: str, after: int
) -> None:
    reached = hold_at(shared_stack, pool, stage, after)
    before = shared_stack.metric(REQUESTS, api="grpc", **CANCELLED)
    prompt = new_prompt()
    call = shared_stack.call(prompt)
    reading = asyncio.create_task(drain(call))
    await asyncio.wait_for(reached.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await shared_stack.is_idle()
    assert shared_stack.metric(REQUESTS, api="grpc", **CANCELLED) == before + 1
    assert (await shared_stack.generate(prompt)).tokens[0] == shared_stack.expected(prompt)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("pool", "stage", "after"), STAGES)
async def test_an_http_client_that_disconnects_frees_both_workers(
    shared_stack: Any, pool: str, stage: str, after: int, stream: bool
) -> None:
    reached = hold_at(shared_stack, pool, stage, after)
    before = shared_stack.metric(REQUESTS, api="http", **CANCELLED)
    host, port = shared_stack.server.http_address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": new_prompt(), "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await asyncio.wait_for(reached.wait(), 5)
    writer.close()
    await shared_stack.is_idle()
    assert shared_stack.metric(REQUESTS, api="http", **CANCELLED) == before + 1


async def test_a_client_that_goes_between_two_events_is_no_error(
    shared_stack: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp refuses writes as soon as it hears of it, and cancels the handler a moment later."""
    write, num_events = web.StreamResponse.write, iter(range(4))

    async def refuse(response: web.StreamResponse, data: bytes) -> None:
        if next(num_events, None) is None:
            raise ClientConnectionResetError("Cannot write to closing transport")
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", refuse)
    before = shared_stack.metric(REQUESTS, api="http", **CANCELLED)
    url = f"http://{shared_stack.server.http_address}/v1/completions"
    body = {"prompt": new_prompt(), "stream": True, "max_tokens": 50, "ignore_eos": True}
    async with shared_stack.http.post(url, json=body) as response:
        assert (await response.text()).count("data: ") == 4
    await shared_stack.is_idle()
    assert shared_stack.metric(REQUESTS, api="http", **CANCELLED) == before + 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_one_of_many_going_away_leaves_the_others_alone(shared_stack: Any) -> None:
    prompts = [new_prompt() for _ in range(6)]
    calls = [shared_stack.call(prompt, max_tokens=200) for prompt in prompts]
    readings = [asyncio.create_task(collect(call)) for call in calls]
    await shared_stack.call(new_prompt(), max_tokens=1).read()
    calls[2].cancel()
    for index, (prompt, reading) in enumerate(zip(prompts, readings, strict=True)):
        if index == 2:
            await asyncio.wait({reading})
        else:
            assert await reading == shared_stack.expected(prompt, max_tokens=200)
    await shared_stack.is_idle()


async def drain(call: Any) -> None:
    async for _ in call:
        pass


async def collect(call: Any) -> list[int]:
    return [token async for response in call for token in response.chunk.token_ids]
