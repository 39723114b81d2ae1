"""What is wrong with certificate files, told before they are used, and when they expire.

OpenSSL itself judges: a key pair shakes hands with a peer that trusts just its certificate, which
fails for whatever the real handshake would fail for: another key, wrong dates, another purpose.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    for pair in _pairs(tls):
        yield from _pair_faults(pair)
    for name, path in _authorities(tls):
        yield from _authority_faults(name, path)


def expiries_s(tls: TlsSettings) -> dict[str, float]:
    """Unix time at which the content of each file expires, by the setting that names the file.

    A certificate does with the first of its chain: clients refuse the chain from then on.
    Authorities do with the last of them: until then there is one to trust. Authorities without a
    date, a certificate that is trusted though it is none, are left out. `check_tls` has accepted
    the files; raises OSError, an ssl.SSLError perhaps, where they were replaced since.
    """
    chains = {p.name: _chain_ends_s(p.certificate, p.private_key, p.purpose) for p in _pairs(tls)}
    found = {name: min(ends_s) for name, ends_s in chains.items()}
    for name, path in _authorities(tls):
        if ends_s := _authority_ends_s(path):
            found[name] = max(ends_s)
    return found


def unfit_for_calls(tls: TlsSettings) -> str:
    """Why servers that ask for a certificate will refuse the one they are shown; "" when they
    need not. `check_tls` has accepted the files.

    A certificate for servers only is no error: the called processes may ask for none.
    """
    if not tls.calls or not tls.tls_certificate or tls.tls_client_certificate:
        return ""
    fault = _handshake_fault(*tls.shown_pair, "client")
    return f"tls_certificate is {tls.tls_certificate}: {fault} for calls" if fault else ""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key: settings and paths."""

    name: str
    certificate: str
    key_name: str
    private_key: str
    purpose: Purpose


def _pairs(tls: TlsSettings) -> Iterator[_Pair]:
    if tls.tls_certificate:
        yield _Pair(
            "tls_certificate", tls.tls_certificate, "tls_private_key", tls.tls_private_key, "server"
        )
    if tls.tls_client_certificate:
        yield _Pair(
            "tls_client_certificate",
            tls.tls_client_certificate,
            "tls_client_private_key",
            tls.tls_client_private_key,
            "client",
        )


def _authorities(tls: TlsSettings) -> Iterator[tuple[str, str]]:
    """Setting and path."""
    for name in ("tls_client_ca", "tls_server_ca"):
        if path := getattr(tls, name):
            yield name, path


def _pair_faults(pair: _Pair) -> Iterator[str]:
    files = {pair.name: pair.certificate, pair.key_name: pair.private_key}
    unreadable = [fault for setting, path in files.items() if (fault := _unreadable(setting, path))]
    yield from unreadable
    if unreadable:
        return
    if fault := _handshake_fault(pair.certificate, pair.private_key, pair.purpose):
        yield f"{pair.name} is {pair.certificate} with the key {pair.private_key}: {fault}"


def _authority_faults(name: str, path: str) -> Iterator[str]:
    if unreadable := _unreadable(name, path):
        yield unreadable
        return
    try:
        ends_s = _authority_ends_s(path)
    except ssl.SSLError:
        yield f"{name} is {path}: no PEM certificate is in it"
        return
    if ends_s and max(ends_s) < time.time():
        yield f"{name} is {path}: every certificate in it has expired"


def _authority_ends_s(path: str) -> list[float]:
    """Unix time at which each authority in a file expires. Raises OSError, as ssl.SSLError for a
    file without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=path)
    return [_end_s(authority) for authority in context.get_ca_certs()]


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

    try:
        _chain_ends_s(certificate, private_key, purpose, passphrase)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        if asked_for_passphrase:
            return "the key has a passphrase, accepted is one without"
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key does not belong to the certificate"
        return "accepted are a PEM certificate and a PEM key"
    return ""


def _chain_ends_s(
    certificate: str,
    private_key: str,
    purpose: Purpose,
    passphrase: Callable[[], bytes] = bytes,
) -> list[float]:
    """Unix time at which the certificate expires, and each authority in the same file, as a peer
    reads them that trusts just this file. Raises OSError, as ssl.SSLError where the handshake
    fails."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(certificate, private_key, password=passphrase)
    checker = client if purpose == "server" else server
    checker.load_verify_locations(cafile=certificate)
    checker.verify_mode = ssl.CERT_REQUIRED
    checker.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_end, server_end = _shake_hands(client, server)
    shown = (client_end if purpose == "server" else server_end).getpeercert()
    assert shown, "the handshake has required a certificate"
    return [_end_s(shown), *(_end_s(authority) for authority in checker.get_ca_certs())]


def _end_s(certificate: Mapping[str, object]) -> float:
    return ssl.cert_time_to_seconds(str(certificate["notAfter"]))


def _shake_hands(
    client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a connection in memory, the client's first. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_MAX_TURNS):
        waiting = []
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(end)
        if not waiting:
            return ends
    raise ssl.SSLError("the handshake does not end")
