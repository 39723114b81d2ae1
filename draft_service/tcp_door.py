"""The TCP socket for decode workers of any host."""

from __future__ import annotations

import socket

from kvbraid.address import bare_host, join_address
from kvbraid.errors import StartupError
from kvbraid.rpc.tls import https_context
from kvbraid.settings import ServerSettings
from kvbraid.transport.draft_terms import TcpOffer
from kvbraid.transport.socket_frames import TOKEN_BYTES
from kvbraid.transport.step_socket import MAX_RECORD_BYTES, StepSocket, TlsSocket


class TcpDoor:
    """See Door. settings: where this process listens, how peers reach it, and its certificates,
    which hold here as they do for gRPC. port: 0: any."""

    def __init__(self, settings: ServerSettings, port: int) -> None:
        """Raises ConfigError for certificates that cannot be used."""
        self._settings = settings
        self._port = port
        self._tls = https_context(settings.tls)

    def listen(self) -> socket.socket | None:
        """See Door."""
        wanted = join_address(self._settings.host, self._port)
        try:
            listening = _listening(bare_host(self._settings.host), self._port)
        except OSError as error:
            raise StartupError(f"cannot listen on {wanted} for steps: {error}") from error
        self._port = listening.getsockname()[1]
        return listening

    def admit(self, connection: socket.socket) -> TcpStranger:
        """See Door."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return TcpStranger(connection)
        wrapped = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return TlsStranger(TlsSocket(wrapped))

    def offer(self, token: bytes) -> TcpOffer:
        """See Door."""
        return TcpOffer(join_address(self._settings.reachable_host, self._port), token)


class TcpStranger:
    """See Stranger. A token may come in pieces."""

    def __init__(self, connection: StepSocket) -> None:
        self.connection = connection
        self._token = b""

    def shown(self) -> bytes | None:
        """See Stranger."""
        room = bytearray(MAX_RECORD_BYTES)
        try:
            num_bytes = self.connection.recv_into(memoryview(room))
        except BlockingIOError:
            return None
        if not num_bytes:
            raise ConnectionResetError("gone without a token")
        self._token += room[:num_bytes]
        return self._token if len(self._token) >= TOKEN_BYTES else None

    def take_memory(self) -> None:
        """See Stranger: hosts share none."""

    def close(self) -> None:
        """See Stranger."""
        self.connection.close()


class TlsStranger(TcpStranger):
    """See Stranger. It shakes hands before it shows anything."""

    def __init__(self, connection: TlsSocket) -> None:
        super().__init__(connection)
        self._tls = connection
        self._is_known = False

    def shown(self) -> bytes | None:
        """See Stranger."""
        self._is_known = self._is_known or self._tls.shake_hands()
        return super().shown() if self._is_known else None


def _listening(host: str, port: int) -> socket.socket:
    """On `host`, IPv6 too; `::` is all of IPv4 and IPv6, as gRPC takes it. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    is_all = family == socket.AF_INET6 and address[0] == "::"
    return socket.create_server(address[:2], family=family, dualstack_ipv6=is_all)
