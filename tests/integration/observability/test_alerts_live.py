"""Faults of a real cluster fire their alerts in Prometheus. Minutes: `make test-alerts`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.observability.scenarios import SCENARIOS, Scenario
from tests.integration.observability.watched import (
    NEEDS_PROMETHEUS,
    await_firing,
    await_silence,
)

pytestmark = [NEEDS_PROMETHEUS, pytest.mark.slow, pytest.mark.timeout(300)]

ALERT_S = 150.0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_alerts_are_silent_and_fire_on_their_fault(scenario: Scenario, tmp_path: Path) -> None:
    with closing(scenario.run(tmp_path)) as phases:
        await_silence(next(phases), scenario.alerts)
        await_firing(next(phases), scenario.alerts, ALERT_S)
