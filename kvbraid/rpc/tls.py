"""The only place that opens a port or a channel: in plaintext, over TLS or over mutual TLS.

port = bind(server, "0.0.0.0:50053", settings.tls)
channel = Caller(settings.tls).open("10.0.0.7:50053", options)

Changed certificate files are used for every connection made after the change; connections that
stand are left alone, and so are their calls.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import grpc

from kvbraid.rpc.credentials import credentials_of
from kvbraid.rpc.renewed_channel import RenewedChannel
from kvbraid.settings.tls import TlsSettings

ChannelOptions = Sequence[tuple[str, int | str]]

_Made = TypeVar("_Made")


def bind(server: grpc.aio.Server, address: str, tls: TlsSettings) -> int:
    """Let `server`, which has not started, listen on `address` (host:port); returns the port.

    Raises ConfigError for certificates that cannot be used and RuntimeError when the port cannot
    be had.
    """
    if not tls.serves:
        return bind_plaintext(server, address)
    return server.add_secure_port(address, _server_credentials(tls))


def bind_plaintext(server: grpc.aio.Server, address: str) -> int:
    """`bind` for what everybody may read and ask: health for probes."""
    return server.add_insecure_port(address)


class Caller:
    """Opens channels of one process to others. Raises ConfigError for unusable certificates."""

    def __init__(self, tls: TlsSettings) -> None:
        self._server_name = tls.tls_server_name
        self._credentials = credentials_of(tls) if tls.calls else None

    def open(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel to `address` (host:port), which the caller closes."""
        credentials = self._credentials
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        if self._server_name:
            options = [*options, ("grpc.ssl_target_name_override", self._server_name)]
        return RenewedChannel(
            lambda: _made(credentials.current().channel),
            lambda current: grpc.aio.secure_channel(address, current, options=options),
        )


def https_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """For a server without gRPC (HTTP, drafting steps) with the certificate and the rules for
    clients of `bind`; None for plaintext. Raises ConfigError for certificates that cannot be used.
    """
    if not tls.serves:
        return None
    credentials = credentials_of(tls)

    def renew(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = _made(credentials.current().https)

    first = _made(credentials.current().https)
    first.sni_callback = renew  # called at the beginning of every handshake
    return first


def call_on(connection: socket.socket, host: str, tls: TlsSettings) -> socket.socket:
    """`connection` to `host` as `Caller` would have it: itself for plaintext, else an SSLSocket
    after the handshake, which blocks within the timeout of `connection`.

    Raises ConfigError for certificates that cannot be used and OSError for a peer that cannot be
    trusted; `connection` is closed then.
    """
    if not tls.calls:
        return connection
    context = _made(credentials_of(tls).current().socket)
    return context.wrap_socket(connection, server_hostname=tls.tls_server_name or host)


def _server_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    credentials = credentials_of(tls)
    used = _made(credentials.current().server)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, _made(credentials.current().server)
        return used if used is not before else None

    # gRPC asks before every handshake and takes None for no change, which its stubs do not know.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
    return grpc.dynamic_ssl_server_credentials(
        used, fetch, require_client_authentication=bool(tls.tls_client_ca)
    )


def _made(found: _Made | None) -> _Made:
    assert found is not None, "the settings say that this is not in plaintext"
    return found
