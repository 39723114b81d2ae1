"""Both movers between real gRPC servers on loopback: any layout to any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from kvbraid.kv.handoff import KvLayout

MOVERS = ["shared_memory", "grpc_push"]
GQA = KvLayout("gqa", 3, 3, 9, 8, "float32", 2, 1, 4, 1, "digest")
MLA = KvLayout("mla", 2, 1, 4, 6, "bfloat16", 2, 1, 4, 1, "digest")
LENGTH = 53
Clusters = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        pytest.param(GQA, replace(GQA, dcp_size=2, page_size=2), id="gqa-split-heads-c1-to-c2"),
        pytest.param(
            replace(GQA, tp_size=2, dcp_size=2),
            replace(GQA, tp_size=3, dcp_size=3, page_size=8, interleave=2),
            id="gqa-c2-to-c3",
        ),
        pytest.param(MLA, replace(MLA, dcp_size=2, page_size=16), id="mla-replicated-to-c2"),
        pytest.param(
            replace(MLA, dcp_size=2), replace(MLA, tp_size=3, dcp_size=3), id="mla-c2-to-c3"
        ),
        pytest.param(replace(GQA, dcp_size=2), replace(GQA, tp_size=1), id="gqa-c2-to-one-rank"),
    ],
)
async def test_every_row_reaches_its_owner_bit_for_bit(
    cluster: Clusters, mover: str, src: KvLayout, dst: KvLayout
) -> None:
    async with cluster(src, dst, mover) as workers:
        grant = workers.grant()
        workers.begin(grant)
        await workers.drive(lambda: workers.is_sent(grant))
        for destination in workers.destinations:
            destination.assert_landed()
            landed = destination.receiver.rows_landed(grant.transfer_id)
            assert landed == destination.receiver.rows_expected(grant.transfer_id)


@pytest.mark.parametrize("mover", MOVERS)
async def test_rows_already_held_are_neither_sent_nor_overwritten(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(GQA, replace(GQA, dcp_size=2), mover) as workers:
        grant = workers.grant(first=17)
        workers.begin(grant)
        await workers.drive(lambda: workers.is_sent(grant))
        for destination in workers.destinations:
            destination.assert_landed(first=17)


@pytest.mark.parametrize("mover", MOVERS)
async def test_rows_leave_chunk_by_chunk_as_they_are_computed(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(GQA, replace(GQA, dcp_size=2), mover) as workers:
        grant = workers.grant()
        workers.begin(grant, end_position=0)
        table = workers.destinations[0].grants
        for computed in (10, 11, 40):
            for source in workers.sources:
                source.sender.add_positions(grant.transfer_id, computed)
            owned = workers.destinations[0].stripe.local_length(computed)
            expected = GQA.num_layers * owned * GQA.num_kv_heads
            await workers.drive(lambda n=expected: table.rows_landed(grant.transfer_id) == n)
        assert not workers.is_sent(grant)
        for source in workers.sources:
            source.sender.add_positions(grant.transfer_id, LENGTH)
        await workers.drive(lambda: workers.is_sent(grant))
        workers.destinations[1].assert_landed()


@pytest.mark.parametrize("mover", MOVERS)
async def test_rows_are_acknowledged_only_once_they_are_in_the_pool(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(MLA, replace(MLA, tp_size=1), mover) as workers:
        grant = workers.grant()
        workers.begin(grant)
        sender = workers.sources[0].sender
        ring = workers.destinations[0].ring
        await workers.drive(lambda: ring.num_free == 0, poll=False)
        assert sender.status(grant.transfer_id).num_rows_acked == 0
        await workers.drive(lambda: workers.is_sent(grant))
        assert sender.status(grant.transfer_id).num_rows_acked > 0


@pytest.mark.parametrize("mover", MOVERS)
async def test_receiver_that_does_not_poll_holds_the_sender_back_and_loses_no_row(
    cluster: Clusters, mover: str
) -> None:
    # Large enough that HTTP/2 windows do not swallow all of it.
    src = replace(GQA, tp_size=1, row_width=16384)
    limits = {"max_outbox_bytes": 1 << 20}
    async with cluster(src, src, mover, slot_bytes=1 << 18, **limits) as workers:
        grant = workers.grant()
        workers.begin(grant)
        source, destination = workers.sources[0], workers.destinations[0]
        num_gathered = num_idle = 0
        while num_idle < 500:
            moved = source.step()
            num_gathered += moved
            num_idle = 0 if moved else num_idle + 1
            await asyncio.sleep(0)
        total = src.num_layers * LENGTH * src.num_kv_heads * src.row_bytes
        assert 0 < num_gathered < total / 2
        await workers.drive(lambda: workers.is_sent(grant))
        destination.assert_landed()


async def test_auto_takes_shared_memory_on_one_host_and_grpc_between_hosts(
    cluster: Clusters,
) -> None:
    async with cluster(MLA, replace(MLA, tp_size=1), "auto") as workers:
        ring = workers.destinations[0].ring
        here = workers.grant()
        workers.begin(here)
        await workers.drive(lambda: workers.is_sent(here))
        elsewhere = workers.grant()
        endpoint = replace(elsewhere.endpoints[0], host_id="another", ring_name="kvbraid-ring-x")
        workers.begin(replace(elsewhere, endpoints=(endpoint,)))
        await workers.drive(lambda: workers.is_sent(elsewhere))
        assert ring.num_free == ring.num_slots


@pytest.mark.parametrize("mover", MOVERS)
async def test_engine_threads_of_both_sides_run_beside_the_loop(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(GQA, replace(GQA, dcp_size=2), mover) as workers:
        grants = [workers.grant() for _ in range(3)]
        done = threading.Event()

        def engine(step: Callable[[], int]) -> None:
            while not done.is_set():
                step()

        engines = [
            asyncio.create_task(asyncio.to_thread(engine, rank.step))
            for rank in (*workers.sources, *workers.destinations)
        ]
        try:
            for grant in grants:
                workers.begin(grant)
            async with asyncio.timeout(20):
                while not all(workers.is_sent(grant) for grant in grants):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            done.set()
            await asyncio.gather(*engines)
        for destination in workers.destinations:
            destination.assert_landed()
