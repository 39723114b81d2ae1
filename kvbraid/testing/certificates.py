"""Throw-away certificates: an authority and what it signs. Needs the package `cryptography`.

authority = CertificateAuthority(directory)
files = authority.issue("decode")              # decode.crt and decode.key below directory
TlsSettings(tls_certificate=files.certificate, tls_private_key=files.private_key,
            tls_client_ca=authority.path, tls_server_ca=authority.path)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvbraid.settings.tls import TlsSettings

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_DAY = timedelta(days=1)
_PURPOSES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


@dataclass(frozen=True, slots=True)
class IssuedFiles:
    """Paths of a certificate and its key."""

    certificate: str
    private_key: str


class CertificateAuthority:
    """Signs certificates with a key that nobody else has. Files go to `directory`."""

    def __init__(self, directory: Path, name: str = "ca", *, ends: timedelta = _DAY) -> None:
        self._directory = directory
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(
            _described(self._name, self._name, self._key, datetime.now(UTC) + ends).add_extension(
                x509.BasicConstraints(ca=True, path_length=0), critical=True
            ),
            self._key,
        )
        self.path = _replaced(directory / f"{name}.crt", certificate)

    def issue(
        self,
        name: str,
        *,
        hosts: Sequence[str] = _LOOPBACK,
        purposes: Sequence[str] = ("server", "client"),
        ends: timedelta = _DAY,
    ) -> IssuedFiles:
        """A new key and its certificate, for `hosts` (names and addresses) and `purposes`
        (server, client), until `ends` from now; what `name` had before is replaced.

        The key comes first, so that for a moment the pair does not fit, as in a renewal.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        request = _described(_name(name), self._name, key, datetime.now(UTC) + ends)
        usage = x509.ExtendedKeyUsage([_PURPOSES[purpose] for purpose in purposes])
        alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
        request = request.add_extension(usage, critical=False)
        certificate = _signed(request.add_extension(alternatives, critical=False), self._key)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return IssuedFiles(
            private_key=_replaced(self._directory / f"{name}.key", secret),
            certificate=_replaced(self._directory / f"{name}.crt", certificate),
        )

    def mutual(self, name: str, *, server_name: str = "", ends: timedelta = _DAY) -> TlsSettings:
        """Settings of a process that shows a new certificate, until `ends` from now, to everyone
        and asks everyone for one of this authority."""
        files = self.issue(name, ends=ends)
        return TlsSettings(
            tls_certificate=files.certificate,
            tls_private_key=files.private_key,
            tls_client_ca=self.path,
            tls_server_ca=self.path,
            tls_server_name=server_name,
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _described(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - 30 * _DAY)
        .not_valid_after(ends)
    )


def _signed(request: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return request.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _replaced(path: Path, content: bytes) -> str:
    """Writes a file whole or not at all, as renewals do; returns its path."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
    return str(path)
