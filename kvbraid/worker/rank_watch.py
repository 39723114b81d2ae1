"""Keeps the metrics of one rank current, whichever it is, and serves them on ranks above 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from attention.interface import Group
from kvbraid.address import join_address
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.endpoint import MetricsEndpoint
from kvbraid.telemetry.loop_lag import sample_loop_lag
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.worker.endpoints import gather_addresses
from kvbraid.worker.memory import free_bytes

_MEMORY_INTERVAL_S = 1.0


async def watch_rank(metrics: WorkerMetrics, device: torch.device) -> None:
    """Samples what a rank alone knows until cancelled."""
    lag = sample_loop_lag(metrics.rank.loop_lag_seconds.observe)
    await asyncio.gather(lag, _sample_memory(metrics, device))


async def follow_ranks(metrics: WorkerMetrics, own_address: str, group: Group) -> None:
    """On rank 0: from now on its endpoint shows every rank. A collective with `served_rank`."""
    addresses = await asyncio.to_thread(gather_addresses, own_address, group)
    metrics.all_ranks.follow({rank: a for rank, a in addresses.items() if rank > 0})


def rank_endpoint(metrics: WorkerMetrics, server: ServerSettings, rank: int) -> MetricsEndpoint:
    """Of a rank above 0, at metrics_port + rank or any port. Raises StartupError when the port is
    taken."""
    port = server.metrics_port and server.metrics_port + rank
    return MetricsEndpoint(metrics.rank.registry, host=server.host, port=port)


@asynccontextmanager
async def served_rank(
    endpoint: MetricsEndpoint,
    metrics: WorkerMetrics,
    server: ServerSettings,
    group: Group,
    device: torch.device,
) -> AsyncIterator[None]:
    """On a rank above 0: inside the block rank 0 knows its endpoint, which is closed afterwards.
    A collective with `follow_ranks`."""
    with endpoint:
        address = join_address(server.reachable_host, endpoint.port)
        await asyncio.to_thread(gather_addresses, address, group)
        watching = asyncio.create_task(watch_rank(metrics, device))
        try:
            yield
        finally:
            watching.cancel()


async def _sample_memory(metrics: WorkerMetrics, device: torch.device) -> None:
    while True:
        metrics.rank.free_memory_bytes.set(free_bytes(device))
        await asyncio.sleep(_MEMORY_INTERVAL_S)
