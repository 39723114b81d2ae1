"""Many requests, many random failures and cancels: right tokens for all others, nothing left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvbraid.errors import DataLossError, KVBraidError, LeaseLostError, UnavailableError
from kvbraid.testing import FakeCluster, Fault

ERRORS = [LeaseLostError("gone"), DataLossError("damaged"), UnavailableError("draining")]
NUM_REQUESTS = 160
NUM_AT_ONCE = 16


def raising(error: KVBraidError) -> Callable[[], Awaitable[object]]:
    async def act() -> None:
        raise error

    return act


def add_faults(dice: random.Random, worker: Any, stages: list[str]) -> None:
    for _ in range(8):
        after = dice.choice([0, 0, 3])
        worker.faults.append(Fault(dice.choice(stages), raising(dice.choice(ERRORS)), after))
        if dice.random() < 0.2:
            worker.faults.append(Fault(stages[0], worker.restart))


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_failures_and_cancels(start_stack: Any, seed: int) -> None:
    dice = random.Random(seed)
    cluster = FakeCluster(num_prefill=2, num_decode=2)
    stack = await start_stack(cluster, max_attempts=40, recovery_seconds=10)
    for worker in cluster.prefill:
        add_faults(dice, worker, ["arrived", "first", "sent"])
    for worker in cluster.decode:
        add_faults(dice, worker, ["arrived", "granted", "start", "token"])
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(number: int) -> bool:
        first, length = dice.randrange(10, 3000), dice.choice([5, 40, 100])
        prompt = tuple(range(first, first + length))
        sampling = {"temperature": 1.0, "seed": number, "max_tokens": dice.randrange(1, 40)}
        cancel_after = dice.randrange(0, 40) if dice.random() < 0.4 else None
        received: list[int] = []
        async with gate:
            call = stack.call(prompt, timeout_s=60, **sampling)
            while (cancel_after is None or len(received) < cancel_after) and (
                response := await call.read()
            ):
                received.extend(response.chunk.token_ids)
            call.cancel()
        expected = stack.expected(prompt, **sampling)
        assert received == expected[: len(received)]
        assert cancel_after is not None or received == expected
        return len(received) == len(expected)

    finished = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
    assert NUM_REQUESTS * 0.5 < sum(finished) < NUM_REQUESTS
    assert stack.metric("kvbraid_coordinator_retries_total") > 10
    await stack.is_idle()
