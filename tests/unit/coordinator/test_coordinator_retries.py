"""When an attempt is followed by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from coordinator.completion import Completion
from coordinator.config import RoutingSettings
from coordinator.deadline import Deadline
from coordinator.messages import WorkerInfo
from coordinator.registry import Pool, Registry, Worker, WorkerState
from coordinator.retries import Retries
from coordinator.router import Placement
from kvbraid.errors import (
    DataLossError,
    DeadlineError,
    LeaseLostError,
    OverloadedError,
    UnavailableError,
)
from kvbraid.request import GenerateRequest, SamplingParams, TokenChunk
from kvbraid.telemetry.metrics import PlacementMetrics
from kvbraid.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "assets" / "tiny-mla")
INFO = WorkerInfo("decode", 1, "m", "d", 1000, 8000, 8000, 0, 0, 4, 0)


def up(pool: Pool, address: str) -> Worker:
    worker = Worker(pool, address)
    worker.is_serving = True
    worker.take(INFO)
    return worker


class Case:
    """One broken completion on two decode workers and one prefill worker."""

    def __init__(self, **settings: Any) -> None:
        self.workers = [up(Pool.DECODE, "a"), up(Pool.DECODE, "b")]
        self.sender = up(Pool.PREFILL, "p")
        metrics = PlacementMetrics(CollectorRegistry())
        self.registry = Registry(
            prefill=[], decode=[], make_client=lambda _: pytest.fail("no client is needed"),
            poll_s=1.0, recovery_s=3.0, vocab_size=100, metrics=metrics,
        )  # fmt: skip
        known = [*self.workers, self.sender]
        self.registry.workers = lambda pool: [  # type: ignore[method-assign]
            worker for worker in known if worker.pool is pool
        ]
        self.retries = Retries(self.registry, RoutingSettings(**settings), metrics)
        request = GenerateRequest("r", (5, 6, 7), SamplingParams(max_tokens=9))
        self.completion = Completion(request, 0, TOKENIZER)

    def fail(self, error: Any, worker: int = 0) -> None:
        placement = Placement(self.workers[worker], self.sender, 12, 3)
        self.retries.note_failure(error, self.completion, placement, None)


def test_a_worker_that_is_unavailable_counts_as_down_until_it_answers() -> None:
    case = Case()
    case.fail(UnavailableError("draining"))
    first, second = case.workers
    assert (first.state, second.state) == (WorkerState.DOWN, WorkerState.UP)
    assert case.retries.failed_workers == [first]
    assert first.poll_now.is_set()
    first.take(INFO)
    assert first.state is WorkerState.UP


def test_damaged_rows_say_nothing_against_the_worker() -> None:
    case = Case()
    case.fail(DataLossError("damaged"))
    assert case.workers[0].state is WorkerState.UP
    assert case.retries.failed_workers == []


def test_a_lost_lease_speaks_against_the_handoff_and_for_another_decode_worker() -> None:
    case = Case()
    case.fail(LeaseLostError("rows did not get there"))
    assert case.retries.broken_handoffs == [(case.sender, case.workers[0])]
    assert case.retries.failed_workers == [case.workers[0]]
    assert case.workers[0].state is WorkerState.UP


def test_overload_is_passed_on_once_every_worker_has_refused() -> None:
    case = Case()
    case.fail(OverloadedError("full"), 0)
    with pytest.raises(OverloadedError):
        case.fail(OverloadedError("full"), 1)


def test_overload_does_not_end_what_has_begun() -> None:
    case = Case()
    case.completion.add(TokenChunk((300,)), 0, 0)
    case.fail(OverloadedError("full"), 0)
    case.fail(OverloadedError("full"), 1)


def test_refusals_are_no_attempts_while_a_broken_completion_may_wait() -> None:
    case = Case(max_attempts=2, recovery_seconds=100)
    case.completion.add(TokenChunk((300,)), 0, 0)
    case.fail(DataLossError("it broke"))
    for _ in range(5):
        case.fail(OverloadedError("full"))
    with pytest.raises(DataLossError, match="again"):
        case.fail(DataLossError("again"))


def test_refusals_are_attempts_once_it_has_waited() -> None:
    case = Case(max_attempts=3, recovery_seconds=0)
    case.completion.add(TokenChunk((300,)), 0, 0)
    case.fail(DataLossError("it broke"))
    case.fail(OverloadedError("full"))
    with pytest.raises(OverloadedError):
        case.fail(OverloadedError("full"))


def test_attempts_are_bounded() -> None:
    case = Case(max_attempts=2)
    case.fail(DataLossError("one"))
    with pytest.raises(DataLossError, match="two"):
        case.fail(DataLossError("two"))


def test_patience_begins_with_the_break_and_is_renewed_by_progress() -> None:
    case = Case(recovery_seconds=100)
    assert case.retries.recovery_s() == 0
    case.fail(DataLossError("one"))
    assert 99 < case.retries.recovery_s() <= 100
    case.retries.note_progress()
    assert case.retries.recovery_s() == 0


async def test_backing_off_never_outlasts_the_deadline() -> None:
    case = Case()
    case.fail(DataLossError("one"))
    deadline = Deadline(1e-4)

    async def back_off_for_ever() -> None:
        while True:
            await case.retries.back_off(deadline)

    with pytest.raises(DeadlineError):
        await back_off_for_ever()
