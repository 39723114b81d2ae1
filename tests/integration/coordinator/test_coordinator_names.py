"""Workers named by DNS while the name server fails."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import nullcontext
from typing import Any

import pytest

from coordinator import registry
from coordinator.registry import Pool
from kvbraid.testing import FakeCluster


class FailingNames:
    """Stands in for a loop's getaddrinfo: fails while `fails`, which ends the waits for lookups."""

    def __init__(self, port: str) -> None:
        self.fails = False
        self._found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", int(port)))]
        self._looked_up = asyncio.Event()

    async def getaddrinfo(self, host: str, port: str, **options: Any) -> list[Any]:
        self._looked_up.set()
        if self.fails:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._found

    async def lookups(self, count: int) -> None:
        for _ in range(count):
            self._looked_up.clear()
            await asyncio.wait_for(self._looked_up.wait(), 10)


async def test_workers_outlive_a_name_server_that_fails(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    async with cluster:
        port = cluster.decode_workers[0].rpartition(":")[2]
        names = FailingNames(port)
        monkeypatch.setattr(registry, "_DNS_REFRESH_S", 0.01)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
        workers = [f"dns:decode.example:{port}"]
        stack = await start_stack(nullcontext(cluster), decode_workers=workers)
        names.fails = True
        with caplog.at_level(logging.WARNING, "coordinator.registry"):
            await names.lookups(4)
        up = [worker.address for worker in stack.server.registry.up(Pool.DECODE)]
        assert up == [f"127.0.0.1:{port}"]
        assert (await stack.generate()).tokens[0] == stack.expected()
        assert sum("cannot resolve" in record.message for record in caplog.records) == 1
        names.fails = False
        await names.lookups(2)
        assert [w.address for w in stack.server.registry.up(Pool.DECODE)] == up
