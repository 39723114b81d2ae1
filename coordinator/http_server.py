"""The HTTP server around the OpenAI API: listening, draining, errors as JSON."""

from __future__ import annotations

import math
import socket
import ssl

from aiohttp import web
from aiohttp.typedefs import Handler

from coordinator.openai_response import error_body, error_json, retry_after_s
from kvbraid.address import bare_host, is_any_host, is_ipv6, join_address
from kvbraid.errors import KVBraidError, StartupError

# Draining comes before: what still runs then is cut off.
_SHUTDOWN_S = 0.2


class HttpServer:
    """Serves one aiohttp application."""

    def __init__(
        self, app: web.Application, *, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        """tls: serve HTTPS with it; None: HTTP."""
        # A handler is cancelled when its client goes away: that is what frees the pages.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        self._host = host
        self._wanted_port = port
        self._tls = tls
        self.port = 0

    async def start(self) -> None:
        """Listens; `port` is known then. Raises StartupError when the port cannot be had."""
        await self._runner.setup()
        try:
            await self._site().start()
        except OSError as error:
            where = join_address(self._host, self._wanted_port)
            raise StartupError(f"cannot listen on {where}: {error}") from error
        self.port = int(self._runner.addresses[0][1])

    def _site(self) -> web.BaseSite:
        host = bare_host(self._host)
        if not (is_ipv6(host) and is_any_host(host)):
            return web.TCPSite(self._runner, host, self._wanted_port, ssl_context=self._tls)
        # asyncio would make it IPv6 alone, unlike the gRPC port beside it.
        listener = socket.create_server(
            (host, self._wanted_port),
            family=socket.AF_INET6,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
        )
        return web.SockSite(self._runner, listener, ssl_context=self._tls)

    async def stop(self) -> None:
        """Closes the port and cancels what still runs."""
        await self._runner.cleanup()


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """KVBraid's errors and aiohttp's own get their status and OpenAI's error body."""
    try:
        return await handler(request)
    except KVBraidError as error:
        seconds = retry_after_s(error)
        headers = {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}
        return web.json_response(error_json(error), status=error.http_status, headers=headers)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        body = error_body(message, error.status, param=None, code=error.reason.lower())
        allowed = {name: value for name, value in error.headers.items() if name == "Allow"}
        return web.json_response(body, status=error.status, headers=allowed)
