"""A decode worker's connection to a draft service beside gRPC: a Unix-domain or a TCP socket."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

from kvbraid.address import split_address
from kvbraid.errors import ConfigError, UnavailableError
from kvbraid.rpc.tls import call_on
from kvbraid.settings.tls import TlsSettings
from kvbraid.transport.draft_terms import DraftTerms, LocalSocketOffer, TcpOffer
from kvbraid.transport.local_socket import abstract_address, check_same_user
from kvbraid.transport.shared_rows import RowMemory, memory_bytes, new_row_memory
from kvbraid.transport.socket_frames import ACCEPTED
from kvbraid.transport.step_socket import StepSocket, TlsSocket

SocketWire = Literal["local_socket", "tcp"]


class DraftSocket(NamedTuple):
    """A connection that the service has accepted. memory: shared with it, for rows."""

    wire: SocketWire
    connection: StepSocket
    memory: RowMemory | None = None


def connect_local_socket(
    offer: LocalSocketOffer, terms: DraftTerms, *, timeout_s: float
) -> DraftSocket:
    """Connect to what a service of this host offers and share memory for rows with it. Blocks.

    Raises UnavailableError when the socket is not there or not accepted, IncompatibleError when
    it is another user's.
    """
    num_bytes = memory_bytes(terms.row_format, terms.max_rows_per_message)
    with _explained(f"local socket {offer.socket_name}"), ExitStack() as on_failure:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        on_failure.callback(connection.close)
        connection.settimeout(timeout_s)
        connection.connect(abstract_address(offer.socket_name))
        check_same_user(connection)
        fd = new_row_memory(num_bytes)
        memory = RowMemory(os.dup(fd), num_bytes)
        try:
            socket.send_fds(connection, [offer.token], [fd])
        finally:
            os.close(fd)
        _await_accepted(connection)
        connection.setblocking(False)
        on_failure.pop_all()
    return DraftSocket("local_socket", connection, memory)


def connect_tcp(offer: TcpOffer, tls: TlsSettings, *, timeout_s: float) -> DraftSocket:
    """Connect to what a service of any host offers: over TLS where this process calls over TLS.
    Blocks.

    Raises UnavailableError when nobody is there, does not accept or cannot be trusted.
    """
    with _explained(f"tcp {offer.address}"), ExitStack() as on_failure:
        host, port = split_address(offer.address)
        connection = socket.create_connection((host, port), timeout_s)
        on_failure.callback(connection.close)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = call_on(connection, host, tls)
        on_failure.callback(connection.close)
        connection.sendall(offer.token)
        _await_accepted(connection)
        connection.setblocking(False)
        on_failure.pop_all()
    if isinstance(connection, ssl.SSLSocket):
        return DraftSocket("tcp", TlsSocket(connection))
    return DraftSocket("tcp", connection)


def _await_accepted(connection: socket.socket) -> None:
    if connection.recv(len(ACCEPTED)) != ACCEPTED:
        raise ConnectionResetError("this worker was not accepted")


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ConfigError) as error:
        raise UnavailableError(f"{where}: {error}") from error
