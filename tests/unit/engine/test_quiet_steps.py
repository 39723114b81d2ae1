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
        steps.ran(2, has_prompt_rows=False)
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
    steps.ran(2, has_prompt_rows=False)
    steps.begin(after, 99.0)
    assert steps.take() == (1, 2, {})


@pytest.mark.parametrize(("num_windows", "has_prompt_rows"), [(2, True), (1, False)])
def test_a_step_with_a_prompt_or_without_one_of_its_sequences_is_not_timed(
    num_windows: int, has_prompt_rows: bool
) -> None:
    steps = QuietSteps()
    steps.begin([FIRST, SECOND], 10.0)
    steps.ran(num_windows, has_prompt_rows=has_prompt_rows)
    steps.begin([FIRST, SECOND], 11.0)
    assert steps.take() == (1, num_windows, {})


def test_a_planned_step_is_not_timed_here() -> None:
    steps = QuietSteps()
    steps.begin([FIRST], 10.0)
    steps.ran(1, has_prompt_rows=False)
    steps.begin([FIRST], 11.0)
    steps.begin([FIRST], 15.0)
    assert steps.take().seconds == {1: [1.0]}
