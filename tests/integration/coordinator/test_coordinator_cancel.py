"""Time that runs out, and processes that are told to stop."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.registry import Pool
from kvbraid.testing import FakeCluster, Fault

BODY = {"prompt": "Tell me a long story about a fish. " * 4, "temperature": 0}


def pausing(reached: asyncio.Event, release: asyncio.Event | None = None) -> Any:
    """Says that the call has come here, then holds it until `release` (for ever without)."""

    async def act() -> None:
        reached.set()
        await (release or asyncio.Event()).wait()

    return act


async def test_the_clients_deadline_reaches_the_workers(stack: Any) -> None:
    reached = asyncio.Event()
    stack.cluster.decode[0].faults.append(Fault("token", pausing(reached), 3))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate(timeout_s=2.0)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reached.is_set()
    await stack.is_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_coordinators_own_limit_is_a_504(start_stack: Any, stream: bool) -> None:
    stack = await start_stack(api={"request_timeout_seconds": 0.3})
    reached = asyncio.Event()
    stack.cluster.prefill[0].faults.append(Fault("arrived", pausing(reached)))
    status, body, _ = await stack.post("/v1/completions", {**BODY, "stream": stream})
    assert (status, body["error"]["type"]) == (504, "timeout_error")
    assert "0.3 s" in body["error"]["message"]
    await stack.is_idle()


async def test_no_attempt_begins_after_the_deadline(start_stack: Any) -> None:
    stack = await start_stack(recovery_seconds=30)
    worker = stack.cluster.decode[0]
    await worker.die()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate(timeout_s=2.0)
    assert failure.value.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
    )
    assert worker.num_calls == 0


async def test_drain_finishes_what_runs_and_refuses_what_comes(stack: Any) -> None:
    reached, release = asyncio.Event(), asyncio.Event()
    stack.cluster.decode[0].faults.append(Fault("token", pausing(reached, release), 3))
    running = asyncio.create_task(stack.generate())
    await asyncio.wait_for(reached.wait(), 5)
    health = health_pb2_grpc.HealthStub(stack.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    draining = asyncio.create_task(stack.server.drain())
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    status, _, headers = await stack.post("/v1/completions", BODY)
    assert (status, headers["Retry-After"]) == (503, "1")
    async with stack.http.get("/health") as response:
        assert response.status == 503
    release.set()
    assert (await running).tokens[0] == stack.expected()
    assert await draining is True


async def test_a_draining_decode_worker_gets_no_new_request(start_stack: Any) -> None:
    stack = await start_stack(FakeCluster(num_decode=2))
    first, second = stack.cluster.decode
    await first.server.set_serving(False)
    for _ in range(4):
        await stack.generate()
    assert first.num_calls <= 1
    await first.server.set_serving(True)
    before = second.num_calls
    await asyncio.gather(*(stack.generate(range(9, 60 + i)) for i in range(8)))
    assert second.num_calls - before < 8


async def test_health_follows_the_decode_workers(start_stack: Any) -> None:
    stack = await start_stack()
    async with stack.http.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    await stack.cluster.decode[0].die()
    health = health_pb2_grpc.HealthStub(stack.channel)
    statuses = []
    async for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=5):
        statuses.append(answer.status)
        if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            await stack.cluster.decode[0].come_back()
        if len(statuses) > 1 and answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    assert statuses[-2:] == [
        health_pb2.HealthCheckResponse.NOT_SERVING,
        health_pb2.HealthCheckResponse.SERVING,
    ]
    assert (await stack.generate()).tokens[0] == stack.expected()


async def test_a_dead_worker_is_known_at_once_and_not_at_the_next_poll(start_stack: Any) -> None:
    stack = await start_stack(poll_seconds=30)
    await stack.cluster.decode[0].die()
    async with asyncio.timeout(2):
        while stack.server.registry.up(Pool.DECODE):
            await stack.server.registry.wait_changed(2)
    await stack.cluster.decode[0].come_back()
    async with asyncio.timeout(5):
        while not stack.server.registry.up(Pool.DECODE):
            await stack.server.registry.wait_changed(5)
    assert (await stack.generate()).tokens[0] == stack.expected()


async def test_a_new_request_waits_for_a_worker_that_just_went_down(start_stack: Any) -> None:
    stack = await start_stack(recovery_seconds=20)
    await stack.cluster.decode[0].die()
    while stack.server.registry.up(Pool.DECODE):
        await stack.server.registry.wait_changed(2)
    waiting = asyncio.create_task(stack.generate())
    while not stack.metric("kvbraid_rpc_in_flight_requests"):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await stack.cluster.decode[0].come_back()
    assert (await waiting).tokens[0] == stack.expected()


async def test_a_new_request_does_not_wait_for_a_worker_that_is_long_gone(
    start_stack: Any,
) -> None:
    stack = await start_stack(recovery_seconds=0)
    await stack.cluster.decode[0].die()
    while stack.server.registry.up(Pool.DECODE):
        await stack.server.registry.wait_changed(2)
    status, body, headers = await stack.post("/v1/completions", BODY)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "is down" in body["error"]["message"]


async def test_a_dns_name_stands_for_all_of_its_addresses(start_stack: Any) -> None:
    cluster = FakeCluster()
    async with cluster:
        port = cluster.decode_workers[0].rpartition(":")[2]
        names = [f"dns:localhost:{port}"]
        stack = await start_stack(nullcontext(cluster), decode_workers=names)
        up = [worker.address for worker in stack.server.registry.up(Pool.DECODE)]
        assert up == [f"127.0.0.1:{port}"]
        assert (await stack.generate()).tokens[0] == stack.expected()


async def test_the_same_request_id_cannot_run_twice_at_once(stack: Any) -> None:
    reached, release = asyncio.Event(), asyncio.Event()
    stack.cluster.decode[0].faults.append(Fault("token", pausing(reached, release), 3))
    headers = {"X-Request-Id": "mine"}
    first = asyncio.create_task(post_with(stack, headers))
    await asyncio.wait_for(reached.wait(), 5)
    assert (await post_with(stack, headers))[0] == 400
    release.set()
    assert (await first)[0] == 200
    assert (await post_with(stack, headers))[0] == 200


async def post_with(stack: Any, headers: dict[str, str]) -> tuple[int, Any]:
    body = {**BODY, "max_tokens": 8}
    async with stack.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status != 200 or response.headers["X-Request-Id"] == "mine"
        return response.status, await response.json()
