"""What is wrong with certificate files, told before they are used.

OpenSSL itself judges: a key pair shakes hands with a peer that trusts just its certificate, which
fails for whatever the real handshake would fail for: another key, wrong dates, another purpose.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kvbraid.errors import ConfigError
from kvbraid.settings.tls import TlsSettings

Purpose = Literal["server", "client"]

# Turns of a handshake in memory; TLS 1.3 needs two a side.
_MAX_TURNS = 8


def check_tls(tls: TlsSettings) -> None:
    """Raises ConfigError with every reason why the files of `tls` cannot be used."""
    if faults := list(tls_faults(tls)):
        raise ConfigError("; ".join(faults))


def tls_faults(tls: TlsSettings) -> Iterator[str]:
    """Every reason why the files of `tls` cannot be used, each naming setting and file."""
    if tls.tls_certificate:
        yield from _pair_faults(
            "tls_certificate", tls.tls_certificate, "tls_private_key", tls.tls_private_key, "server"
        )
    if tls.tls_client_certificate:
        yield from _pair_faults(
            "tls_client_certificate",
            tls.tls_client_certificate,
            "tls_client_private_key",
            tls.tls_client_private_key,
            "client",
        )
    for name in ("tls_client_ca", "tls_server_ca"):
        if path := getattr(tls, name):
            yield from _authority_faults(name, path)


def unfit_for_calls(tls: TlsSettings) -> str:
    """Why servers that ask for a certificate will refuse the one they are shown; "" when they
    need not. `check_tls` has accepted the files.

    A certificate for servers only is no error: the called processes may ask for none.
    """
    if not tls.calls or not tls.tls_certificate or tls.tls_client_certificate:
        return ""
    fault = _handshake_fault(*tls.shown_pair, "client")
    return f"tls_certificate is {tls.tls_certificate}: {fault} for calls" if fault else ""


def _pair_faults(
    name: str, certificate: str, key_name: str, private_key: str, purpose: Purpose
) -> Iterator[str]:
    files = {name: certificate, key_name: private_key}
    unreadable = [fault for setting, path in files.items() if (fault := _unreadable(setting, path))]
    yield from unreadable
    if not unreadable and (fault := _handshake_fault(certificate, private_key, purpose)):
        yield f"{name} is {certificate} with the key {private_key}: {fault}"


def _authority_faults(name: str, path: str) -> Iterator[str]:
    if unreadable := _unreadable(name, path):
        yield unreadable
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        yield f"{name} is {path}: no PEM certificate is in it"
        return
    ends_s = [ssl.cert_time_to_seconds(str(ca["notAfter"])) for ca in context.get_ca_certs()]
    if ends_s and max(ends_s) < time.time():
        yield f"{name} is {path}: every certificate in it has expired"


def _unreadable(name: str, path: str) -> str:
    try:
        Path(path).read_bytes()
    except OSError as error:
        return f"{name} is {path}: {error.strerror}"
    return ""


def _handshake_fault(certificate: str, private_key: str, purpose: Purpose) -> str:
    """Why the pair cannot stand for a server, or for a client; "" when it can."""
    asked_for_passphrase = False

    def passphrase() -> bytes:
        nonlocal asked_for_passphrase
        asked_for_passphrase = True
        return b""

    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    checker = client if purpose == "server" else server
    try:
        for context in (server, client):
            context.load_cert_chain(certificate, private_key, password=passphrase)
        checker.load_verify_locations(cafile=certificate)
        checker.verify_mode = ssl.CERT_REQUIRED
        checker.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        if asked_for_passphrase:
            return "the key has a passphrase, accepted is one without"
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key does not belong to the certificate"
        return "accepted are a PEM certificate and a PEM key"
    return ""


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_MAX_TURNS):
        waiting = []
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(end)
        if not waiting:
            return
    raise ssl.SSLError("the handshake does not end")
