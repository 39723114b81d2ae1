"""Who gets through to a server, over which connection, and what a renewal changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from kvbraid.errors import StartupError, UnavailableError
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings, TlsSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.testing.certificates import CertificateAuthority
from kvbraid.testing.loopback import has_ipv6
from kvbraid.v1 import decode_pb2, decode_pb2_grpc

PLAINTEXT = TlsSettings()
NAME = "kvbraid.internal"


class NamingDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Notes who calls; a Decode answers whenever it is told to."""

    def __init__(self) -> None:
        self.callers: list[int] = []
        self.answers: asyncio.Queue[int] = asyncio.Queue()

    async def Abort(self, request: Any, context: Any) -> Any:
        (pem,) = context.auth_context().get("x509_pem_cert", [b""])
        self.callers.append(x509.load_pem_x509_certificate(pem).serial_number if pem else 0)
        return decode_pb2.AbortResponse()

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while answer := await self.answers.get():
            yield decode_pb2.DecodeResponse(num_cached_tokens=answer)


class Running:
    """A server with TLS as it is told."""

    def __init__(self, tls: TlsSettings, host: str = "127.0.0.1") -> None:
        metrics = WorkerMetrics("decode").rpc
        settings = ServerSettings(tls=tls, host=host)
        self.server = RpcServer(role="decode", settings=settings, metrics=metrics)
        self.decode = NamingDecode()
        self.server.add(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server, self.decode, "kvbraid.v1.Decode"
        )

    @asynccontextmanager
    async def client(self, tls: TlsSettings) -> AsyncIterator[Any]:
        async with ChannelPool(ServerSettings(tls=tls)) as pool:
            yield decode_pb2_grpc.DecodeServiceStub(pool.channel(self.server.address))

    async def call(self, tls: TlsSettings) -> None:
        async with self.client(tls) as stub:
            await abort(stub)


async def abort(stub: Any) -> None:
    with translated_rpc_errors("server"):
        await stub.Abort(decode_pb2.AbortRequest(), timeout=20)


def serial(path: str) -> int:
    return x509.load_pem_x509_certificate(Path(path).read_bytes()).serial_number


@asynccontextmanager
async def serving(tls: TlsSettings, host: str = "127.0.0.1") -> AsyncIterator[Running]:
    running = Running(tls, host)
    await running.server.start()
    try:
        yield running
    finally:
        await running.server.stop()


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path, "stranger")


def trusting(authority: CertificateAuthority, **more: str) -> TlsSettings:
    """A client without a certificate of its own."""
    return TlsSettings(tls_server_ca=authority.path, **more)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", *(["::1"] if has_ipv6() else [])])
async def test_both_sides_show_a_certificate(authority: CertificateAuthority, host: str) -> None:
    client = authority.mutual("client")
    async with serving(authority.mutual("server"), host) as running:
        await running.call(client)
        assert running.decode.callers == [serial(client.tls_certificate)]


@pytest.mark.parametrize(
    "client",
    [
        lambda ours, theirs: trusting(ours),
        lambda ours, theirs: PLAINTEXT,
        lambda ours, theirs: replace(theirs.mutual("client"), tls_server_ca=ours.path),
        lambda ours, theirs: replace(ours.mutual("client"), tls_server_ca=theirs.path),
        lambda ours, theirs: replace(ours.mutual("client"), tls_server_name="another.name"),
    ],
    ids=["no certificate", "plaintext", "of a stranger", "trusts a stranger", "another name"],
)
async def test_whoever_does_not_fit_is_refused(
    client: Callable[..., TlsSettings],
    authority: CertificateAuthority,
    stranger: CertificateAuthority,
) -> None:
    async with serving(authority.mutual("server")) as running:
        with pytest.raises(UnavailableError):
            await running.call(client(authority, stranger))
        assert running.decode.callers == []
        await running.call(authority.mutual("fitting"))


async def test_a_server_may_let_clients_in_that_show_nothing(
    authority: CertificateAuthority,
) -> None:
    async with serving(replace(authority.mutual("server"), tls_client_ca="")) as running:
        await running.call(trusting(authority))
        assert running.decode.callers == [0]
        with pytest.raises(UnavailableError):
            await running.call(PLAINTEXT)


