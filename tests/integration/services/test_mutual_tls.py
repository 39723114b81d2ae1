"""All four services, every call between them over mutual TLS."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import handoff
from kvbraid.cluster.local_cluster import LocalCluster
from kvbraid.settings import TlsSettings
from kvbraid.testing.certificates import CertificateAuthority

DRAFTER = Path(__file__).parents[2] / "assets" / "tiny-mla-dspark"
# Nothing takes the short cuts of one host, which TLS is not asked for.
PATIENT = "draft_policy=fixed,draft_timeout_ms=20000,draft_timeout_fraction=100,draft_wire=tcp"
ROLES = ("coordinator", "prefill-0", "decode-0", "draft-0")


class Secret:
    """Files that are replaced all at once, behind a link, as Kubernetes does with a Secret's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_written = 0
        self._link = directory / "tls"
        self.renew()

    def renew(self) -> None:
        """A new authority, and new certificates for services and clients."""
        self._num_written += 1
        version = self._directory / f"version-{self._num_written}"
        version.mkdir()
        days = timedelta(days=self._num_written)
        self.authority = CertificateAuthority(version, ends=10 * days)
        for name in ("service", "client"):
            self.authority.issue(name, ends=days)
        fresh = self._directory / "fresh"
        fresh.symlink_to(version)
        fresh.rename(self._link)

    def mutual(self, name: str) -> TlsSettings:
        """Settings of whoever reads the files behind the link."""
        return TlsSettings(
            tls_certificate=str(self._link / f"{name}.crt"),
            tls_private_key=str(self._link / f"{name}.key"),
            tls_client_ca=str(self._link / "ca.crt"),
            tls_server_ca=str(self._link / "ca.crt"),
        )


@dataclass
class Secured:
    """The running services. client: settings of somebody whom they let in."""

    cluster: LocalCluster
    secret: Secret
    client: TlsSettings

    def address(self, name: str) -> str:
        return self.report(name).grpc

    def report(self, name: str) -> Any:
        return {"coordinator": self.cluster.coordinator, **self.cluster.workers}[name]


def flags(tls: TlsSettings) -> tuple[str, ...]:
    named = {field.name.replace("_", "-"): getattr(tls, field.name) for field in fields(tls)}
    return tuple(f"--{name}={value}" for name, value in named.items() if value)


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory, cluster_of: Callable[..., Any]
) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("mutual-tls")
    secret = Secret(directory)
    with cluster_of(
        directory,
        prefill=("kv_mover=grpc_push",),
        decode=(f"tp=2,dcp=2,kv_mover=grpc_push,{PATIENT}",),
        draft=(f"drafter={DRAFTER},open_wait_ms=60000,ingest_wait_ms=5000",),
        everyone=(*flags(secret.mutual("service")), "--health-port=0"),
    ) as cluster:
        yield Secured(cluster, secret, secret.mutual("client"))


# What says that something went another way than over the calls of these tests.
DETOURS = {
    "coordinator": "kvbraid_coordinator_retries_total",
    "prefill-0": "kvbraid_speculation_push_failures_total",
    "decode-0": "kvbraid_handoff_failures_total",
}


