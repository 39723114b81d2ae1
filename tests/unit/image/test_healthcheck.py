"""The image's health check against a real server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvbraid.rpc.ready import write_ready
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.testing.certificates import CertificateAuthority

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "docker" / "healthcheck.py"


async def check(ready_file: Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        env={"KVBRAID_READY_FILE": str(ready_file), "http_proxy": "http://127.0.0.1:9"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, output.decode()


async def test_it_follows_the_service_from_start_through_drain(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    code, output = await check(ready_file)
    assert (code, output) == (1, f"not ready: there is no {ready_file}\n")

    metrics = WorkerMetrics(role="decode")
    server = RpcServer(role="decode", settings=ServerSettings(), metrics=metrics.rpc)
    await server.start()
    try:
        await server.set_serving(True)
        write_ready(ready_file, server.ready_report(metrics=""))
        code, output = await check(ready_file)
        assert (code, output) == (0, f"{server.address} is SERVING\n")
        await server.drain()
        code, output = await check(ready_file)
        assert (code, output) == (1, f"{server.address} is NOT_SERVING\n")
    finally:
        await server.stop()
    code, output = await check(ready_file)
    assert code == 1
    assert "does not answer" in output


@pytest.mark.parametrize("health_port", [None, 0])
async def test_under_tls_it_asks_the_health_port(tmp_path: Path, health_port: int | None) -> None:
    tls = CertificateAuthority(tmp_path).mutual("decode")
    settings = ServerSettings(tls=tls, health_port=health_port)
    server = RpcServer(role="decode", settings=settings, metrics=WorkerMetrics(role="decode").rpc)
    await server.start()
    try:
        await server.set_serving(True)
        report = server.ready_report(metrics="")
        write_ready(tmp_path / "ready", report)
        code, output = await check(tmp_path / "ready")
    finally:
        await server.stop()
    if health_port is None:
        assert (code, "set health_port" in output) == (1, True)
    else:
        assert (code, output) == (0, f"{report.health} is SERVING\n")


@pytest.mark.parametrize("text", ["", "{}"])
async def test_a_file_that_is_no_report_is_a_failure(tmp_path: Path, text: str) -> None:
    ready_file = tmp_path / "ready"
    ready_file.write_text(text)
    code, _ = await check(ready_file)
    assert code == 1
