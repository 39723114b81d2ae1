"""How a request ended, as the budgets of the alerts count it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from coordinator.completion import CompletionDelta
from coordinator.deadline import Deadline
from coordinator.front import Front
from kvbraid.errors import UnavailableError
from kvbraid.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk, Usage
from kvbraid.telemetry.metrics import RequestMetrics

FIRST = CompletionDelta(0, TokenChunk((5,)), "a")
LAST = CompletionDelta(0, TokenChunk((6,), (), FinishReason.LENGTH), "b", Usage(3, 2, 0))


class Script:
    """A pipeline that yields deltas and then fails, waits or ends."""

    def __init__(self, deltas: list[CompletionDelta], end: BaseException | None = None) -> None:
        self._deltas = deltas
        self._end = end

    async def run(self, *_: Any) -> AsyncIterator[CompletionDelta]:
        for delta in self._deltas:
            yield delta
        if self._end is not None:
            raise self._end


class Taken:
    """An intake that has admitted the request."""

    @contextmanager
    def running(self, request_id: str) -> Iterator[None]:
        yield


def front_of(script: Script) -> tuple[Any, CollectorRegistry]:
    registry = CollectorRegistry()
    front = Front(Taken(), script, RequestMetrics(registry))  # type: ignore[arg-type]
    request = GenerateRequest("r", (5, 6, 7), SamplingParams(max_tokens=2))
    return front.run(request, Deadline(5.0), "http"), registry


def outcomes(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "kvbraid_coordinator_requests_total" and sample.value
    }


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (Script([FIRST, LAST]), "length"),
        (Script([FIRST], UnavailableError("gone")), "unavailable"),
        (Script([FIRST], RuntimeError("a bug")), "internal"),
        (Script([FIRST], asyncio.CancelledError()), "cancelled"),
    ],
)
async def test_how_a_request_ended(script: Script, outcome: str) -> None:
    deltas, registry = front_of(script)
    try:
        async for _ in deltas:
            pass
    except (UnavailableError, RuntimeError, asyncio.CancelledError):
        pass
    assert outcomes(registry) == {outcome: 1}


@pytest.mark.parametrize(("num_read", "outcome"), [(1, "cancelled"), (2, "length")])
async def test_a_client_that_leaves(num_read: int, outcome: str) -> None:
    deltas, registry = front_of(Script([FIRST, LAST]))
    async with aclosing(deltas) as reading:
        for _ in range(num_read):
            await anext(reading)
    assert outcomes(registry) == {outcome: 1}
