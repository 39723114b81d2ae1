"""Frames that must not be written: damaged, replayed, late, stale or foreign."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvbraid.errors import DataLossError, LeaseLostError
from kvbraid.kv.handoff import KvLayout
from kvbraid.transport.grants import Grant, new_transfer_id
from kvbraid.transport.push_service import PUSH_SHARED
from kvbraid.v1.kv_transfer_pb2 import PushSharedRequest, PushSharedResponse, SharedFrame

ONE_RANK = KvLayout("mla", 2, 1, 4, 6, "bfloat16", 1, 1, 4, 1, "digest")
LENGTH = 53
Clusters = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
async def workers(cluster: Clusters) -> AsyncIterator[Any]:
    """One source and one destination rank; slots are large enough for all rows in one frame."""
    async with cluster(ONE_RANK, ONE_RANK, "grpc_push", slot_bytes=8192) as workers:
        yield workers


@pytest.fixture
def grant(workers: Any) -> Grant:
    """An open grant of the destination rank."""
    grant: Grant = workers.grant()
    workers.destinations[0].grants.open(grant)
    return grant


async def test_intact_frame_is_written_and_counted(workers: Any, grant: Grant) -> None:
    num_rows = await workers.push([workers.sources[0].frame(grant)])
    assert num_rows == ONE_RANK.num_layers * LENGTH
    workers.destinations[0].assert_landed()


@pytest.mark.parametrize("where", [30, 70, 100, 400, -1])
async def test_damaged_byte_is_data_loss_and_no_row_is_written(
    workers: Any, grant: Grant, where: int
) -> None:
    """serving.md 3.2: every row carries a checksum; a mismatch is never served."""
    damaged = bytearray(workers.sources[0].frame(grant))
    damaged[where] ^= 0x10
    with pytest.raises((DataLossError, LeaseLostError)):
        await workers.push([bytes(damaged)])
    assert workers.destinations[0].pool.count_finite_rows() == 0
    assert workers.destinations[0].receiver.rows_landed(grant.transfer_id) == 0


async def test_damaged_payload_fails_the_transfer_at_the_receiver_too(
    workers: Any, grant: Grant
) -> None:
    damaged = bytearray(workers.sources[0].frame(grant))
    damaged[-1] ^= 1
    with pytest.raises(DataLossError, match="damaged"):
        await workers.push([bytes(damaged)])
    receiver = workers.destinations[0].receiver
    assert isinstance(receiver.failure(grant.transfer_id), DataLossError)


async def test_replayed_frame_is_data_loss_and_its_rows_count_once(
    workers: Any, grant: Grant
) -> None:
    frames = [workers.sources[0].frame(grant, number) for number in range(2)]
    with pytest.raises(DataLossError, match="repeats"):
        await workers.push(frames)
    landed = workers.destinations[0].receiver.rows_landed(grant.transfer_id)
    assert landed == ONE_RANK.num_layers * LENGTH


async def test_frame_of_another_generation_is_refused_and_harms_nobody(
    workers: Any, grant: Grant
) -> None:
    """serving.md 3.7: metadata of one use of a slot never mixes with the next."""
    source = workers.sources[0]
    with pytest.raises(DataLossError, match="generation"):
        await workers.push([source.frame(grant, generation=grant.generation - 1)])
    assert workers.destinations[0].receiver.failure(grant.transfer_id) is None
    await workers.push([source.frame(grant)])
    workers.destinations[0].assert_landed()


async def test_frame_for_an_earlier_incarnation_is_refused(workers: Any, grant: Grant) -> None:
    """serving.md 3.5: a restarted worker at the same address is another worker."""
    frame = workers.sources[0].frame(grant, incarnation=grant.incarnation - 1)
    with pytest.raises(LeaseLostError, match="incarnation"):
        await workers.push([frame])


async def test_unknown_transfer_costs_no_slot(workers: Any, grant: Grant) -> None:
    stranger = replace(grant, transfer_id=new_transfer_id())
    with pytest.raises(LeaseLostError, match="not open"):
        await workers.push([workers.sources[0].frame(stranger)])
    ring = workers.destinations[0].ring
    assert ring.num_free == ring.num_slots


async def test_late_write_after_the_pages_were_given_away_is_refused(
    workers: Any, grant: Grant
) -> None:
    """serving.md 3.1: a frame staged before its grant was closed never reaches the pool."""
    destination = workers.destinations[0]
    task = asyncio.ensure_future(workers.push([workers.sources[0].frame(grant)]))
    destination.receiver.on_landed = lambda: destination.grants.close(grant.transfer_id)
    with pytest.raises(LeaseLostError):
        await task
    assert destination.pool.count_finite_rows() == 0
    await workers.drive(lambda: destination.ring.num_free == destination.ring.num_slots)


async def read_to_the_end(call: AsyncIterable[PushSharedResponse]) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize("num_slots_wanted", [0, 3])
async def test_frame_in_a_slot_that_was_not_lent_is_data_loss(
    workers: Any, grant: Grant, num_slots_wanted: int
) -> None:
    destination = workers.destinations[0]
    method = workers.channels.channel(destination.server.address).stream_stream(
        PUSH_SHARED,
        request_serializer=PushSharedRequest.SerializeToString,
        response_deserializer=PushSharedResponse.FromString,
    )
    call = method(timeout=10)
    heartbeat = workers.heartbeat(grant)
    await call.write(PushSharedRequest(heartbeat=heartbeat, num_slots_wanted=num_slots_wanted))
    stolen = SharedFrame(head=workers.sources[0].frame(grant), slot=3)
    await call.write(PushSharedRequest(frames=[stolen]))
    reading = asyncio.ensure_future(read_to_the_end(call))
    await workers.drive(reading.done)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await reading
    assert refusal.value.code() == grpc.StatusCode.DATA_LOSS
    assert destination.pool.count_finite_rows() == 0
    await destination.freed()
