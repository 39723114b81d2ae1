"""All of a process uses the same files, and its metrics say which: without a connection too."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry

from kvbraid.errors import ConfigError
from kvbraid.rpc.credentials import credentials_of
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, TlsSettings
from kvbraid.telemetry.metrics import CoordinatorMetrics, DraftServiceMetrics, WorkerMetrics
from kvbraid.testing.certificates import CertificateAuthority

DAY = timedelta(days=1)
EXPIRY = "kvbraid_tls_certificate_expiry_timestamp_seconds"
REFUSED = "kvbraid_tls_refused_renewals"


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path, ends=20 * DAY)


@asynccontextmanager
async def serving(tls: TlsSettings, metrics: Any = None) -> AsyncIterator[CollectorRegistry]:
    """What a server that nobody connects to exports."""
    metrics = metrics or WorkerMetrics("decode")
    server = RpcServer(role="any", settings=ServerSettings(tls=tls), metrics=metrics.rpc)
    await server.start()
    yield metrics.registry
    await server.stop()


def expiries(registry: CollectorRegistry) -> dict[str, float]:
    """By setting, as they are scraped."""
    (family,) = (family for family in registry.collect() if family.name == EXPIRY)
    return {sample.labels["setting"]: sample.value for sample in family.samples}


def end_s(path: str) -> float:
    certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
    return certificate.not_valid_after_utc.timestamp()


def replaced(path: str, content: bytes) -> bytes:
    """Overwrite a file; returns what was in it."""
    before = Path(path).read_bytes()
    Path(path).write_bytes(content)
    return before


@pytest.mark.parametrize(
    "made",
    [
        CoordinatorMetrics,
        lambda: WorkerMetrics("prefill"),
        lambda: WorkerMetrics("decode"),
        DraftServiceMetrics,
    ],
    ids=["coordinator", "prefill", "decode", "draft"],
)
async def test_a_role_says_when_its_files_expire(
    made: Callable[[], Any], authority: CertificateAuthority
) -> None:
    tls = authority.mutual("service")
    async with serving(tls, made()) as registry:
        names = ("tls_certificate", "tls_client_ca", "tls_server_ca")
        assert expiries(registry) == {name: end_s(getattr(tls, name)) for name in names}
        assert registry.get_sample_value(REFUSED) == 0


async def test_nothing_expires_without_certificates() -> None:
    async with serving(TlsSettings()) as registry:
        assert expiries(registry) == {}
        assert registry.get_sample_value(REFUSED) == 0


async def test_who_only_calls_says_when_its_files_expire(authority: CertificateAuthority) -> None:
    files = authority.issue("shown", ends=3 * DAY)
    tls = TlsSettings(
        tls_server_ca=authority.path,
        tls_client_certificate=files.certificate,
        tls_client_private_key=files.private_key,
    )
    async with serving(tls) as registry:
        assert expiries(registry) == {
            "tls_client_certificate": end_s(files.certificate),
            "tls_server_ca": end_s(authority.path),
        }


async def test_a_renewal_shows_without_a_connection(authority: CertificateAuthority) -> None:
    tls = authority.mutual("service")
    async with serving(tls) as registry:
        before = expiries(registry)["tls_certificate"]
        authority.issue("service", ends=9 * DAY)
        after = expiries(registry)["tls_certificate"]
        assert after == end_s(tls.tls_certificate) > before


async def test_a_refused_renewal_shows_until_it_is_whole(authority: CertificateAuthority) -> None:
    tls = authority.mutual("service")
    async with serving(tls) as registry:
        before = expiries(registry)
        authority.issue("service", ends=9 * DAY)
        whole = replaced(tls.tls_private_key, b"only the first ha")
        assert registry.get_sample_value(REFUSED) == 1
        assert expiries(registry) == before
        replaced(tls.tls_private_key, whole)
        assert registry.get_sample_value(REFUSED) == 0
        assert expiries(registry)["tls_certificate"] == end_s(tls.tls_certificate)


async def test_files_that_vanish_are_a_refused_renewal(authority: CertificateAuthority) -> None:
    tls = authority.mutual("service")
    async with serving(tls) as registry:
        before = expiries(registry)
        os.unlink(tls.tls_client_ca)
        assert registry.get_sample_value(REFUSED) == 1
        assert expiries(registry) == before


def test_servers_and_channels_change_together(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """A renewed pair waits for the authorities that another Secret brings later, and no longer."""
    others = CertificateAuthority(tmp_path, "others")
    tls = replace(authority.mutual("service"), tls_server_ca=others.path)
    credentials = credentials_of(tls)
    before = credentials.current()
    whole = replaced(others.path, b"only the first ha")
    authority.issue("service", ends=9 * DAY)
    assert credentials.current() is before
    replaced(others.path, whole)
    after = credentials.current()
    assert after.expiries_s["tls_certificate"] == end_s(tls.tls_certificate)
    for name in ("server", "https", "channel"):
        assert getattr(after, name) is not getattr(before, name)


def test_whoever_asks_gets_the_same(authority: CertificateAuthority) -> None:
    tls = authority.mutual("service")
    assert credentials_of(tls) is credentials_of(replace(tls))
    plaintext = credentials_of(TlsSettings()).current()
    assert (plaintext.server, plaintext.https, plaintext.channel) == (None, None, None)


def test_unusable_files_are_refused_with_their_reasons(authority: CertificateAuthority) -> None:
    tls = replace(authority.mutual("service"), tls_private_key="/nowhere/tls.key")
    with pytest.raises(ConfigError, match=r"tls_private_key is /nowhere/tls\.key: No such file"):
        credentials_of(tls)
