"""What kube-proxy does for ClusterIP Services: each new connection goes to one ready endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field

_CHUNK = 1 << 16

Address = tuple[str, int]


@dataclass
class Port:
    """One Service port. allowed: the endpoints that policies let a source address reach."""

    server: asyncio.Server
    allowed: dict[str, list[Address]] = field(default_factory=dict)
    turns: itertools.count[int] = field(default_factory=itertools.count)


class ServiceProxy:
    """Listens on Service addresses of the node and forwards, an endpoint after the other.

    kube-proxy picks at random; in turn, the spread over two endpoints is the same in every run.
    """

    def __init__(self) -> None:
        self.connections: list[tuple[str, int, str, int]] = []
        self._ports: dict[Address, Port] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def route(self, address: str, port: int, allowed: dict[str, list[Address]]) -> None:
        """Where connections to address:port go from now on, by their source address."""
        key = (address, port)
        if key not in self._ports:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.create_task(self._forward(key, reader, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            self._ports[key] = Port(await asyncio.start_server(accept, address, port))
        self._ports[key].allowed = allowed

    async def _forward(
        self, key: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        port = self._ports[key]
        source, source_port = writer.get_extra_info("peername")[:2]
        endpoints = port.allowed.get(source, [])
        if not endpoints:
            writer.transport.abort()
            return
        host, target = endpoints[next(port.turns) % len(endpoints)]
        self.connections.append((source, source_port, host, target))
        try:
            back_reader, back_writer = await asyncio.open_connection(host, target)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()