def samples(report: Any, name: str) -> list[float]:
    """Of every series of a metric."""
    with urllib.request.urlopen(f"http://{report.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line)]


@pytest.fixture
async def handed_over(secured: Secured) -> AsyncIterator[None]:
    """Fails where no KV was pushed in the test, or where something took a detour: requests succeed
    without a prefill worker, and tokens are the same without drafts."""

    def counts() -> dict[str, float]:
        found = {
            name: sum(samples(secured.report(name), metric)) for name, metric in DETOURS.items()
        }
        return found | {
            "pushed": sum(samples(secured.report("prefill-0"), "kvbraid_handoff_bytes_total"))
        }

    before = await asyncio.to_thread(counts)
    yield
    after = await asyncio.to_thread(counts)
    assert after.pop("pushed") > before.pop("pushed")
    assert after == before


@pytest.mark.usefixtures("handed_over")
async def test_a_request_streams_through_all_four(
    secured: Secured, support: Any, references: dict[int, Any]
) -> None:
    reference = references[33]
    tokens, num_drafts = [], 0
    async with support.client(secured.address("coordinator"), secured.client) as client:
        async for response in client.start(reference.prompt_ids, len(reference.output_ids)):
            tokens += response.chunk.token_ids
            num_drafts += sum(w.num_draft_tokens for w in response.chunk.windows)
    assert tokens == reference.output_ids
    assert num_drafts > 0


@pytest.mark.parametrize("name", ROLES)
async def test_every_service_asks_for_a_certificate(
    secured: Secured, support: Any, name: str, tmp_path: Path
) -> None:
    ours = secured.client.tls_server_ca
    strangers = CertificateAuthority(tmp_path).mutual("stranger")
    for tls in (
        TlsSettings(),
        TlsSettings(tls_server_ca=ours),
        replace(strangers, tls_server_ca=ours),
        replace(secured.client, tls_server_ca=strangers.tls_server_ca),
    ):
        client = support.client(secured.address(name), tls)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.info()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await client.__aexit__()
    async with support.client(secured.address(name), secured.client) as client:
        assert (await client.info()).role == name.partition("-")[0]


def shown_expiries(report: Any) -> list[float]:
    """Unix times that a process exports: of its certificate and of the authorities, twice."""
    return sorted(samples(report, "kvbraid_tls_certificate_expiry_timestamp_seconds"))


def expiries(secured: Secured) -> list[float]:
    """What it should export of the files that are there now."""
    tls = secured.secret.mutual("service")
    return [
        x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc.timestamp()
        for path in (tls.tls_certificate, tls.tls_client_ca, tls.tls_server_ca)
    ]


@pytest.mark.parametrize("name", ROLES)
def test_every_service_says_when_its_files_expire(secured: Secured, name: str) -> None:
    assert shown_expiries(secured.report(name)) == expiries(secured)


@pytest.mark.parametrize("name", ROLES)
async def test_probes_ask_in_plaintext(secured: Secured, name: str) -> None:
    report = secured.report(name)
    assert report.tls
    async with grpc.aio.insecure_channel(report.health) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("live", report.role):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_benchmarks_call_as_the_environment_says(
    secured: Secured, references: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "KVBRAID_TLS_SERVER_CA": secured.client.tls_server_ca,
        "KVBRAID_TLS_CERTIFICATE": secured.client.tls_certificate,
        "KVBRAID_TLS_PRIVATE_KEY": secured.client.tls_private_key,
    }.items():
        monkeypatch.setenv(name, value)
    await handoff.send(secured.address("coordinator"), [references[45].prompt_ids], 1)
    monkeypatch.delenv("KVBRAID_TLS_SERVER_CA")
    with pytest.raises(grpc.aio.AioRpcError):
        await handoff.send(secured.address("coordinator"), [references[45].prompt_ids], 1)


@pytest.mark.usefixtures("handed_over")
async def test_renewed_certificates_need_no_restart(
    secured: Secured, support: Any, references: dict[int, Any]
) -> None:
    """Last: while a request streams, authority and certificates of everybody become others."""
    early, late = references[14], references[47]
    old = secured.secret.authority.mutual("client")
    address = secured.address("coordinator")
    async with support.client(address, secured.client) as client:
        streamed = client.tokens(client.start(early.prompt_ids, len(early.output_ids)))
        tokens = [await anext(streamed)]
        secured.secret.renew()
        assert tokens + [token async for token in streamed] == early.output_ids
        # The next request needs new connections, also from the coordinator to workers and on.
        assert await client.all_tokens(late.prompt_ids, len(late.output_ids)) == late.output_ids
    for name in ROLES:
        assert shown_expiries(secured.report(name)) == expiries(secured)
        visitor = support.client(secured.address(name), old)
        with pytest.raises(grpc.aio.AioRpcError):
            await visitor.info()
        await visitor.__aexit__()
