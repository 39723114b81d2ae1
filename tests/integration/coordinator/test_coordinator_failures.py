"""Workers that die, freeze, lose leases or refuse: no token is lost, repeated or changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from kvbraid.errors import (
    DataLossError,
    KVBraidError,
    LeaseLostError,
    OverloadedError,
)
from kvbraid.testing import FakeCluster, Fault


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def raising(error: KVBraidError) -> Callable[[], Awaitable[object]]:
    async def act() -> None:
        raise error

    return act


def dying(worker: Any) -> Callable[[], Awaitable[object]]:
    """Gone in the middle of the call, for good."""

    async def act() -> None:
        await worker.die()
        await forever()

    return act


def reborn(worker: Any) -> Callable[[], Awaitable[object]]:
    """Gone in the middle of the call, and at once another process on the same address."""

    async def act() -> None:
        await worker.restart()
        await forever()

    return act


RETRIES = "kvbraid_coordinator_retries_total"
PREFILL_STAGES = ("arrived", "first", "sent")
DECODE_STAGES = (
    ("arrived", 0),
    ("granted", 0),
    ("start", 0),
    ("token", 0),
    ("token", 1),
    ("token", 9),
)


async def check_undisturbed(stack: Any, num_retries: set[int] | None = None) -> None:
    """The answer is what it would have been, and everything is free afterwards."""
    answer = await stack.generate()
    assert answer.tokens[0] == stack.expected()
    assert answer.texts[0] == stack.tokenizer.decode(stack.expected())
    assert answer.last[0].usage.num_completion_tokens == 24
    assert stack.metric(RETRIES) in ({1} if num_retries is None else num_retries)
    await stack.is_idle()


@pytest.mark.parametrize("stage", PREFILL_STAGES)
async def test_prefill_worker_dies_and_another_goes_on(start_stack: Any, stage: str) -> None:
    cluster = FakeCluster(num_prefill=2)
    first, second = cluster.prefill
    second.info.num_queued_prompt_tokens = 1000
    stack = await start_stack(cluster)
    first.faults.append(Fault(stage, dying(first)))
    await check_undisturbed(stack, num_retries=num_prefill_retries(stage))


def num_prefill_retries(stage: str) -> set[int]:
    """When all rows are sent, decoding may have begun: then the failure does not matter."""
    return {0, 1} if stage == "sent" else {1}


@pytest.mark.parametrize(("stage", "after"), DECODE_STAGES)
async def test_decode_worker_dies_and_another_goes_on(
    start_stack: Any, stage: str, after: int
) -> None:
    cluster = FakeCluster(num_decode=2)
    first, second = cluster.decode
    second.info.num_free_tokens = 4000
    stack = await start_stack(cluster)
    first.faults.append(Fault(stage, dying(first), after))
    await check_undisturbed(stack)
    assert second.num_calls == 1


@pytest.mark.parametrize(("stage", "after"), DECODE_STAGES)
async def test_the_only_decode_worker_comes_back_and_goes_on(
    start_stack: Any, stage: str, after: int
) -> None:
    stack = await start_stack()
    worker = stack.cluster.decode[0]
    worker.faults.append(Fault(stage, reborn(worker), after))
    await check_undisturbed(stack)


async def test_when_prefill_fails_the_decode_leg_ends_at_once(start_stack: Any) -> None:
    stack = await start_stack(max_attempts=1)
    stack.cluster.prefill[0].faults.append(Fault("first", raising(DataLossError("damaged"))))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate()
    assert failure.value.code() is grpc.StatusCode.DATA_LOSS
    await stack.is_idle()


async def test_when_decode_fails_the_prefill_leg_ends_at_once(start_stack: Any) -> None:
    stack = await start_stack(max_attempts=1)
    stack.cluster.prefill[0].faults.append(Fault("arrived", forever))
    stack.cluster.decode[0].faults.append(Fault("granted", raising(LeaseLostError("gone"))))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate()
    assert failure.value.code() is grpc.StatusCode.ABORTED
    await stack.is_idle()


async def test_attempts_are_bounded(start_stack: Any) -> None:
    stack = await start_stack(max_attempts=3)
    for _ in range(5):
        stack.cluster.decode[0].faults.append(Fault("arrived", raising(LeaseLostError("gone"))))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate()
    assert failure.value.code() is grpc.StatusCode.ABORTED
    assert stack.cluster.decode[0].num_calls == 3


async def test_a_dead_worker_that_stays_away_is_reported_in_time(start_stack: Any) -> None:
    stack = await start_stack(recovery_seconds=0.4)
    worker = stack.cluster.decode[0]
    worker.faults.append(Fault("token", dying(worker), 5))
    received: list[int] = []
    began = asyncio.get_running_loop().time()

    async def receive() -> None:
        async for response in stack.call():
            received.extend(response.chunk.token_ids)

    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await receive()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "down" in str(failure.value.details())
    assert received == stack.expected()[: len(received)]
    assert asyncio.get_running_loop().time() - began < 3


async def test_a_frozen_decode_worker_is_left_for_another(start_stack: Any) -> None:
    cluster = FakeCluster(num_decode=2)
    first, second = cluster.decode
    second.info.num_free_tokens = 4000
    impatient = {"keepalive_seconds": 0.2, "keepalive_timeout_seconds": 0.3}
    stack = await start_stack(cluster, server=impatient)

    async def freeze() -> None:
        first.proxy.freeze()
        await forever()

    first.faults.append(Fault("token", freeze, 5))
    answer = await stack.generate(timeout_s=5)
    assert answer.tokens[0] == stack.expected()
    assert (stack.metric(RETRIES), second.num_calls) == (1, 1)
    await first.proxy.restore()
    await stack.is_idle()


async def test_decoding_goes_on_without_prefill_workers(start_stack: Any) -> None:
    stack = await start_stack()
    await stack.cluster.prefill[0].die()
    # The first request may still be sent there, the second comes after that was noticed.
    await check_undisturbed(stack, num_retries={0, 1})
    assert (await stack.generate()).tokens[0] == stack.expected()
    value = stack.server.metrics.registry.get_sample_value(
        "kvbraid_process_fallbacks_total", {"reason": "no_prefill_worker"}
    )
    assert value >= 1


async def test_without_fallback_a_missing_prefill_worker_is_an_error(start_stack: Any) -> None:
    stack = await start_stack(prefill_fallback=False, recovery_seconds=0.2)
    await stack.cluster.prefill[0].die()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


def lost_leases(count: int) -> list[Fault]:
    """What a prefill worker answers whose rows cannot get to the decode worker."""
    lost = LeaseLostError("127.0.0.1:1: failed to connect to all addresses")
    return [Fault("first", raising(lost)) for _ in range(count)]


async def test_a_prompt_that_cannot_be_handed_to_one_decode_worker_goes_to_another(
    start_stack: Any,
) -> None:
    cluster = FakeCluster(num_decode=2)
    first, second = cluster.decode
    second.info.num_free_tokens = 4000
    stack = await start_stack(cluster)
    cluster.prefill[0].faults.extend(lost_leases(1))
    await check_undisturbed(stack)
    assert [request.expect_handoff for request in first.requests] == [True]
    assert [request.expect_handoff for request in second.requests] == [True]


async def test_a_prompt_that_can_be_handed_to_nobody_is_computed_where_it_is_needed(
    start_stack: Any,
) -> None:
    stack = await start_stack()
    stack.cluster.prefill[0].faults.extend(lost_leases(9))
    await check_undisturbed(stack)
    asked = stack.cluster.decode[0].requests
    assert [request.expect_handoff for request in asked] == [True, False]
    fallbacks = "kvbraid_process_fallbacks_total"
    assert stack.metric(fallbacks, reason="handoffs_failed") == 1
    # Nothing is held against the way for good: the next request tries it again.
    stack.cluster.prefill[0].faults.clear()
    assert (await stack.generate(range(500, 540))).tokens[0] == stack.expected(range(500, 540))
    assert asked[-1].expect_handoff


async def test_two_broken_handoffs_are_enough(start_stack: Any) -> None:
    cluster = FakeCluster(num_prefill=3, num_decode=3)
    stack = await start_stack(cluster)
    for worker in cluster.prefill:
        worker.faults.extend(lost_leases(9))
    await check_undisturbed(stack, num_retries={2})
    assert sum(worker.num_calls for worker in cluster.prefill) == 2


async def test_without_fallback_a_handoff_is_tried_again_and_again(start_stack: Any) -> None:
    stack = await start_stack(prefill_fallback=False)
    stack.cluster.prefill[0].faults.extend(lost_leases(3))
    await check_undisturbed(stack, num_retries={3})
    assert all(request.expect_handoff for request in stack.cluster.decode[0].requests)


async def test_an_overloaded_decode_worker_is_left_for_another(start_stack: Any) -> None:
    stack = await start_stack(FakeCluster(num_decode=2))
    for worker in stack.cluster.decode:
        worker.faults.append(Fault("arrived", raising(OverloadedError("full", retry_after_s=7))))
    stack.cluster.decode[1].faults.clear()
    await stack.generate()
    with_second = sum(worker.num_calls for worker in stack.cluster.decode)
    assert with_second <= 2
    assert stack.cluster.decode[1].num_calls == 1


async def test_a_broken_stream_waits_for_room(start_stack: Any) -> None:
    """As when a worker goes down and all that ran there asks the only other one."""
    stack = await start_stack(recovery_seconds=30)
    worker = stack.cluster.decode[0]
    worker.faults.append(Fault("token", raising(DataLossError("damaged")), 5))
    refusals = [Fault("arrived", raising(OverloadedError("full"))) for _ in range(5)]
    worker.faults.extend(refusals)
    await check_undisturbed(stack, num_retries={6})


async def test_overload_everywhere_says_when_to_come_back(start_stack: Any) -> None:
    stack = await start_stack()
    full = OverloadedError("256 requests wait already", retry_after_s=7)
    stack.cluster.decode[0].faults.extend(Fault("arrived", raising(full)) for _ in range(2))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate()
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status, body, headers = await stack.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
    assert (status, headers["Retry-After"]) == (429, "7")
    assert body["error"]["type"] == "rate_limit_error"
    assert stack.cluster.decode[0].num_calls == 2


@pytest.mark.parametrize("is_away", [False, True], ids=["up", "away for a moment"])
async def test_more_completions_than_could_ever_wait_are_no_overload(
    start_stack: Any, is_away: bool
) -> None:
    """A client that came back later would do so for ever."""
    cluster = FakeCluster(max_num_seqs=2, num_decode=2)
    stack = await start_stack(cluster, max_queued_requests=1)
    if is_away:
        await cluster.decode[1].die()
    body = {"prompt": [[5, 6], [7, 8]], "n": 3, "max_tokens": 2, "temperature": 0}
    status, answer, _ = await stack.post("/v1/completions", {**body, "n": 4})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "n is 4, times 2 prompts: 8 completions; accepted: up to 6" in str(answer)
    if not is_away:
        status, answer, _ = await stack.post("/v1/completions", body)
        assert (status, len(answer["choices"])) == (200, 6)


async def test_the_coordinators_own_queue_is_bounded(start_stack: Any) -> None:
    cluster = FakeCluster(max_num_seqs=1)
    stack = await start_stack(cluster, max_queued_requests=1)
    release = asyncio.Event()
    reached = [asyncio.Event(), asyncio.Event()]
    for event in reached:

        async def hold(event: asyncio.Event = event) -> None:
            event.set()
            await release.wait()

        cluster.decode[0].faults.append(Fault("arrived", hold))
    held = [asyncio.create_task(stack.generate()) for _ in range(2)]
    await asyncio.gather(*(event.wait() for event in reached))
    status, body, headers = await stack.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
    assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "1", "overloaded")
    release.set()
    assert [a.tokens[0] for a in await asyncio.gather(*held)] == [stack.expected()] * 2
    assert (await stack.generate()).tokens[0] == stack.expected()
