"""Transfers that end early: closed, expired, cancelled, or their peer is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbraid.errors import (
    KVBraidError,
    LeaseLostError,
    RequestCancelledError,
    UnavailableError,
)
from kvbraid.kv.handoff import KvLayout
from kvbraid.transport.grants import RankEndpoint
from kvbraid.transport.staging import remove_stale_rings

MOVERS = ["shared_memory", "grpc_push"]
MLA = KvLayout("mla", 2, 1, 4, 6, "bfloat16", 2, 1, 4, 1, "digest")
# A lease so long that the sender renews it only after the test: what ends is ended at once.
NO_HEARTBEAT_MS = 600_000
Clusters = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize("mover", MOVERS)
async def test_closing_a_grant_mid_push_aborts_the_sender_and_frees_every_slot(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(MLA, replace(MLA, dcp_size=2), mover) as workers:
        grant = workers.grant(lease_ms=NO_HEARTBEAT_MS)
        workers.begin(grant, end_position=20)
        first = workers.destinations[0]
        await workers.drive(lambda: first.receiver.rows_landed(grant.transfer_id) > 0)
        first.grants.close(grant.transfer_id)
        assert isinstance(await workers.failure(grant), LeaseLostError)
        for destination in workers.destinations:
            await destination.freed()


async def test_slot_that_is_taken_back_right_after_its_loan_is_a_lost_lease(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loan may reach the sender before the end of the call that took the slot back does."""
    async with cluster(MLA, replace(MLA, tp_size=1), "shared_memory") as workers:
        ring = workers.destinations[0].ring
        acquire = ring.acquire

        def acquire_what_is_taken_back() -> int | None:
            slot: int | None = acquire()
            if slot is not None:
                ring.replace(slot)
            return slot

        monkeypatch.setattr(ring, "acquire", acquire_what_is_taken_back)
        grant = workers.grant(lease_ms=NO_HEARTBEAT_MS)
        workers.begin(grant)
        assert isinstance(await workers.failure(grant), LeaseLostError)


@pytest.mark.parametrize("mover", MOVERS)
async def test_lease_that_runs_out_ends_the_push(cluster: Clusters, mover: str) -> None:
    """serving.md 3.3: a lost notification never holds pages or a sender for ever."""
    async with cluster(MLA, replace(MLA, tp_size=1), mover) as workers:
        grant = workers.grant(lease_ms=NO_HEARTBEAT_MS)
        workers.begin(grant, end_position=20)
        destination = workers.destinations[0]
        await workers.drive(lambda: destination.receiver.rows_landed(grant.transfer_id) > 0)
        destination.now += NO_HEARTBEAT_MS / 1000 + 1
        assert destination.grants.expire() == [grant.transfer_id]
        assert isinstance(destination.receiver.failure(grant.transfer_id), LeaseLostError)
        assert isinstance(await workers.failure(grant), LeaseLostError)


@pytest.mark.parametrize("mover", MOVERS)
async def test_sender_keeps_the_lease_of_a_prompt_that_is_still_queued(
    cluster: Clusters, mover: str
) -> None:
    """serving.md 3.2: a lease shorter than the queue must not end a healthy transfer."""
    async with cluster(MLA, replace(MLA, tp_size=1), mover) as workers:
        grant = workers.grant(lease_ms=30)
        destination = workers.destinations[0]
        workers.begin(grant, end_position=0)
        for _ in range(5):
            destination.now += 0.02
            num_renewals = destination.num_clock_reads
            await workers.drive(lambda n=num_renewals: destination.num_clock_reads > n)
        assert destination.grants.expire(destination.now + 0.02) == []


