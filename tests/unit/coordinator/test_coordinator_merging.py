"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from coordinator.merging import merge
from kvbraid.errors import DataLossError


class Source:
    """A stream whose items and end are given by the test."""

    def __init__(self, *items: int, error: Exception | None = None, waits: bool = False) -> None:
        self._items = items
        self._error = error
        self._waits = waits
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[int]:
        try:
            for item in self._items:
                yield item
            if self._waits:
                await asyncio.get_running_loop().create_future()
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_every_item_of_every_stream_comes_in_its_order(count: int) -> None:
    sources = [Source(*range(i * 10, i * 10 + 4)) for i in range(count)]
    items = [item async for item in merge([source.stream() for source in sources])]
    assert sorted(items) == [i * 10 + j for i in range(count) for j in range(4)]
    for i in range(count):
        assert [item for item in items if item // 10 == i] == [i * 10 + j for j in range(4)]
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("error", [DataLossError("damaged"), RuntimeError("a bug")])
async def test_the_first_error_closes_all_streams_and_is_raised(error: Exception) -> None:
    sources = [Source(1, waits=True), Source(2, error=error), Source(3, waits=True)]
    with pytest.raises(type(error), match=str(error)):
        [item async for item in merge([source.stream() for source in sources])]
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_early_closes_all_streams(count: int) -> None:
    sources = [Source(1, 2, 3, waits=True) for _ in range(count)]
    async with aclosing(merge([source.stream() for source in sources])) as items:
        await anext(items)
    assert all(source.is_closed for source in sources)


async def test_a_cancelled_reader_closes_all_streams() -> None:
    sources = [Source(waits=True), Source(waits=True)]
    started = asyncio.Event()

    async def read() -> None:
        async with aclosing(merge([source.stream() for source in sources])) as items:
            started.set()
            await anext(items)

    reading = asyncio.create_task(read())
    await started.wait()
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert all(source.is_closed for source in sources)
