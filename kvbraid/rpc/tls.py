"""The only place that opens a port or a channel: in plaintext, over TLS or over mutual TLS.

port = bind(server, "0.0.0.0:50053", settings.tls)
channel = Caller(settings.tls).open("10.0.0.7:50053", options)

Changed certificate files are used for every connection made after the change; connections that
stand are left alone, and so are their calls.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import grpc

from kvbraid.errors import ConfigError
from kvbraid.rpc.certificates import check_tls
from kvbraid.rpc.reloading import Reloaded
from kvbraid.rpc.renewed_channel import RenewedChannel
from kvbraid.settings.tls import TlsSettings

ChannelOptions = Sequence[tuple[str, int | str]]


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
        self._credentials = _channel_credentials(tls) if tls.calls else None

    def open(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel to `address` (host:port), which the caller closes."""
        credentials = self._credentials
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        if self._server_name:
            options = [*options, ("grpc.ssl_target_name_override", self._server_name)]
        return RenewedChannel(
            credentials.current,
            lambda current: grpc.aio.secure_channel(address, current, options=options),
        )


def https_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """For an HTTP server with the certificate and the rules for clients of `bind`; None for
    plaintext. Raises ConfigError for certificates that cannot be used."""
    if not tls.serves:
        return None
    contexts = Reloaded(_server_files(tls), lambda: _https_context(tls))

    def renew(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    # Called at the beginning of every handshake. The context that it hands over has none.
    first = _https_context(tls)
    first.sni_callback = renew
    return first


def _server_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    configurations = Reloaded(_server_files(tls), lambda: _server_configuration(tls))
    used = configurations.current()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, configurations.current()
        return used if used is not before else None

    # gRPC asks before every handshake and takes None for no change, which its stubs do not know.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
    return grpc.dynamic_ssl_server_credentials(
        used, fetch, require_client_authentication=bool(tls.tls_client_ca)
    )


def _server_configuration(tls: TlsSettings) -> grpc.ServerCertificateConfiguration:
    check_tls(tls)
    pair = _read(tls.tls_private_key), _read(tls.tls_certificate)
    authorities = _read(tls.tls_client_ca) if tls.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)


def _https_context(tls: TlsSettings) -> ssl.SSLContext:
    check_tls(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.tls_certificate, tls.tls_private_key)
        if tls.tls_client_ca:
            context.load_verify_locations(cafile=tls.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # an SSLError too: replaced since they were checked
        raise ConfigError(f"certificates: {error}") from error
    return context


def _channel_credentials(tls: TlsSettings) -> Reloaded[grpc.ChannelCredentials]:
    files = [path for path in (tls.tls_server_ca, *tls.shown_pair) if path]
    return Reloaded(files, lambda: _current_channel_credentials(tls))


def _current_channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    check_tls(tls)
    certificate, private_key = (_read(path) if path else None for path in tls.shown_pair)
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.tls_server_ca),
        private_key=private_key,
        certificate_chain=certificate,
    )


def _server_files(tls: TlsSettings) -> list[str]:
    return [path for path in (tls.tls_certificate, tls.tls_private_key, tls.tls_client_ca) if path]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
