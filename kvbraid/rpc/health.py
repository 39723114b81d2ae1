"""grpc.health.v1 for one role: the overall status "" and the role's name, Check and Watch."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

SERVICE_NAME = health.SERVICE_NAME


class RoleHealth:
    """NOT_SERVING until told otherwise."""

    def __init__(self, role: str) -> None:
        self._names = ("", role)
        self._servicer = health.aio.HealthServicer()

    async def attach(self, server: grpc.aio.Server) -> None:
        """Serve it on `server`, which has not started yet."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self.set_serving(False)

    async def set_serving(self, is_serving: bool) -> None:
        """Tell every watcher. Does nothing after `shut_down`."""
        for name in self._names:
            await self._servicer.set(name, _SERVING if is_serving else _NOT_SERVING)

    async def shut_down(self) -> None:
        """NOT_SERVING for good."""
        await self._servicer.enter_graceful_shutdown()
