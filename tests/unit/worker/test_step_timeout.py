from __future__ import annotations

from kvbraid.worker.step_timeout import StepTimeout


def waits(limit_s: float, fraction: float, steps_s: list[float], waited_s: float) -> list[float]:
    """What each wait may last, for steps of these lengths with `waited_s` of wait in each."""
    now = [0.0]
    timeout = StepTimeout(limit_s=limit_s, fraction=fraction, clock=lambda: now[0])
    found = []
    for step_s in steps_s:
        found.append(timeout.begin_wait())
        now[0] += waited_s
        timeout.end_wait()
        now[0] += step_s
    return [round(seconds, 6) for seconds in found]


def test_before_a_step_is_measured_the_limit_holds() -> None:
    assert waits(0.05, 0.5, [1.0], 0.0) == [0.05]


def test_the_smaller_of_limit_and_fraction_holds_and_the_wait_is_no_part_of_the_step() -> None:
    assert waits(0.05, 0.5, [0.01] * 3, 0.04) == [0.05, 0.005, 0.005]
    assert waits(0.002, 0.5, [0.01] * 3, 0.04) == [0.002] * 3


def test_an_idle_pause_does_not_count() -> None:
    assert waits(10.0, 1.0, [0.01, 0.01, 5.0, 0.01], 0.0)[1:] == [0.01, 0.01, 0.01]


def test_it_follows_when_steps_become_slower() -> None:
    assert waits(10.0, 1.0, [0.01] * 9 + [0.03] * 6, 0.0)[-1] == 0.03
