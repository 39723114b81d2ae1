"""What servers and channels take of certificate files, made anew when the files change.

credentials = credentials_of(settings.tls)
credentials.current().server               # for the next connection
"""

from __future__ import annotations

import functools
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvbraid.errors import ConfigError
from kvbraid.rpc.certificates import check_tls, expiries_s
from kvbraid.rpc.reloading import Reloaded
from kvbraid.settings.tls import TlsSettings
from kvbraid.telemetry.tls_metrics import TlsMetrics

_WITH_EXPIRY = ("tls_certificate", "tls_client_certificate", "tls_client_ca", "tls_server_ca")


@dataclass(frozen=True, slots=True)
class Credentials:
    """All are of the same files. None: for what the settings do in plaintext. https: to serve with
    on a socket without gRPC; socket: to call with on one.

    expiries_s: Unix time by setting, see `certificates.expiries_s`.
    """

    server: grpc.ServerCertificateConfiguration | None
    https: ssl.SSLContext | None
    channel: grpc.ChannelCredentials | None
    socket: ssl.SSLContext | None
    expiries_s: Mapping[str, float]


@functools.cache
def credentials_of(tls: TlsSettings) -> Reloaded[Credentials]:
    """The one for these settings in this process: what it serves with, what it calls with and what
    its metrics say of them change together.

    Raises ConfigError, with every reason, for files that cannot be used to begin with.
    """
    return Reloaded(tls.files, lambda: _credentials(tls))


def show_expiries(tls: TlsSettings, metrics: TlsMetrics) -> None:
    """Let `metrics` say at every scrape what the next connection would be made with: also in a
    process whose connections all stand, so that nothing else looks at the files.

    Raises ConfigError for files that cannot be used.
    """
    if not tls.files:
        return
    credentials = credentials_of(tls)

    def expiry_s(setting: str) -> float:
        return credentials.current().expiries_s.get(setting, math.nan)

    for setting in filter(functools.partial(getattr, tls), _WITH_EXPIRY):
        metrics.expiry_s.labels(setting=setting).set_function(functools.partial(expiry_s, setting))
    metrics.refused_renewals.set_function(lambda: credentials.fault() != "")


def _credentials(tls: TlsSettings) -> Credentials:
    try:
        check_tls(tls)
        return Credentials(
            server=_server_configuration(tls) if tls.serves else None,
            https=_https_context(tls) if tls.serves else None,
            channel=_channel_credentials(tls) if tls.calls else None,
            socket=_socket_context(tls) if tls.calls else None,
            expiries_s=expiries_s(tls),
        )
    except OSError as error:  # an SSLError too: replaced since they were checked
        raise ConfigError(f"certificates: {error}") from error


def _server_configuration(tls: TlsSettings) -> grpc.ServerCertificateConfiguration:
    pair = _read(tls.tls_private_key), _read(tls.tls_certificate)
    authorities = _read(tls.tls_client_ca) if tls.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)


def _https_context(tls: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.tls_certificate, tls.tls_private_key)
    if tls.tls_client_ca:
        context.load_verify_locations(cafile=tls.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    certificate, private_key = (_read(path) if path else None for path in tls.shown_pair)
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.tls_server_ca),
        private_key=private_key,
        certificate_chain=certificate,
    )


def _socket_context(tls: TlsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.tls_server_ca)
    certificate, private_key = tls.shown_pair
    if certificate:
        context.load_cert_chain(certificate, private_key)
    return context


def _read(path: str) -> bytes:
    return Path(path).read_bytes()
