"""The gRPC server of every role.

server = RpcServer(role="decode", settings=config.server, metrics=metrics.rpc)
server.add(add_DecodeServiceServicer_to_server, servicer, "kvbraid.v1.DecodeService")
await server.start()                       # listens; health says NOT_SERVING
... load the model ...
await server.set_serving(True)
code = await run_until_signal(server)      # kvbraid.rpc.lifecycle
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from kvbraid.address import join_address
from kvbraid.errors import StartupError
from kvbraid.rpc.admission import Admission
from kvbraid.rpc.credentials import show_expiries
from kvbraid.rpc.health import SERVICE_NAME, RoleHealth
from kvbraid.rpc.health_server import HealthServer
from kvbraid.rpc.interceptors import ServiceInterceptor
from kvbraid.rpc.ready import ReadyReport
from kvbraid.rpc.tls import bind
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import RpcMetrics

_UNWIND_S = 5.0

AddServicer = Callable[[Any, grpc.aio.Server], None]


def server_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Server options: clients may ping every second and a frozen client is found too.

    max_ping_strikes 0 is what allows frequent pings; a minimum ping interval does not.
    """
    return [
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", round(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Without it two processes may listen on one port and share its calls.
        ("grpc.so_reuseport", 0),
    ]


class RpcServer:
    """grpc.aio server with health, reflection, error mapping, metrics and a drain.

    `admission` is shared with whatever else takes requests in this process, such as an HTTP API.
    """

    def __init__(
        self,
        *,
        role: str,
        settings: ServerSettings,
        metrics: RpcMetrics,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """To be called inside a running event loop. options: of gRPC, beside those of every
        server."""
        self.role = role
        self.settings = settings
        self.port = 0
        self.health_port = 0
        self.admission = Admission()
        self._metrics = metrics
        self._health = RoleHealth(role)
        self._names = [SERVICE_NAME, reflection.SERVICE_NAME]
        self._server = grpc.aio.server(
            interceptors=[ServiceInterceptor(admission=self.admission, metrics=metrics)],
            options=[*server_options(settings), *options],
        )
        has_health_port = settings.health_port is not None
        self._health_server = HealthServer(server_options(settings)) if has_health_port else None

    @property
    def address(self) -> str:
        """host:port that peers use, known after `start`."""
        return join_address(self.settings.reachable_host, self.port)

    @property
    def num_running(self) -> int:
        """Calls being served that a drain waits for."""
        return self.admission.num_running

    def add(self, add_servicer: AddServicer, servicer: object, service_name: str) -> None:
        """Serve `servicer` through its generated add_..._to_server function."""
        add_servicer(servicer, self._server)
        self._names.append(service_name)

    def add_generic(self, handlers: Sequence[grpc.GenericRpcHandler], service_name: str) -> None:
        """Serve hand-made handlers, such as raw-bytes streams."""
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._names.append(service_name)

    async def start(self) -> int:
        """Listen and return the bound port. Health stays NOT_SERVING.

        Raises StartupError when a port cannot be had or a certificate cannot be used.
        """
        await self._health.attach(self._server)
        if self.settings.reflection:
            reflection.enable_server_reflection(self._names, self._server)
        wanted = join_address(self.settings.host, self.settings.port)
        try:
            self.port = bind(self._server, wanted, self.settings.tls)
            if self._health_server is not None:
                wanted = join_address(self.settings.host, self.settings.health_port or 0)
                self.health_port = await self._health_server.start(self._health, wanted)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {wanted}: {error}") from error
        show_expiries(self.settings.tls, self._metrics.tls)
        await self._server.start()
        return self.port

    def ready_report(self, *, metrics: str, http: str = "") -> ReadyReport:
        """What the ready file says of this process, known after `start`."""
        host = self.settings.reachable_host
        health = join_address(host, self.health_port) if self.health_port else ""
        return ReadyReport(
            role=self.role,
            pid=os.getpid(),
            grpc=self.address,
            metrics=metrics,
            http=http,
            health=health,
            tls=self.settings.tls.serves,
        )

    async def set_serving(self, is_serving: bool) -> None:
        """Change what the health service says of this role."""
        await self._health.set_serving(is_serving)

    async def set_live(self, is_live: bool) -> None:
        """Change what the health service says of `live`."""
        await self._health.set_live(is_live)

    async def drain(self) -> bool:
        """Health NOT_SERVING, refuse new calls, wait for the running ones up to drain_seconds.

        Returns whether all of them finished.
        """
        self.admission.close()
        await self._health.shut_down()
        return await self.admission.wait_idle(self.settings.drain_seconds)

    async def stop(self) -> None:
        """Close the ports, cancel what still runs, and give its handlers a moment to unwind."""
        if self._health_server is not None:
            await self._health_server.stop()
        await self._server.stop(None)
        await self.admission.wait_idle(_UNWIND_S)

    async def wait_stopped(self) -> None:
        """Returns after `stop`."""
        await self._server.wait_for_termination()