async def test_a_client_over_tls_does_not_talk_to_a_plaintext_server(
    authority: CertificateAuthority,
) -> None:
    async with serving(PLAINTEXT) as running:
        with pytest.raises(UnavailableError):
            await running.call(trusting(authority))


async def test_one_name_may_stand_for_all_addresses(authority: CertificateAuthority) -> None:
    """Pods are called by addresses that no certificate knows."""
    files = authority.issue("server", hosts=[NAME])
    tls = TlsSettings(tls_certificate=files.certificate, tls_private_key=files.private_key)
    async with serving(tls) as running:
        with pytest.raises(UnavailableError):
            await running.call(trusting(authority))
        await running.call(trusting(authority, tls_server_name=NAME))


async def test_unusable_certificates_are_a_startup_error(authority: CertificateAuthority) -> None:
    tls = replace(authority.mutual("server"), tls_private_key=authority.path)
    with pytest.raises(StartupError, match="accepted are a PEM certificate and a PEM key"):
        await Running(tls).server.start()


async def test_a_renewed_server_certificate_is_served_to_the_next_client(
    authority: CertificateAuthority, stranger: CertificateAuthority
) -> None:
    tls = authority.mutual("server")
    async with serving(tls) as running, running.client(trusting_all(authority, tls)) as early:
        await abort(early)
        # The same files, signed by another: only who trusts that one can see the difference.
        stranger.issue("server")
        async with running.client(trusting_all(stranger, tls)) as late:
            await abort(late)
        with pytest.raises(UnavailableError):
            await running.call(trusting_all(authority, tls))
        await abort(early)  # its connection stands


def trusting_all(authority: CertificateAuthority, tls: TlsSettings) -> TlsSettings:
    """A client that the server of `tls` knows and that trusts servers of `authority` only."""
    return replace(tls, tls_server_ca=authority.path, **copied_pair(tls))


def copied_pair(tls: TlsSettings) -> dict[str, str]:
    """Settings for a copy of the files, which a renewal of the originals leaves alone."""
    pair = {"tls_certificate": tls.tls_certificate, "tls_private_key": tls.tls_private_key}
    for name, path in pair.items():
        copy = Path(path).with_suffix(Path(path).suffix + ".copy")
        if not copy.exists():
            copy.write_bytes(Path(path).read_bytes())
        pair[name] = str(copy)
    return pair


async def test_a_client_shows_its_renewed_certificate_in_the_next_call(
    authority: CertificateAuthority,
) -> None:
    client = authority.mutual("client")
    async with serving(authority.mutual("server")) as running, running.client(client) as stub:
        await abort(stub)
        await abort(stub)
        before = serial(client.tls_certificate)
        authority.issue("client")
        after = serial(client.tls_certificate)
        await abort(stub)
        assert running.decode.callers == [before, before, after] != [before] * 3


async def test_a_running_call_outlives_the_renewal(authority: CertificateAuthority) -> None:
    async with (
        serving(authority.mutual("server")) as running,
        running.client(authority.mutual("client")) as stub,
    ):
        call = stub.Decode(decode_pb2.DecodeRequest(), timeout=20)
        running.decode.answers.put_nowait(1)
        assert (await call.read()).num_cached_tokens == 1
        authority.issue("client")
        authority.issue("server")
        await abort(stub)
        running.decode.answers.put_nowait(2)
        assert (await call.read()).num_cached_tokens == 2
        running.decode.answers.put_nowait(0)
        assert await call.code() is grpc.StatusCode.OK


async def test_half_a_renewal_keeps_the_old_certificate(authority: CertificateAuthority) -> None:
    tls = authority.mutual("server")
    async with serving(tls) as running:
        whole = replaced(tls.tls_private_key, b"only the first ha")
        await running.call(authority.mutual("client"))
        replaced(tls.tls_private_key, whole)
        await running.call(authority.mutual("client"))


def replaced(path: str, content: bytes) -> bytes:
    """Overwrite a file; returns what was in it."""
    before = Path(path).read_bytes()
    Path(path).write_bytes(content)
    return before
