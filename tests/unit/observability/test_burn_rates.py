"""Budget alerts need both of their windows: neither a short burst nor what is over wakes anyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.observability.alert_cases import Series
from tests.unit.observability.test_alerts import promtool_test, run_tests

_GOOD = 'kvbraid_coordinator_requests_total{api="http",outcome="stop"}'
_PER_STEP = 1000

Phase = tuple[int, float]
"""Minutes, and the part that goes wrong."""


@dataclass(frozen=True)
class Speed:
    """Windows in minutes. bad: a part that burns any of the budgets too fast, while the part of
    the short window in the long one does not."""

    name: str
    short: int
    long: int
    step: str
    steps_a_minute: int
    bad: float


FAST = Speed("Fast", 5, 60, "15s", 4, 0.17)
SLOW = Speed("Slow", 30, 360, "1m", 1, 0.07)
# A thousandth of the requests may fail, a hundredth of the latencies may be too long.
OF_ERRORS = 0.1


def counter(parts: Sequence[tuple[int, float]]) -> str:
    """Rises by the second number at each of the first number of steps, part after part."""
    texts, value = [], 0.0
    for num_steps, rise in parts:
        texts.append(f"{value:g}+{rise:g}x{num_steps}")
        value += rise * (num_steps + 1)
    return " ".join(texts)


def series_of(alert: str, phases: Sequence[Phase], speed: Speed) -> Series:
    """What a cluster shows of which a part goes wrong."""
    steps = [(minutes * speed.steps_a_minute - 1, bad) for minutes, bad in phases]
    good = counter([(n, _PER_STEP * (1 - bad)) for n, bad in steps])
    whole = counter([(n, _PER_STEP) for n, _ in steps])
    if alert == "Error":
        lost = counter([(n, _PER_STEP * bad) for n, bad in steps])
        return {_GOOD: good, _GOOD.replace("stop", "deadline"): lost}
    name, bound = {
        "Ttft": ("kvbraid_coordinator_time_to_first_token_seconds", "5.0"),
        "InterToken": ("kvbraid_coordinator_inter_token_latency_seconds", "0.2"),
    }[alert]
    return {f'{name}_bucket{{le="{bound}"}}': good, f"{name}_count": whole, _GOOD: whole}


@pytest.mark.parametrize("speed", [FAST, SLOW], ids=lambda speed: speed.name)
@pytest.mark.parametrize("alert", ["Ttft", "InterToken", "Error"])
def test_a_budget_alert_needs_both_windows(
    alert: str, speed: Speed, promtool: Any, tmp_path: Path
) -> None:
    bad = speed.bad * (OF_ERRORS if alert == "Error" else 1)
    long, short = speed.long, speed.short
    cases = {
        "all of it": ([(long + 2 * short, bad)], long + short, 1),
        # Long enough for the short window, and for what an alert holds.
        "a burst": ([(long, 0.0), (2 * short, bad)], long + 2 * short - 1, 0),
        "over since": ([(long, bad), (3 * short, 0.0)], long + short + 2, 0),
    }
    for case, (phases, at, num_firing) in cases.items():
        name = f"KVBraid{alert}Budget{speed.name}"
        series = series_of(alert, phases, speed)
        group = promtool_test(series, name, f"{at}m", speed.step, num_firing)
        done = run_tests(promtool, tmp_path, name, group)
        assert done.returncode == 0, case + done.stdout + done.stderr
