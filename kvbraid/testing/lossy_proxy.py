"""A TCP proxy that can die, freeze and come back: a process's death as its peers see it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Self

from kvbraid.address import split_address

_CHUNK_BYTES = 1 << 16


class LossyProxy:
    """Forwards connections to `targets` (host:port), each in turn, until told otherwise."""

    def __init__(self, *targets: str) -> None:
        self._targets = itertools.cycle(targets)
        self._listen_port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[object]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def address(self) -> str:
        """host:port to connect to, the same after `restore`."""
        return f"127.0.0.1:{self._listen_port}"

    async def __aenter__(self) -> Self:
        await self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def restore(self) -> None:
        """Listen, again after `cut`, and forward what `freeze` held back."""
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._listen_port)
            self._listen_port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Reset every connection and refuse new ones, as when a process is killed."""
        self._flowing.set()
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def freeze(self) -> None:
        """Keep connections open and forward nothing, as when a process is stopped."""
        self._flowing.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._connect_through(reader, writer)
        finally:
            self._serving.discard(task)

    async def _connect_through(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        try:
            host, port = split_address(next(self._targets))
            far_reader, far_writer = await asyncio.open_connection(host, port)
            ends.append(far_writer)
            self._writers.update(ends)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer))
                group.create_task(self._forward(far_reader, writer))
        except OSError:
            writer.transport.abort()
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
