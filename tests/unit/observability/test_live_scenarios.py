"""Alerts that can fire within minutes have a scenario that makes them fire in a real cluster."""

from __future__ import annotations

import re

import pytest

from deploy.observability.rules.alerts import ALERTS
from deploy.observability.rules.rule import Alert
from tests.integration.observability.scenarios import SCENARIOS
from tests.integration.observability.watched import HOLD_S

SOON_MINUTES = 2


def hold_minutes(alert: Alert) -> int:
    match = re.fullmatch(r"(\d+)m", alert.hold)
    assert match, f"{alert.name}: for {alert.hold}, accepted: whole minutes, which tests shorten"
    return int(match[1])


ALL = {rule.name: hold_minutes(rule) for rule in ALERTS.rules if isinstance(rule, Alert)}
SHOWN = {name for scenario in SCENARIOS for name in scenario.alerts}


@pytest.mark.parametrize("name", [name for name, hold in ALL.items() if hold <= SOON_MINUTES])
def test_an_alert_that_fires_soon_is_shown_live(name: str) -> None:
    assert name in SHOWN


def test_scenarios_fire_alerts_that_exist() -> None:
    assert set(ALL) >= SHOWN
    assert all(scenario.alerts for scenario in SCENARIOS)
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


def test_live_tests_keep_a_hold() -> None:
    assert HOLD_S > 0, "an alert that fires on its first sample is not what is shipped"
