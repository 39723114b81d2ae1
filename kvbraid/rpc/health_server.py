"""Health on a port of its own, for probes that cannot speak TLS or show a certificate."""

from __future__ import annotations

import grpc

from kvbraid.rpc.health import RoleHealth
from kvbraid.rpc.tls import bind_plaintext


class HealthServer:
    """Answers grpc.health.v1 in plaintext and nothing else: no calls, no reflection."""

    def __init__(self, options: list[tuple[str, int]]) -> None:
        """To be called inside a running event loop. options: those of every server."""
        self._server = grpc.aio.server(options=options)

    async def start(self, health: RoleHealth, address: str) -> int:
        """Listen on `address` (host:port), say what `health` says; returns the port.

        Raises RuntimeError when it cannot be had.
        """
        await health.attach(self._server)
        port = bind_plaintext(self._server, address)
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Close the port."""
        await self._server.stop(None)
