"""A draft service remembers a worker's steps over its streams."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from kvbraid.transport.draft_answers import AnsweredStep
from kvbraid.transport.draft_stream import SentStep, UnansweredSteps


class _Sent(SentStep):
    num_resolved = 0

    def wait(self, seconds: float) -> bool:
        return self.is_done

    def resolve(self, answered: AnsweredStep | None) -> None:
        super().resolve(answered)
        self.num_resolved += 1


def test_a_new_stream_does_not_repeat_the_ids_of_the_one_before() -> None:
    first = UnansweredSteps("h:1")
    ids = [first.add(_Sent(0)) for _ in range(3)]
    again = UnansweredSteps("h:1")
    assert ids[0] < ids[1] < ids[2] < again.add(_Sent(0))


@pytest.mark.parametrize("line", range(1, 6))
def test_the_engine_and_the_loop_may_end_a_stream_at_once(line: int) -> None:
    """line: where the one is when the other ends the stream."""
    steps, sent = UnansweredSteps("h:1"), [_Sent(0), _Sent(0)]
    for step in sent:
        steps.add(step)
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        if event == "line" and num_lines == line:
            steps.end()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        steps.end()
    finally:
        sys.settrace(before)
    assert num_lines >= line
    assert [step.num_resolved for step in sent] == [1, 1]
