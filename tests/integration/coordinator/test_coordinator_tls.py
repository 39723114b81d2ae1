"""A coordinator whose front door and whose calls to workers are mutual TLS."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbraid.commands.generation import generate
from kvbraid.errors import UnavailableError
from kvbraid.settings import TlsSettings
from kvbraid.testing import FakeCluster
from kvbraid.testing.certificates import CertificateAuthority
from kvbraid.v1 import coordinator_pb2, generation_pb2

EXAMPLES = Path(__file__).parents[3] / "examples"
PROMPT = list(range(100, 140))
NUM_TOKENS = 24


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


@pytest.fixture
async def secure(
    start_stack: Callable[..., Awaitable[Any]], authority: CertificateAuthority
) -> Any:
    """Every certificate is of `authority`, and everybody asks for one."""
    cluster = FakeCluster(tls=authority.mutual("worker"))
    return await start_stack(cluster, server={"tls": authority.mutual("coordinator")})


@pytest.fixture
async def open_front(
    start_stack: Callable[..., Awaitable[Any]], authority: CertificateAuthority
) -> Any:
    """As `secure`, but clients need no certificate."""
    tls = replace(authority.mutual("coordinator"), tls_client_ca="")
    return await start_stack(FakeCluster(tls=authority.mutual("worker")), server={"tls": tls})


def request() -> coordinator_pb2.GenerateRequest:
    return coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=PROMPT),
        sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    )


async def test_a_request_goes_through_prefill_and_decode(
    secure: Any, authority: CertificateAuthority
) -> None:
    tls = authority.mutual("client")
    answer = await generate(secure.server.address, request(), timeout_s=20, tls=tls)
    assert answer.token_ids == secure.expected()
    assert [len(worker.requests) for worker in (*secure.cluster.prefill, *secure.cluster.decode)]


@pytest.mark.parametrize("has_certificate", [True, False], ids=["a stranger's", "none"])
async def test_a_client_without_a_certificate_of_ours_is_refused(
    secure: Any, authority: CertificateAuthority, tmp_path: Path, has_certificate: bool
) -> None:
    tls = CertificateAuthority(tmp_path, "stranger").mutual("visitor")
    tls = replace(tls, tls_server_ca=authority.path)
    if not has_certificate:
        tls = TlsSettings(tls_server_ca=authority.path)
    with pytest.raises(UnavailableError):
        await generate(secure.server.address, request(), timeout_s=20, tls=tls)
    with pytest.raises(UnavailableError):
        await generate(secure.server.address, request(), timeout_s=20)


def https(authority: CertificateAuthority, client: TlsSettings | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.path)
    if client is not None:
        context.load_cert_chain(client.tls_certificate, client.tls_private_key)
    return context


async def models(stack: Any, context: ssl.SSLContext | None) -> tuple[str, str]:
    """Status line of an answer over a new connection and the serial number of the certificate that
    the server showed; both "" when it ends the connection, by an alert or without one.

    Raises ssl.SSLCertVerificationError when the client does not trust the server.
    """
    host, _, port = stack.server.http_address.rpartition(":")
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=host if context else None
        )
        try:
            writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
            if not (status := await reader.readline()):
                return NO_ANSWER
            shown = writer.get_extra_info("peercert") or {}
            return status.decode().strip(), shown.get("serialNumber", "")
        except (ssl.SSLError, ConnectionError):
            return NO_ANSWER
        finally:
            writer.close()


OK = "HTTP/1.0 200 OK"
NO_ANSWER = "", ""


async def test_the_http_api_asks_for_the_same_certificates(
    secure: Any, authority: CertificateAuthority, tmp_path: Path
) -> None:
    client = authority.mutual("client")
    assert (await models(secure, https(authority, client)))[0] == OK
    assert await models(secure, https(authority)) == NO_ANSWER
    assert await models(secure, None) == NO_ANSWER
    stranger = CertificateAuthority(tmp_path, "stranger")
    with pytest.raises(ssl.SSLCertVerificationError):
        await models(secure, https(stranger, client))


async def test_the_http_api_shows_its_renewed_certificate(
    open_front: Any, authority: CertificateAuthority
) -> None:
    context = https(authority)
    before = [await models(open_front, context) for _ in range(2)]
    authority.issue("coordinator")
    after = await models(open_front, context)
    assert [status for status, _ in (*before, after)] == [OK] * 3
    assert before[0] == before[1] != after


async def test_the_http_api_asks_for_renewed_authorities(
    secure: Any, authority: CertificateAuthority, tmp_path: Path
) -> None:
    """A client of the old authority is not let in after the new one took its place."""
    context = https(authority, authority.mutual("client"))
    assert (await models(secure, context))[0] == OK
    new = CertificateAuthority(tmp_path, "new")
    os.replace(new.path, authority.path)
    assert await models(secure, context) == NO_ANSWER


async def output_of(*command: str, **environ: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    return process.returncode, (output if process.returncode == 0 else errors).decode()


async def test_the_generate_command_takes_flags_over_the_environment(
    secure: Any, authority: CertificateAuthority, tmp_path: Path
) -> None:
    ids = tmp_path / "prompt"
    ids.write_text(json.dumps(PROMPT))
    client = authority.mutual("client")
    command = ["-m", "kvbraid.cli", "generate", f"--target={secure.server.address}", "--json"]
    command += [f"--prompt-ids={ids}", f"--max-tokens={NUM_TOKENS}", "--temperature=0"]
    flags = [
        f"--tls-client-certificate={client.tls_certificate}",
        f"--tls-client-private-key={client.tls_private_key}",
    ]
    environ = {"KVBRAID_TLS_SERVER_CA": authority.path}
    code, output = await output_of(*command, *flags, **environ)
    assert (code, json.loads(output)["token_ids"]) == (0, secure.expected())
    code, output = await output_of(*command, **environ)
    assert code == 1
    assert output.startswith(f"kvbraid generate: {secure.server.address}: ")
    code, output = await output_of(*command, flags[0], **environ)
    assert (code, "accepted are both or none" in output) == (1, True)


async def test_the_example_clients_know_how(
    open_front: Any, authority: CertificateAuthority
) -> None:
    question = "Who?"
    example = str(EXAMPLES / "grpc_client.py")
    code, over_grpc = await output_of(example, open_front.server.address, question, authority.path)
    assert code == 0, over_grpc
    example = str(EXAMPLES / "openai_client.py")
    url = f"https://{open_front.server.http_address}"
    code, over_http = await output_of(example, url, question, SSL_CERT_FILE=authority.path)
    assert code == 0, over_http
    # The same answer, differently counted.
    assert over_grpc.rpartition("[")[0] == over_http.rpartition("[")[0] != ""
