"""grpc.health.v1 for one role, Check and Watch.

The overall status "" and the role's name say whether requests are taken. `live` says whether the
process can still do its work: it stays SERVING while loading and draining.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

SERVICE_NAME = health.SERVICE_NAME
LIVE = "live"


class RoleHealth:
    """Live, and NOT_SERVING until told otherwise."""

    def __init__(self, role: str) -> None:
        self._names = ("", role)
        self._servicer = health.aio.HealthServicer()
        self._is_shut_down = False

    async def attach(self, server: grpc.aio.Server) -> None:
        """Serve it on `server`, which has not started yet."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self.set_serving(False)
        await self.set_live(True)

    async def set_serving(self, is_serving: bool) -> None:
        """Tell every watcher. Does nothing after `shut_down`."""
        if not self._is_shut_down:
            for name in self._names:
                await self._set(name, is_serving)

    async def set_live(self, is_live: bool) -> None:
        """Whether the process can still do its work, which a restart alone could mend if not."""
        await self._set(LIVE, is_live)

    async def shut_down(self) -> None:
        """NOT_SERVING for good; a process that drains is live."""
        await self.set_serving(False)
        self._is_shut_down = True

    async def _set(self, name: str, is_good: bool) -> None:
        await self._servicer.set(name, _SERVING if is_good else _NOT_SERVING)