@pytest.mark.parametrize("mover", MOVERS)
async def test_engine_that_stood_still_for_longer_than_the_lease_does_not_blame_the_sender(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(MLA, replace(MLA, tp_size=1), mover, slot_bytes=64) as workers:
        grant = workers.grant(lease_ms=NO_HEARTBEAT_MS)
        workers.begin(grant)
        destination = workers.destinations[0]
        staged: list[None] = []
        destination.receiver.on_landed = lambda: staged.append(None)
        await workers.drive(lambda: len(staged) == destination.ring.num_slots, poll=False)
        destination.now += NO_HEARTBEAT_MS / 1000 + 1
        destination.receiver.poll(destination.scatter, 0)
        assert destination.grants.expire() == []
        await workers.drive(lambda: workers.is_sent(grant))


@pytest.mark.parametrize("mover", MOVERS)
async def test_receiver_that_dies_mid_push_fails_the_transfer(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(MLA, replace(MLA, tp_size=1), mover) as workers:
        grant = workers.grant()
        workers.begin(grant, end_position=20)
        destination = workers.destinations[0]
        await workers.drive(lambda: destination.receiver.rows_landed(grant.transfer_id) > 0)
        await destination.server.stop()
        assert isinstance(await workers.failure(grant), KVBraidError)


@pytest.mark.parametrize("mover", MOVERS)
async def test_receiver_that_was_never_there_fails_the_transfer(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(MLA, replace(MLA, tp_size=1), mover) as workers:
        grant = workers.grant()
        await workers.destinations[0].server.stop()
        workers.begin(grant)
        assert isinstance(await workers.failure(grant), UnavailableError)


@pytest.mark.parametrize("mover", MOVERS)
async def test_one_lost_destination_stops_the_push_to_the_others(
    cluster: Clusters, mover: str
) -> None:
    """serving.md 3.6: the first failure cancels the other legs."""
    async with cluster(MLA, replace(MLA, dcp_size=2), mover) as workers:
        grant = workers.grant()
        workers.begin(grant, end_position=20)
        other = workers.destinations[1].receiver
        await workers.drive(lambda: other.rows_landed(grant.transfer_id) > 0)
        workers.destinations[0].grants.close(grant.transfer_id)
        await workers.failure(grant)
        workers.sources[0].sender.add_positions(grant.transfer_id, grant.end_position)
        assert workers.sources[0].step() == 0


@pytest.mark.parametrize("mover", MOVERS)
async def test_cancelled_transfer_sends_nothing_more_and_frees_every_slot(
    cluster: Clusters, mover: str
) -> None:
    async with cluster(MLA, replace(MLA, tp_size=1), mover) as workers:
        grant = workers.grant()
        workers.begin(grant)
        source, destination = workers.sources[0], workers.destinations[0]
        await workers.drive(lambda: destination.ring.num_free < 4, poll=False)
        source.sender.cancel(grant.transfer_id)
        assert source.step() == 0
        failure = source.sender.status(grant.transfer_id).failure
        assert isinstance(failure, RequestCancelledError)
        await destination.freed()


@pytest.mark.parametrize("mover", MOVERS)
async def test_a_failed_transfer_leaves_room_for_the_next(cluster: Clusters, mover: str) -> None:
    small = {"slot_bytes": 64, "max_outbox_bytes": 256}
    async with cluster(MLA, replace(MLA, tp_size=1), mover, **small) as workers:
        for _ in range(4):
            lost = workers.grant()
            workers.begin(lost)
            await workers.drive(lambda: workers.destinations[0].ring.num_free == 0, poll=False)
            workers.destinations[0].grants.close(lost.transfer_id)
            await workers.failure(lost)
            for source in workers.sources:
                source.sender.forget(lost.transfer_id)
        grant = workers.grant()
        workers.begin(grant)
        await workers.drive(lambda: workers.is_sent(grant))
        workers.destinations[0].assert_landed()


@pytest.mark.parametrize("ring_name", ["kvbraid-ring-0-gone", "kvbraid-ring-/../../etc/passwd"])
async def test_shared_memory_that_cannot_be_reached_fails_the_transfer(
    cluster: Clusters, ring_name: str
) -> None:
    async with cluster(MLA, replace(MLA, tp_size=1), "shared_memory") as workers:
        grant = workers.grant()
        endpoint = replace(grant.endpoints[0], ring_name=ring_name)
        workers.begin(replace(grant, endpoints=(endpoint,)))
        assert isinstance(await workers.failure(grant), UnavailableError)


@asynccontextmanager
async def receiver_process() -> AsyncIterator[tuple[Any, RankEndpoint]]:
    """A receiving rank in a process of its own, which polls and drops what it gets."""
    script = Path(__file__).with_name("kv_receiver_process.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        yield process, RankEndpoint(**json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        remove_stale_rings()


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_lost_peer_process_fails_the_transfer_within_seconds(
    cluster: Clusters, mover: str, how: signal.Signals
) -> None:
    layout = replace(MLA, tp_size=1)
    async with (
        receiver_process() as (process, endpoint),
        cluster(layout, layout, mover) as workers,
    ):
        grant = replace(workers.grant(lease_ms=NO_HEARTBEAT_MS), endpoints=(endpoint,))
        process.stdin.write(json.dumps(grant.to_json()).encode() + b"\n")
        source = workers.sources[0]
        source.begin(grant)
        source.sender.add_positions(grant.transfer_id, 20)
        landed = asyncio.ensure_future(process.stdout.readline())
        await workers.drive(landed.done)
        os.kill(process.pid, how)
        async with asyncio.timeout(5):
            assert isinstance(await workers.failure(grant), UnavailableError)
