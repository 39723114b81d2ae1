"""Workers whose weights differ: those of most decode workers are served, never those of whoever
came first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from coordinator.clients import WorkerClients
from coordinator.registry import Pool, Registry, Worker, WorkerState
from kvbraid.errors import UnavailableError
from kvbraid.rpc.channels import ChannelPool
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import CoordinatorMetrics
from kvbraid.testing import FakeCluster

UP, INCOMPATIBLE = WorkerState.UP, WorkerState.INCOMPATIBLE
FollowCluster = Callable[..., Any]


class Followed:
    """A running registry over a cluster that serves."""

    def __init__(self, cluster: FakeCluster, registry: Registry) -> None:
        self.cluster = cluster
        self.registry = registry

    @property
    def decode(self) -> list[Worker]:
        return self.registry.workers(Pool.DECODE)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Returns once it is, which it is within seconds."""
        async with asyncio.timeout(10):
            while not is_so():
                await self.registry.wait_changed(1.0)

    async def until_decode(self, *states: WorkerState) -> None:
        await self.until(lambda: [worker.state for worker in self.decode] == list(states))


@pytest.fixture
async def follow() -> AsyncIterator[FollowCluster]:
    """(digest of each decode worker, which of them are away) -> what a coordinator follows."""
    async with AsyncExitStack() as exits:

        async def start(*digests: str, away: tuple[int, ...] = ()) -> Followed:
            cluster = FakeCluster(num_prefill=1, num_decode=len(digests))
            for fake, digest in zip(cluster.decode, digests, strict=True):
                fake.info.model_digest = digest
            await exits.enter_async_context(cluster)
            for index in away:
                await cluster.decode[index].die()
            return await followed(exits, cluster)

        yield start


async def followed(exits: AsyncExitStack, cluster: FakeCluster) -> Followed:
    channels = ChannelPool(ServerSettings())
    exits.push_async_callback(channels.close)
    registry = Registry(
        prefill=cluster.prefill_workers,
        decode=cluster.decode_workers,
        make_client=WorkerClients(channels).info,
        poll_s=5.0,
        recovery_s=0.0,
        vocab_size=100,
        metrics=CoordinatorMetrics().placement,
    )
    await registry.start()
    exits.push_async_callback(registry.stop)
    return Followed(cluster, registry)


async def test_the_first_worker_is_refused_where_most_hold_other_weights(start_stack: Any) -> None:
    cluster = FakeCluster(num_decode=3)
    cluster.decode[0].info.model_digest = "other"
    stack = await start_stack(cluster)
    for _ in range(4):
        await stack.generate()
    assert cluster.decode[0].num_calls == 0
    assert sum(worker.num_calls for worker in cluster.decode) == 4
    assert stack.server.registry.model.model_digest == "toy"


async def test_between_equals_none_is_served_and_the_error_names_both(
    follow: FollowCluster,
) -> None:
    system = await follow("one", "two")
    await system.until_decode(INCOMPATIBLE, INCOMPATIBLE)
    first, second = system.cluster.decode_workers
    with pytest.raises(UnavailableError, match=f"weights differ: one on {first}; two on {second}"):
        system.registry.limits()
    system.cluster.decode[0].info.model_digest = "two"
    await system.cluster.decode[0].restart()
    await system.until_decode(UP, UP)


async def test_a_worker_that_was_away_at_the_start_does_not_displace_what_is_served(
    follow: FollowCluster, caplog: pytest.LogCaptureFixture
) -> None:
    system = await follow("one", "two", away=(0,))
    await system.until_decode(WorkerState.DOWN, UP)
    with caplog.at_level(logging.ERROR):
        await system.cluster.decode[0].come_back()
        await system.until_decode(INCOMPATIBLE, UP)
    first, second = system.cluster.decode_workers
    (message,) = [r.getMessage() for r in caplog.records if first in r.getMessage()]
    assert message == (
        f"worker {first} holds weights one and gets no work: decode workers hold one on {first}; "
        f"two on {second}; served: two"
    )


async def test_nothing_is_served_before_every_decode_worker_had_its_say() -> None:
    """Two that agree beat one that is quicker."""
    cluster = FakeCluster(num_decode=3)
    quick, slow = cluster.decode[1], cluster.decode[0]
    quick.info.model_digest = "other"
    may_answer, answer = asyncio.Event(), slow.Info

    async def answer_late(request: object, context: Any) -> Any:
        await may_answer.wait()
        return await answer(request, context)

    slow.Info = answer_late
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(cluster)
        system = await followed(exits, cluster)
        await system.until(lambda: all(worker.is_heard for worker in system.decode[1:]))
        assert not system.registry.up(Pool.DECODE)
        may_answer.set()
        await system.until_decode(UP, INCOMPATIBLE, UP)


async def test_replaced_one_by_one_the_new_weights_are_served_from_the_second_of_three_on(
    follow: FollowCluster,
) -> None:
    system = await follow("old", "old", "old")
    await system.until_decode(UP, UP, UP)
    for index, states in enumerate(
        ((INCOMPATIBLE, UP, UP), (UP, UP, INCOMPATIBLE), (UP, UP, UP)),
    ):
        system.cluster.decode[index].info.model_digest = "new"
        await system.cluster.decode[index].restart()
        await system.until_decode(*states)


async def test_prefill_workers_must_hold_what_is_served(follow: FollowCluster) -> None:
    system = await follow("one")
    await system.until_decode(UP)
    (prefill,) = system.registry.workers(Pool.PREFILL)
    await system.until(lambda: prefill.state is INCOMPATIBLE)
