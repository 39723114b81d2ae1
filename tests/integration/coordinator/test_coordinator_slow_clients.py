"""Clients that do not read what is written: their requests end with their time all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web

from kvbraid.request import TokenChunk
from kvbraid.testing import FakeCluster
from kvbraid.testing.toy_model import ToyModel
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc
from kvbraid.wire import sampling_to_proto
from tests.integration.coordinator.conftest import PROMPT, params

SHORT = {"request_timeout_seconds": 1.0}
# The window of a client that reads quickly would grow.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0)]


def long_call(channel: grpc.aio.Channel) -> Any:
    """A running call whose answer is longer than the window of a stream: 64 KiB."""
    sampling = params(max_tokens=1900, top_logprobs=20, ignore_eos=True)
    request = coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=PROMPT), sampling=sampling_to_proto(sampling)
    )
    return coordinator_pb2_grpc.CoordinatorServiceStub(channel).Generate(request, timeout=30)


async def test_a_grpc_client_that_does_not_read(start_stack: Any) -> None:
    stack = await start_stack(api=SHORT)
    async with grpc.aio.insecure_channel(stack.server.address, options=SMALL_WINDOW) as channel:
        call = long_call(channel)
        await call.read()
        await stack.is_idle()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await read_to_the_end(call)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class CountingModel(ToyModel):
    """How many tokens were made."""

    num_made = 0

    def next_chunk(self, *arguments: Any) -> TokenChunk:
        self.num_made += 1
        return super().next_chunk(*arguments)


async def test_tokens_that_a_client_does_not_read_are_not_made_ahead(start_stack: Any) -> None:
    model = CountingModel()
    stack = await start_stack(FakeCluster(model=model), api=SHORT, local_prefill_max_tokens=2048)
    async with grpc.aio.insecure_channel(stack.server.address, options=SMALL_WINDOW) as channel:
        call = long_call(channel)
        await call.read()
        await stack.is_idle()
        num_read = 1
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                num_read += 1
    # Beyond what lies in the client's own window: one in every hand.
    assert num_read <= model.num_made <= num_read + 10


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_grpc_client_that_did_not_read_and_leaves_is_no_error(
    start_stack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await start_stack(api=SHORT)
    async with grpc.aio.insecure_channel(stack.server.address, options=SMALL_WINDOW) as channel:
        call = long_call(channel)
        await call.read()
        await stack.is_idle()
        call.cancel()
        # Counted once its handler has ended.
        async with asyncio.timeout(5):
            while not stack.metric("kvbraid_rpc_requests_total", code="DEADLINE_EXCEEDED"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    await stack.server.stop()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("reads_the_error", [True, False], ids=["comes back", "stays away"])
async def test_an_http_client_that_does_not_read(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch, reads_the_error: bool
) -> None:
    stack = await start_stack(api=SHORT)
    monkeypatch.setattr("coordinator.openai_api._LAST_EVENT_S", 0.1)
    write, num_events = web.StreamResponse.write, iter(range(4))

    async def wait(response: web.StreamResponse, data: bytes) -> None:
        """A full window, from the fifth event on."""
        if next(num_events, None) is None and not (reads_the_error and b"error" in data):
            await asyncio.get_running_loop().create_future()
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", wait)
    url = f"http://{stack.server.http_address}/v1/completions"
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 50, "ignore_eos": True}
    async with asyncio.timeout(10), stack.http.post(url, json=body) as response:
        if reads_the_error:
            *events, last = [line for line in (await response.text()).split("\n\n") if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline"
            assert len(events) == 4
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.text()
    await stack.is_idle()
