"""`python -m tests.deploy.cluster.node_agent DNS_ADDRESS`: what runs on the node, in its network.

Takes one JSON object a line on stdin, {"id", "do", ...}, and answers {"id", "result"}. Ends with
stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from tests.deploy.cluster.dns_server import DnsServer
from tests.deploy.cluster.packet_log import PacketLog
from tests.deploy.cluster.prober import probe
from tests.deploy.cluster.service_proxy import ServiceProxy

_LINE_LIMIT = 1 << 20


class NodeAgent:
    """DNS, the Service proxy, the packet log and the prober."""

    def __init__(self) -> None:
        self.dns = DnsServer()
        self._proxy = ServiceProxy()
        self._packets = PacketLog()
        self._tasks: set[asyncio.Task[None]] = set()
        self.actions: dict[str, Callable[..., Awaitable[Any]]] = {
            "probe": probe,
            "route": self._proxy.route,
            "names": self._set_names,
            "flows": self._flows,
            "connections": self._connections,
        }

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Answers until the input ends."""
        while line := await lines.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        ident, action = request.pop("id"), request.pop("do")
        result = await self.actions[action](**request)
        sys.stdout.write(json.dumps({"id": ident, "result": result}) + "\n")
        sys.stdout.flush()

    async def _set_names(self, records: dict[str, list[str]]) -> None:
        self.dns.records = records

    async def _flows(self) -> list[Any]:
        return sorted(self._packets.flows)

    async def _connections(self) -> list[Any]:
        return self._proxy.connections


async def main(dns_address: str) -> None:
    """Serves stdin."""
    loop = asyncio.get_running_loop()
    agent = NodeAgent()
    await loop.create_datagram_endpoint(lambda: agent.dns, local_addr=(dns_address, 53))
    lines = asyncio.StreamReader(limit=_LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await agent.serve(lines)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
