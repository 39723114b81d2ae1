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


async def test_a_name_that_cannot_be_one_is_told_of_once(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A label has at most 63 characters. Workers under other names are found all the same."""
    monkeypatch.setattr(registry, "_RECONNECT_S", 0.01)
    cluster = FakeCluster()
    async with cluster:
        workers = [f"dns:{'d' * 64}.example:50053", *cluster.decode_workers]
        with caplog.at_level(logging.WARNING, "coordinator.registry"):
            stack = await start_stack(nullcontext(cluster), decode_workers=workers)
            assert (await stack.generate()).tokens[0] == stack.expected()
        assert sum("cannot resolve" in record.message for record in caplog.records) == 1


async def test_addresses_of_a_name_come_in_their_order(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else coordinators that start while two sets of weights serve disagree on which is served."""
    cluster = FakeCluster()
    async with cluster:
        port = cluster.decode_workers[0].rpartition(":")[2]
        names = FailingNames(port)
        hosts = [f"127.0.0.{last}" for last in range(9, 1, -1)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (h, int(port))) for h in hosts]
        monkeypatch.setattr(names, "_found", found)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
        workers = [*cluster.decode_workers, f"dns:decode.example:{port}"]
        stack = await start_stack(nullcontext(cluster), decode_workers=workers)
        addresses = [worker.address for worker in stack.server.registry.workers(Pool.DECODE)]
        assert addresses[1:] == sorted(f"{host}:{port}" for host in hosts)


async def test_a_worker_that_two_entries_name_goes_with_the_last_of_them(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster()
    async with cluster:
        (address,) = cluster.decode_workers
        port = address.rpartition(":")[2]
        names = FailingNames(port)
        monkeypatch.setattr(registry, "_DNS_REFRESH_S", 0.01)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
        entries = [f"dns:one.example:{port}", f"dns:other.example:{port}", address]
        stack = await start_stack(nullcontext(cluster), decode_workers=entries)
        known = stack.server.registry.workers

        async def are_known(*addresses: str) -> None:
            async with asyncio.timeout(5):
                while {worker.address for worker in known(Pool.DECODE)} != set(addresses):
                    await names.lookups(1)

        await are_known(address)
        elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.9", int(port)))]
        monkeypatch.setattr(names, "_found", elsewhere)
        await are_known(address, f"127.0.0.9:{port}")
        assert (await stack.generate()).tokens[0] == stack.expected()
        monkeypatch.setattr(names, "_found", [])
        await are_known(address)
