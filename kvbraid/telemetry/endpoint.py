"""The Prometheus endpoint: GET /metrics on a port of its own, served by a thread of its own.

A thread, so that a blocked event loop can still be seen from outside.
"""

from __future__ import annotations

from threading import Thread
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from kvbraid.address import bare_host, join_address
from kvbraid.errors import StartupError


class MetricsEndpoint:
    """A running endpoint; a context manager that closes it."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Listen on host, IPv6 too, and port; 0 lets the system choose. Raises StartupError when
        it cannot be had."""
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = start_http_server(port, bare_host(host), registry)
        except OSError as error:
            where = join_address(host, port)
            raise StartupError(f"cannot serve metrics on {where}: {error}") from error
        self.port = self._server.server_port
        self.address = join_address(host, self.port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
