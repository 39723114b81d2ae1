"""What a benchmark reads from a decode worker's metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.step_parts import PairedParts, StepParts, part_rows, parts_of
from kvbraid.telemetry.engine_metrics import EngineMetrics
from kvbraid.telemetry.speculation_metrics import SpeculationMetrics


def test_parts_of_steps_are_what_the_worker_observed() -> None:
    registry = CollectorRegistry()
    engine, speculation = EngineMetrics(registry), SpeculationMetrics(registry)
    engine.step_seconds.labels(kind="decode").observe(0.5)
    before = parts_of(generate_latest(registry).decode())
    for seconds in (1.0, 3.0):
        engine.step_seconds.labels(kind="decode").observe(seconds)
    engine.step_seconds.labels(kind="mixed").observe(2.0)
    for part, seconds in (("tap", 9.0), ("draft", 0.5), ("verify", 1.0), ("draft", 1.5)):
        speculation.observe_part(part, seconds)
    speculation.observe_part("verify", 2.0)
    found = parts_of(generate_latest(registry).decode()).since(before)
    assert found == StepParts(2.0, 3.0, 2, 6.0, 3)
    assert found + found == StepParts(4.0, 6.0, 4, 12.0, 6)


def test_a_drafted_step_is_compared_with_a_plain_one() -> None:
    plain = StepParts(step_s=4.0, num_steps=2)
    twice = PairedParts(plain, StepParts(3.0, 9.0, 3, 13.0, 4))
    drafting, verifying = part_rows("m x1", twice + twice)
    assert (drafting.ours, drafting.peer, drafting.ratio) == pytest.approx((1000, 2000, 0.5))
    assert (verifying.ours, verifying.ratio) == pytest.approx((3000, 1.5))
    nothing = PairedParts(plain, StepParts(step_s=1.0, num_steps=1))
    assert list(part_rows("m x1", nothing)) == []
