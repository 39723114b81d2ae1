"""Certificate files that cannot work are told apart before anything listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kvbraid.errors import ConfigError
from kvbraid.rpc.certificates import check_tls, expiries_s, unfit_for_calls
from kvbraid.settings import TlsSettings
from kvbraid.testing.certificates import CertificateAuthority

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


def with_passphrase(path: str) -> None:
    key = load_pem_private_key(Path(path).read_bytes(), None)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    Path(path).write_bytes(text)


def served(authority: CertificateAuthority, name: str, **options: object) -> TlsSettings:
    files = authority.issue(name, **options)
    return TlsSettings(tls_certificate=files.certificate, tls_private_key=files.private_key)


def expired(authority: CertificateAuthority) -> TlsSettings:
    return served(authority, "expired", ends=-HOUR)


def not_yet_valid(authority: CertificateAuthority) -> TlsSettings:
    return served(authority, "future", ends=timedelta(days=31))


def for_clients_only(authority: CertificateAuthority) -> TlsSettings:
    return served(authority, "client", purposes=["client"])


def key_of_another(authority: CertificateAuthority) -> TlsSettings:
    other = authority.issue("other").private_key
    return replace(served(authority, "mine"), tls_private_key=other)


def key_with_passphrase(authority: CertificateAuthority) -> TlsSettings:
    tls = served(authority, "locked")
    with_passphrase(tls.tls_private_key)
    return tls


def no_certificate(authority: CertificateAuthority) -> TlsSettings:
    tls = served(authority, "damaged")
    Path(tls.tls_certificate).write_text("not a certificate")
    return tls


def no_file(authority: CertificateAuthority) -> TlsSettings:
    return replace(served(authority, "gone"), tls_private_key="/nowhere/tls.key")


def no_authority(authority: CertificateAuthority) -> TlsSettings:
    tls = served(authority, "asking")
    return replace(tls, tls_client_ca=tls.tls_private_key)


def shown_by_a_server(authority: CertificateAuthority) -> TlsSettings:
    files = authority.issue("shown", purposes=["server"])
    return TlsSettings(
        tls_server_ca=authority.path,
        tls_client_certificate=files.certificate,
        tls_client_private_key=files.private_key,
    )


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (expired, "expired.crt with the key .*: certificate has expired"),
        (not_yet_valid, "future.crt with the key .*: certificate is not yet valid"),
        (for_clients_only, "tls_certificate is .*client.crt .*: unsuitable certificate purpose"),
        (key_of_another, "the key does not belong to the certificate"),
        (key_with_passphrase, "the key has a passphrase, accepted is one without"),
        (no_certificate, "damaged.crt .*: accepted are a PEM certificate and a PEM key"),
        (no_file, "tls_private_key is /nowhere/tls.key: No such file"),
        (no_authority, "tls_client_ca is .*asking.key: no PEM certificate is in it"),
        (shown_by_a_server, "tls_client_certificate is .*: unsuitable certificate purpose"),
    ],
)
def test_each_fault_has_a_sentence(
    broken: Callable[[CertificateAuthority], TlsSettings],
    reason: str,
    authority: CertificateAuthority,
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_tls(broken(authority))


def test_good_files_are_taken(authority: CertificateAuthority) -> None:
    tls = authority.mutual("decode")
    check_tls(tls)
    assert unfit_for_calls(tls) == ""
    check_tls(TlsSettings())


def test_an_authority_that_has_expired_trusts_nobody(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path, "old", ends=-HOUR)
    with pytest.raises(ConfigError, match=r"old\.crt: every certificate in it has expired"):
        check_tls(TlsSettings(tls_server_ca=authority.path))


def test_all_faults_of_all_files_are_told(authority: CertificateAuthority) -> None:
    tls = replace(expired(authority), tls_client_ca="/nowhere/a.crt", tls_server_ca="/nowhere/b")
    with pytest.raises(ConfigError) as refused:
        check_tls(tls)
    assert len(str(refused.value).split("; ")) == 3


def test_a_certificate_for_servers_only_is_told_where_it_will_be_shown(
    authority: CertificateAuthority,
) -> None:
    tls = served(authority, "front", purposes=["server"])
    check_tls(tls)
    assert unfit_for_calls(tls) == ""
    calling = replace(tls, tls_server_ca=authority.path)
    check_tls(calling)
    assert "unsuitable certificate purpose for calls" in unfit_for_calls(calling)


def end_s(path: str) -> float:
    """Another reader's word for when the first certificate of a file expires."""
    certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
    return certificate.not_valid_after_utc.timestamp()


def joined(path: Path, *parts: str) -> str:
    path.write_bytes(b"".join(Path(part).read_bytes() for part in parts))
    return str(path)


def test_each_file_has_its_expiry(tmp_path: Path) -> None:
    ours = CertificateAuthority(tmp_path, ends=20 * DAY)
    theirs = CertificateAuthority(tmp_path, "theirs", ends=21 * DAY)
    mine, shown = ours.issue("mine", ends=3 * DAY), ours.issue("shown", ends=4 * DAY)
    tls = TlsSettings(
        tls_certificate=mine.certificate,
        tls_private_key=mine.private_key,
        tls_client_certificate=shown.certificate,
        tls_client_private_key=shown.private_key,
        tls_client_ca=theirs.path,
        tls_server_ca=ours.path,
    )
    names = ("tls_certificate", "tls_client_certificate", "tls_client_ca", "tls_server_ca")
    assert expiries_s(tls) == {name: end_s(getattr(tls, name)) for name in names}
    assert expiries_s(TlsSettings()) == {}


def test_a_chain_expires_with_its_first_part(tmp_path: Path) -> None:
    intermediate = CertificateAuthority(tmp_path, "intermediate", ends=5 * DAY)
    leaf = intermediate.issue("leaf", ends=9 * DAY)
    chain = joined(tmp_path / "chain.crt", leaf.certificate, intermediate.path)
    tls = TlsSettings(tls_certificate=chain, tls_private_key=leaf.private_key)
    assert expiries_s(tls) == {"tls_certificate": end_s(intermediate.path)}


def test_authorities_expire_with_their_last(tmp_path: Path) -> None:
    """While one is replaced by another, both are in the file."""
    old = CertificateAuthority(tmp_path, "old", ends=2 * DAY)
    new = CertificateAuthority(tmp_path, "new", ends=25 * DAY)
    bundle = joined(tmp_path / "bundle.crt", new.path, old.path)
    assert expiries_s(TlsSettings(tls_server_ca=bundle)) == {"tls_server_ca": end_s(new.path)}


def test_a_trusted_certificate_that_is_no_authority_has_no_date(
    authority: CertificateAuthority,
) -> None:
    tls = TlsSettings(tls_server_ca=authority.issue("pinned").certificate)
    check_tls(tls)
    assert expiries_s(tls) == {}


def test_files_replaced_since_they_were_checked_are_an_error_that_is_caught(
    authority: CertificateAuthority,
) -> None:
    with pytest.raises(OSError, match="No such file"):
        expiries_s(no_file(authority))
    with pytest.raises(OSError, match="SSL"):
        expiries_s(no_certificate(authority))
