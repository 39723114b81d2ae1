"""Probes over the network, as a kubelet makes them: a fresh connection each time."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


async def probe(spec: dict[str, Any], address: str) -> str:
    """Empty when the probe succeeds, else why not. spec: as in a pod, ports already numbers."""
    try:
        async with asyncio.timeout(spec.get("timeoutSeconds", 1)):
            if "grpc" in spec:
                return await _grpc(spec["grpc"], address)
            if "httpGet" in spec:
                return await _http(spec["httpGet"], address)
            return await _tcp(spec["tcpSocket"], address)
    except TimeoutError:
        return "no answer in time"
    except (OSError, aiohttp.ClientError) as error:
        return f"{type(error).__name__}: {error}"
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"


async def _grpc(action: dict[str, Any], address: str) -> str:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"{address}:{action['port']}", options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=action.get("service", "")))
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "" if serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def _http(action: dict[str, Any], address: str) -> str:
    scheme = action.get("scheme", "HTTP").lower()
    url = f"{scheme}://{address}:{action['port']}{action['path']}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return "" if 200 <= answer.status < 400 else f"HTTP status {answer.status}"


async def _tcp(action: dict[str, Any], address: str) -> str:
    _, writer = await asyncio.open_connection(address, action["port"])
    writer.close()
    return ""
