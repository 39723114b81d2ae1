"""A draft service remembers a worker's steps over its streams."""

from __future__ import annotations

from kvbraid.transport.draft_stream import SentStep, UnansweredSteps


class _Sent(SentStep):
    def wait(self, seconds: float) -> bool:
        return self.is_done


def test_a_new_stream_does_not_repeat_the_ids_of_the_one_before() -> None:
    first = UnansweredSteps("h:1")
    ids = [first.add(_Sent(0)) for _ in range(3)]
    again = UnansweredSteps("h:1")
    assert ids[0] < ids[1] < ids[2] < again.add(_Sent(0))
