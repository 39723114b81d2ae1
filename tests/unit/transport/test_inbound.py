"""Push calls that wait for a slot."""

from __future__ import annotations

import asyncio

import pytest

from kvbraid.errors import DataLossError, LeaseLostError
from kvbraid.transport.inbound import InboundCall, SlotQueue
from kvbraid.transport.staging import StagingRing


def nothing() -> None:
    """Leases are not looked at here."""


def waiting(queue: SlotQueue, count: int) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(queue.acquire(nothing, 10.0)) for _ in range(count)]


async def test_slots_go_to_calls_in_the_order_of_waiting() -> None:
    queue = SlotQueue(StagingRing(1, 8))
    taken = await queue.acquire(nothing, 10.0)
    first, second = waiting(queue, 2)
    await asyncio.sleep(0)
    queue.release(taken)
    assert await first == taken
    assert not second.done()
    queue.release(taken)
    assert await second == taken


async def test_call_that_gives_up_leaves_its_turn_to_the_next() -> None:
    queue = SlotQueue(StagingRing(1, 8))
    taken = await queue.acquire(nothing, 10.0)
    first, second = waiting(queue, 2)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    queue.release(taken)
    assert await second == taken


async def test_slot_given_to_a_call_as_it_gives_up_is_not_lost() -> None:
    ring = StagingRing(1, 8)
    queue = SlotQueue(ring)
    taken = await queue.acquire(nothing, 10.0)
    (first,) = waiting(queue, 1)
    await asyncio.sleep(0)
    queue.release(taken)
    first.cancel()
    await asyncio.wait({first})
    assert ring.num_free == 1


async def test_new_calls_do_not_overtake_waiting_ones() -> None:
    ring = StagingRing(2, 8)
    queue = SlotQueue(ring)
    taken = [await queue.acquire(nothing, 10.0) for _ in range(2)]
    (first,) = waiting(queue, 1)
    await asyncio.sleep(0)
    ring.release(taken[0])
    assert queue.try_acquire() is None
    queue.release(taken[1])
    assert await first in taken


async def test_waiting_calls_say_so_again_and_again() -> None:
    queue = SlotQueue(StagingRing(1, 8))
    taken = await queue.acquire(nothing, 10.0)
    renewed = asyncio.Event()
    task = asyncio.create_task(queue.acquire(renewed.set, 0.001))
    async with asyncio.timeout(5):
        await renewed.wait()
    queue.release(taken)
    assert await task == taken


async def test_first_failure_of_a_call_stays() -> None:
    call = InboundCall()
    call.fail(LeaseLostError("first"))
    call.fail(DataLossError("second"))
    with pytest.raises(LeaseLostError, match="first"):
        await call.failed


async def test_call_is_for_one_transfer() -> None:
    call = InboundCall()
    call.belongs_to(b"a" * 16)
    call.belongs_to(b"a" * 16)
    with pytest.raises(DataLossError, match="another transfer's call"):
        call.belongs_to(b"b" * 16)
