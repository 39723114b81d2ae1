"""Source and destination ranks on real gRPC servers, driven as their engine threads would."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from kvbraid.errors import KVBraidError
from kvbraid.kv.handoff import KvLayout, plan_handoff, ranks_heads
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.kv.slots import LogicalSlots, slots_of
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.server import RpcServer
from kvbraid.rpc.status import error_from_rpc
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import RpcMetrics
from kvbraid.transport.frame import FrameHeader, encode_head
from kvbraid.transport.grants import Grant, GrantTable, new_transfer_id
from kvbraid.transport.mover import MoverChoice
from kvbraid.transport.outbox import Lane
from kvbraid.transport.push_service import PUSH, SERVICE_NAME, push_handlers
from kvbraid.transport.receiver import KvReceiver
from kvbraid.transport.sender import KvSender
from kvbraid.transport.staging import SharedMemory, StagingRing
from kvbraid.v1.kv_transfer_pb2 import PushResponse

INCARNATION = 77
GENERATION = 5
LENGTH = 53
DRIVE_SECONDS = 20.0


def golden(layout: KvLayout, length: int = LENGTH) -> torch.Tensor:
    """[layers, length, KV heads, row_width], every row different."""
    shape = (layout.num_layers, length, layout.num_kv_heads, layout.row_width)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return values.to(getattr(torch, layout.dtype))


class RankPool(ABC):
    """One rank's pool, all NaN, with one sequence's shuffled pages."""

    def __init__(self, layout: KvLayout, rank: int, length: int = LENGTH) -> None:
        self.stripe = layout.stripe(rank)
        self.heads = ranks_heads(layout, rank)
        width = layout.row_width
        sizes = (width, 0) if layout.kind == "mla" else (width // 2, width // 2)
        dtype = getattr(torch, layout.dtype)
        spec = KvSpec(layout.kind, layout.num_layers, len(self.heads), *sizes, dtype)
        num_pages = -(-length // self.stripe.logical_page_size)
        self.pool = StripedPagePool(spec, num_pages + 3, self.stripe, "cpu")
        self.pool.fill_nan()
        self.pages = np.random.default_rng(rank).permutation(np.arange(1, num_pages + 1))
        everywhere = np.arange(length)
        self.owned = everywhere[[self.stripe.owner(p) == self.stripe.dcp_rank for p in everywhere]]

    @abstractmethod
    def step(self) -> int:
        """What the rank's engine thread does between two steps; returns the bytes moved."""

    def slots(self, positions: NDArray[np.int64] | NDArray[np.int32]) -> LogicalSlots:
        return slots_of(self.pages, positions, self.stripe.logical_page_size)

    def rows(self, positions: NDArray[np.int64]) -> torch.Tensor:
        layers, heads = range(self.pool.spec.num_layers), range(len(self.heads))
        return self.pool.gather(self.slots(positions), layers, heads)


class SourceRank(RankPool):
    """A rank that has computed its share of the golden rows."""

    def __init__(
        self, layout: KvLayout, rank: int, channels: ChannelPool, mover: MoverChoice, **options: Any
    ) -> None:
        super().__init__(layout, rank)
        self.rank = rank
        self.layout = layout
        self.sender = KvSender(rank=rank, channels=channels.channel, mover_choice=mover, **options)
        rows = golden(layout)[:, self.owned][:, :, self.heads.start : self.heads.stop]
        layers, heads = range(layout.num_layers), range(len(self.heads))
        self.pool.scatter(self.slots(self.owned), layers, heads, rows)

    def begin(self, grant: Grant) -> None:
        runs = plan_handoff(self.layout, grant.layout, grant.first_position, grant.end_position)
        mine = [run for run in runs if run.src_rank == self.rank]
        self.sender.begin(grant, mine, self.layout.num_layers, self.layout.row_bytes)

    def gather(
        self, transfer_id: bytes, layers: range, heads: range, positions: NDArray[np.int32]
    ) -> memoryview:
        first = heads.start - self.heads.start
        local = range(first, first + len(heads))
        packed = self.pool.gather(self.slots(positions), layers, local)
        return memoryview(packed.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]

    def step(self) -> int:
        return self.sender.pump(self.gather, 1 << 20)

    def frame(self, grant: Grant, number: int = 0, **changes: Any) -> bytes:
        """All rows of the grant that this rank holds for rank 0, as one frame."""
        runs = plan_handoff(self.layout, grant.layout, grant.first_position, grant.end_position)
        run = next(r for r in runs if r.src_rank == self.rank and r.dst_rank == 0)
        layers = range(self.layout.num_layers)
        payload = self.gather(grant.transfer_id, layers, run.heads, run.positions)
        header = FrameHeader(
            src_rank=self.rank,
            dst_rank=0,
            transfer_id=grant.transfer_id,
            incarnation=grant.incarnation,
            generation=grant.generation,
            number=number,
            layer_start=0,
            num_layers=len(layers),
            head_start=run.heads.start,
            num_heads=len(run.heads),
            num_positions=len(run.positions),
            payload_bytes=payload.nbytes,
        )
        return encode_head(replace(header, **changes), run.positions, payload) + bytes(payload)


