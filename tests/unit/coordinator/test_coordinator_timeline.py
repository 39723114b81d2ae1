"""Phases of the time to the first token add up to it, in every order of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from coordinator import timeline as timeline_module
from coordinator.timeline import Timeline
from kvbraid.telemetry.labels import TTFT_PHASES
from kvbraid.telemetry.metrics import RequestMetrics

PHASE = "kvbraid_coordinator_ttft_phase_seconds"
TTFT = "kvbraid_coordinator_time_to_first_token_seconds"
WAIT = "kvbraid_coordinator_handoff_wait_seconds"
GAP = "kvbraid_coordinator_inter_token_latency_seconds"


class Case:
    """A timeline on a clock that the test moves; the request arrived at second 0."""

    def __init__(self, set_clock: Callable[[float], None]) -> None:
        self.registry = CollectorRegistry()
        self._metrics = RequestMetrics(self.registry)
        self._set_clock = set_clock
        self.at(1.0)
        self.timeline = Timeline(self._metrics, 0.0)

    def at(self, seconds: float) -> Timeline:
        self._set_clock(seconds)
        return getattr(self, "timeline", None)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels)

    @property
    def phases(self) -> dict[str, float]:
        seconds = {p: self.value(f"{PHASE}_sum", phase=p) for p in TTFT_PHASES}
        return {phase: value for phase, value in seconds.items() if value}


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    clock = {"now": 0.0}
    monkeypatch.setattr(timeline_module.time, "monotonic", lambda: clock["now"])
    return Case(lambda seconds: clock.update(now=seconds))


def test_a_handoff_is_split_by_what_the_prefill_worker_says(case: Case) -> None:
    case.at(3.0).mark("queue")
    case.at(6.0).mark("decode_admit")
    case.at(16.0).tokens(1, "prefill")
    assert case.phases == {}, "not split yet"
    case.at(17.0).prefill_took(2.0, 7.0)
    assert case.phases == {
        "intake": 1, "queue": 2, "decode_admit": 3,
        "prefill_queue": 2, "prefill_compute": 7, "prefill_delivery": 1,
    }  # fmt: skip
    assert sum(case.phases.values()) == case.value(f"{TTFT}_sum") == 16


def test_the_order_of_first_token_and_handoff_does_not_matter(case: Case) -> None:
    case.at(2.0).prefill_took(0.25, 0.25)
    case.at(3.0).tokens(1, "prefill")
    assert case.phases == {
        "intake": 1, "prefill_queue": 0.25, "prefill_compute": 0.25, "prefill_delivery": 1.5
    }  # fmt: skip


def test_a_worker_whose_clock_runs_fast_cannot_break_the_sum(case: Case) -> None:
    case.at(4.0).tokens(1, "prefill")
    case.timeline.prefill_took(2.0, 9.0)
    assert case.phases == {"intake": 1, "prefill_queue": 2, "prefill_compute": 1}


def test_what_no_worker_split_stays_whole(case: Case) -> None:
    case.at(4.0).tokens(1, "prefill")
    case.timeline.attempt_ended()
    case.timeline.attempt_ended()
    assert case.phases == {"intake": 1, "prefill": 3}
    assert case.value(f"{PHASE}_count", phase="prefill") == 1


def test_failed_attempts_are_one_phase_and_intake_stays(case: Case) -> None:
    case.at(2.0).mark("queue")
    case.at(3.0).prefill_took(9.0, 9.0)
    case.at(4.0).attempt_ended()
    case.at(5.0).mark("retry")
    case.at(6.0).mark("queue")
    case.at(8.0).attempt_ended()
    case.at(9.0).mark("queue")
    case.at(10.0).tokens(2, "local_prefill")
    assert case.phases == {"intake": 1, "retry": 7, "queue": 1, "local_prefill": 1}
    assert case.value(f"{TTFT}_sum") == 10


def test_what_a_failed_attempt_said_is_not_taken_for_the_next(case: Case) -> None:
    case.at(2.0).prefill_took(0.5, 0.5)
    case.at(3.0).attempt_ended()
    case.at(6.0).tokens(1, "prefill")
    assert case.phases == {}
    case.timeline.prefill_took(1.0, 2.0)
    assert case.phases == {"intake": 1, "retry": 2, "prefill_queue": 1, "prefill_compute": 2}


def test_attempts_after_the_first_token_change_nothing(case: Case) -> None:
    case.at(2.0).tokens(1, "prefill")
    case.timeline.prefill_took(0.0, 1.0)
    case.at(3.0).attempt_ended()
    case.at(4.0).mark("queue")
    case.at(5.0).tokens(1, "prefill")
    case.timeline.prefill_took(1.0, 1.0)
    case.at(6.0).attempt_ended()
    assert case.phases == {"intake": 1, "prefill_compute": 1}
    assert case.value(f"{TTFT}_count") == 1


def test_the_first_gap_after_a_handoff_is_the_wait_for_it(case: Case) -> None:
    case.at(2.0).tokens(1, "prefill")
    case.at(5.0).tokens(2, "local_prefill")
    case.at(6.0).tokens(1, "local_prefill")
    assert (case.value(f"{WAIT}_sum"), case.value(f"{WAIT}_count")) == (3, 1)
    assert (case.value(f"{GAP}_sum"), case.value(f"{GAP}_count")) == (4, 3)


def test_a_local_prompt_waits_for_no_handoff(case: Case) -> None:
    case.at(2.0).tokens(1, "local_prefill")
    case.at(3.0).tokens(1, "local_prefill")
    assert case.value(f"{WAIT}_count") == 0
    assert case.phases == {"intake": 1, "local_prefill": 1}
