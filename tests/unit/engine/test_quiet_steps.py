"""Steps without a plan are counted, and timed where nothing else was in them."""

from __future__ import annotations

from typing import cast

import pytest

from kvbraid.engine.quiet_steps import QuietSteps
from kvbraid.engine.sequence import Sequence

FIRST, SECOND = (cast(Sequence, object()) for _ in range(2))


def test_a_step_takes_until_the_next_one_of_the_same_sequences() -> None:
    steps = QuietSteps()
    for now_s in (10.0, 11.0, 13.0):
        steps.begin([FIRST, SECOND], now_s)
        steps.ran(2, is_timed=True)
    steps.begin([FIRST, SECOND], 16.0)
    taken = steps.take()
    assert (taken.num_steps, taken.num_windows) == (3, 6)
    assert taken.seconds == {2: [1.0, 2.0, 3.0]}
    assert steps.take() == (0, 0, {})


@pytest.mark.parametrize("after", [[SECOND, FIRST], [FIRST], []])
def test_where_others_come_or_go_nothing_is_known_of_the_step_before(
    after: list[Sequence],
) -> None:
    """Its end may have been long ago, or the newcomer's prompt have been read meanwhile."""
    steps = QuietSteps()
    steps.begin([FIRST, SECOND], 10.0)
    steps.ran(2, is_timed=True)
    steps.begin(after, 99.0)
    assert steps.take() == (1, 2, {})


@pytest.mark.parametrize(("num_windows", "is_timed"), [(2, False), (1, True)])
def test_a_step_with_a_prompt_or_without_one_of_its_sequences_is_not_timed(
    num_windows: int, is_timed: bool
) -> None:
    steps = QuietSteps()
    steps.begin([FIRST, SECOND], 10.0)
    steps.ran(num_windows, is_timed=is_timed)
    steps.begin([FIRST, SECOND], 11.0)
    assert steps.take() == (1, num_windows, {})


def test_a_planned_step_is_not_timed_here() -> None:
    steps = QuietSteps()
    steps.begin([FIRST], 10.0)
    steps.ran(1, is_timed=True)
    steps.begin([FIRST], 11.0)
    steps.begin([FIRST], 15.0)
    assert steps.take().seconds == {1: [1.0]}


def test_steps_that_did_not_begin_here_are_counted_and_lengthen_none_that_did() -> None:
    steps = QuietSteps()
    steps.begin([FIRST], 10.0)
    steps.ran(1, is_timed=True)
    for _ in range(3):
        steps.ran(1, is_timed=False)
    steps.begin([FIRST], 99.0)
    assert steps.take() == (4, 4, {})


def test_a_few_steps_of_a_size_are_enough_until_they_are_taken() -> None:
    steps = QuietSteps()
    now_s = 10.0
    while steps.is_timing(1):
        steps.begin([FIRST], now_s)
        steps.ran(1, is_timed=True)
        now_s += 1.0
    assert steps.is_timing(2)
    assert set(steps.take().seconds) == {1}
    assert steps.is_timing(1)
