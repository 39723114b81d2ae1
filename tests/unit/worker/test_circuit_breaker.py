from __future__ import annotations

import pytest

from kvbraid.worker.circuit_breaker import CircuitBreaker


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def breaker(now: list[float]) -> CircuitBreaker:
    return CircuitBreaker(max_failures=3, probe_s=1.0, clock=lambda: now[0])


def fail(breaker: CircuitBreaker, times: int) -> list[bool]:
    return [breaker.record_failure() for _ in range(times)]


def test_it_opens_after_so_many_failures_in_a_row(breaker: CircuitBreaker) -> None:
    assert fail(breaker, 2) == [False, False]
    breaker.record_success()
    assert fail(breaker, 3) == [False, False, True]
    assert not breaker.is_closed
    assert fail(breaker, 1) == [False], "told once"


def test_a_probe_is_due_after_its_time_and_later_each_time_it_fails(
    breaker: CircuitBreaker, now: list[float]
) -> None:
    assert breaker.seconds_to_probe is None
    fail(breaker, 3)
    for wait_s in (1.0, 2.0, 4.0):
        assert breaker.seconds_to_probe == wait_s
        now[0] += wait_s
        assert breaker.seconds_to_probe == 0
        breaker.record_probe(succeeded=False)


def test_backoff_is_bounded(breaker: CircuitBreaker) -> None:
    fail(breaker, 3)
    for _ in range(100):
        breaker.record_probe(succeeded=False)
    assert breaker.seconds_to_probe == 64.0


def test_after_a_probe_one_failure_opens_it_for_longer(
    breaker: CircuitBreaker, now: list[float]
) -> None:
    fail(breaker, 3)
    now[0] += 1.0
    breaker.record_probe(succeeded=True)
    assert breaker.is_closed
    assert fail(breaker, 1) == [True]
    assert breaker.seconds_to_probe == 2.0


def test_a_call_that_succeeds_after_a_probe_forgets_everything(
    breaker: CircuitBreaker, now: list[float]
) -> None:
    fail(breaker, 3)
    breaker.record_probe(succeeded=True)
    breaker.record_success()
    assert fail(breaker, 3) == [False, False, True]
    assert breaker.seconds_to_probe == 1.0


def test_a_probe_nobody_needed_changes_nothing(breaker: CircuitBreaker) -> None:
    breaker.record_probe(succeeded=False)
    assert breaker.is_closed
    assert fail(breaker, 3) == [False, False, True]