class DestinationRank(RankPool):
    """A rank that takes rows on its own port."""

    def __init__(
        self, layout: KvLayout, rank: int, num_slots: int = 4, slot_bytes: int = 512
    ) -> None:
        super().__init__(layout, rank)
        self.layout = layout
        self.now = 0.0
        self.num_clock_reads = 0
        self.grants = GrantTable(rank=rank, incarnation=INCARNATION, clock=self.clock)
        self.ring = StagingRing(num_slots, slot_bytes, SharedMemory(slot_bytes))
        self.receiver = KvReceiver(grants=self.grants, ring=self.ring)
        self.server = RpcServer(
            role="decode",
            settings=ServerSettings(host="127.0.0.1", port=0),
            metrics=RpcMetrics(CollectorRegistry()),
        )
        self.server.add_generic(push_handlers(self.receiver), SERVICE_NAME)

    def clock(self) -> float:
        """Read whenever a lease is renewed."""
        self.num_clock_reads += 1
        return self.now

    def scatter(
        self, header: FrameHeader, positions: NDArray[np.int32], payload: memoryview
    ) -> None:
        layers = range(header.layer_start, header.layer_start + header.num_layers)
        first = header.head_start - self.heads.start
        heads = range(first, first + header.num_heads)
        packed = self.pool.packed_from_bytes(payload, len(layers), len(heads))
        self.pool.scatter(self.slots(positions), layers, heads, packed)

    def step(self) -> int:
        return self.receiver.poll(self.scatter, 1 << 20)

    def assert_landed(self, first: int = 0, end: int = LENGTH) -> None:
        """The rank holds its rows of [first, end), bit for bit, and nothing else was written."""
        layout = self.layout
        owned = self.owned[(self.owned >= first) & (self.owned < end)]
        expected = golden(layout)[:, owned][:, :, self.heads.start : self.heads.stop]
        assert torch.equal(self.rows(owned), expected)
        num_rows = layout.num_layers * len(owned) * len(self.heads)
        assert self.pool.count_finite_rows() == num_rows

    async def freed(self) -> None:
        """Returns once no call holds a slot."""
        async with asyncio.timeout(DRIVE_SECONDS):
            while self.ring.num_free < self.ring.num_slots:
                self.step()
                await asyncio.sleep(0)


@dataclass
class Cluster:
    """Source and destination ranks, driven from one loop as their engine threads would."""

    sources: Sequence[SourceRank]
    destinations: Sequence[DestinationRank]
    layout: KvLayout
    channels: ChannelPool

    def grant(self, first: int = 0, end: int = LENGTH, lease_ms: int = 10_000) -> Grant:
        endpoints = tuple(d.receiver.endpoint(d.server.address) for d in self.destinations)
        transfer_id = new_transfer_id()
        return Grant(
            transfer_id, INCARNATION, GENERATION, first, end, self.layout, endpoints, lease_ms
        )

    def begin(self, grant: Grant, end_position: int = LENGTH) -> None:
        for destination in self.destinations:
            destination.grants.open(grant)
        for source in self.sources:
            source.begin(grant)
            source.sender.add_positions(grant.transfer_id, end_position)

    async def drive(self, is_done: Callable[[], bool], *, poll: bool = True) -> None:
        async with asyncio.timeout(DRIVE_SECONDS):
            while not is_done():
                for source in self.sources:
                    source.step()
                for destination in self.destinations if poll else ():
                    destination.step()
                await asyncio.sleep(0)

    def is_sent(self, grant: Grant) -> bool:
        statuses = [s.sender.status(grant.transfer_id) for s in self.sources]
        failures = [s.failure for s in statuses if s.failure is not None]
        if failures:
            raise failures[0]
        return all(status.is_complete for status in statuses)

    async def failure(self, grant: Grant, *, poll: bool = True) -> KVBraidError:
        """The error that the first source reports."""
        sender = self.sources[0].sender
        await self.drive(lambda: sender.status(grant.transfer_id).failure is not None, poll=poll)
        failure = sender.status(grant.transfer_id).failure
        assert failure is not None
        return failure

    def heartbeat(self, grant: Grant) -> bytes:
        """The head of a frame without rows from rank 0 to rank 0."""
        frame = Lane(grant.endpoints[0], []).heartbeat(grant, 0)
        return encode_head(frame.header, frame.positions, frame.payload)

    async def push(self, frames: Sequence[bytes]) -> int:
        """Push raw frames to rank 0 while it polls; returns the rows it says it wrote.

        Raises the KVBraidError that it answers.
        """
        address = self.destinations[0].server.address
        method: grpc.aio.StreamUnaryMultiCallable[bytes, PushResponse] = self.channels.channel(
            address
        ).stream_unary(PUSH, response_deserializer=PushResponse.FromString)
        task = asyncio.ensure_future(method(iter(frames), timeout=10))
        await self.drive(task.done)
        try:
            return (await task).num_rows
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure, address) from failure


@asynccontextmanager
async def running_cluster(
    src: KvLayout, dst: KvLayout, mover: MoverChoice, *, slot_bytes: int = 512, **options: Any
) -> AsyncIterator[Cluster]:
    destinations = [
        DestinationRank(dst, rank, slot_bytes=slot_bytes) for rank in range(dst.tp_size)
    ]
    async with AsyncExitStack() as stack:
        for destination in destinations:
            stack.callback(destination.ring.close)
            stack.push_async_callback(destination.server.stop)
            await destination.server.start()
        channels = await stack.enter_async_context(ChannelPool(ServerSettings()))
        sources = [SourceRank(src, rank, channels, mover, **options) for rank in range(src.tp_size)]
        for source in sources:
            stack.push_async_callback(source.sender.stop)
            await source.sender.start()
        yield Cluster(sources, destinations, dst, channels)


@pytest.fixture
def cluster() -> Callable[..., AbstractAsyncContextManager[Cluster]]:
    """cluster(src_layout, dst_layout, mover, slot_bytes=..., **sender_options)"""
    return running_cluster
