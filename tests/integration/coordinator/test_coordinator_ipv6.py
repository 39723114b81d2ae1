"""A coordinator on IPv6: both APIs, metrics, and workers found by name."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext
from typing import Any

import aiohttp
import pytest

from coordinator.registry import Pool
from kvbraid.testing import FakeCluster
from kvbraid.testing.loopback import has_ipv6

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


async def get(url: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return response.status


async def test_everything_is_reached_over_ipv6(start_stack: Any) -> None:
    stack = await start_stack(server={"host": "::1", "drain_seconds": 5.0})
    addresses = [
        stack.server.address, stack.server.http_address, stack.server.metrics_address,
    ]  # fmt: skip
    assert all(address.startswith("[::1]:") for address in addresses)
    assert (await stack.generate()).tokens[0] == stack.expected()
    status, _, _ = await stack.post("/v1/completions", {"model": "toy", "prompt": "a"})
    assert status == 200
    assert await get(f"http://{stack.server.metrics_address}/metrics") == 200


async def test_the_http_api_on_every_address_takes_both_families(start_stack: Any) -> None:
    stack = await start_stack(server={"host": "::", "advertise_host": "::1", "drain_seconds": 5.0})
    assert await get(f"http://{stack.server.http_address}/health") == 200
    port = stack.server.http_address.rpartition(":")[2]
    assert await get(f"http://127.0.0.1:{port}/health") == 200


async def test_a_name_with_ipv6_addresses_stands_for_workers_at_them(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeCluster() as cluster:
        looked_up = asyncio.Event()

        async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
            looked_up.set()
            found = ["fd00::7", "10.0.0.7"]
            return [
                (socket.AF_INET6, socket.SOCK_STREAM, 0, "", (found[0], port, 0, 0)),
                (socket.AF_INET, socket.SOCK_STREAM, 0, "", (found[1], port)),
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        targets = [*cluster.decode_workers, "dns:decode.example:50053"]
        stack = await start_stack(nullcontext(cluster), decode_workers=targets)
        async with asyncio.timeout(10):
            await looked_up.wait()
        known = {worker.address for worker in stack.server.registry.workers(Pool.DECODE)}
        assert known >= {"[fd00::7]:50053", "10.0.0.7:50053"}
