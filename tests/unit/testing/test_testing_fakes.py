"""The shipped fakes keep their promises."""

from __future__ import annotations

import asyncio

import pytest

from kvbraid.request import FinishReason, SamplingParams
from kvbraid.testing import LossyProxy, ToyModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_one_changed_token_changes_all_that_follow() -> None:
    model = ToyModel()
    first, second = model.generate([9, 8, 7], GREEDY), model.generate([9, 8, 6], GREEDY)
    assert first == model.generate([9, 8, 7], GREEDY)
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert (
        model.generate([9, 8, 7, *first[:3]], SamplingParams(temperature=0, max_tokens=5))
        == (first[3:])
    )


def test_sampling_depends_on_seed_and_index_and_stops_where_told() -> None:
    model = ToyModel()
    sampled = SamplingParams(seed=1, max_tokens=8)
    runs = [
        model.generate([9], sampled, 0),
        model.generate([9], sampled, 1),
        model.generate([9], SamplingParams(seed=2, max_tokens=8), 0),
    ]
    assert len({tuple(run) for run in runs}) == 3
    stop = SamplingParams(seed=1, max_tokens=8, stop_token_ids=(runs[0][4],))
    assert model.generate([9], stop, 0) == runs[0][:5]
    assert model.next_chunk([9, *runs[0][:4]], 5, stop, 0).finish_reason is FinishReason.STOP


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


async def test_the_proxy_forwards_freezes_dies_and_comes_back() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, LossyProxy(f"{host}:{port}") as proxy:
        near, far = proxy.address.split(":")
        reader, writer = await asyncio.open_connection(near, int(far))
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.freeze()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(3), 0.05)
        await proxy.restore()
        assert await reader.readexactly(3) == b"two"
        await proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        with pytest.raises(OSError, match="onnect"):
            await asyncio.open_connection(near, int(far))
        writer.close()
        await proxy.restore()
        reader, writer = await asyncio.open_connection(near, int(far))
        writer.write(b"new")
        assert await reader.readexactly(3) == b"new"
        writer.close()
