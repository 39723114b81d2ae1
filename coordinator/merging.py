"""Several streams read as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """Items of all streams; ends after the last one. The first error ends all and is raised.

    Leaving it early closes every stream. A stream is read one item ahead at most, so a client that
    does not read holds all of them back.
    """
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    readers = {_read(stream): stream for stream in streams}
    try:
        while readers:
            done, _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            for reader in done:
                stream = readers.pop(reader)
                try:
                    item = reader.result()
                except StopAsyncIteration:
                    continue
                yield item
                readers[_read(stream)] = stream
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _read(stream: AsyncGenerator[Item]) -> asyncio.Future[Item]:
    return asyncio.ensure_future(anext(stream))
