"""When the engine's news reach the event loop, and in which order."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvbraid.engine.events import EngineEvent, RequestFailed, StepReport, TokensReady
from kvbraid.engine.news import News
from kvbraid.engine.sequence import SequenceKey
from kvbraid.errors import UnavailableError
from kvbraid.request import TokenChunk


class Scripted:
    """News with a clock that stands still until it is set."""

    def __init__(self, *, may_wait: bool = True) -> None:
        self.now = 100.0
        self.told: list[EngineEvent] = []
        self.steps: list[StepReport] = []
        self.news = News(
            self.told.append, self.steps.append, may_wait=may_wait, clock=lambda: self.now
        )

    def step(self, num_sequences: int, seconds: float) -> int:
        """A step of so many texts, each in its midst; how many events were told when the next one
        was launched."""
        before = len(self.told)
        for sequence in range(num_sequences):
            self.news.tell_tokens(tokens(sequence))
        self.now += seconds
        self.news.flush_due()
        return len(self.told) - before


def tokens(sequence: int) -> TokensReady:
    return TokensReady(SequenceKey(str(sequence), 0, 0), TokenChunk((5,)), 0)


def failure(sequence: int) -> RequestFailed:
    return RequestFailed(SequenceKey(str(sequence), 0, 0), UnavailableError("gone"))


def test_steps_that_are_shorter_than_their_messages_are_told_together() -> None:
    """Eight texts: a message of each every 8 ms."""
    scripted = Scripted()
    assert scripted.step(8, seconds=0.0021) == 8  # nothing was told for long
    assert [scripted.step(8, seconds=0.0021) for _ in range(8)] == [0, 0, 0, 32, 0, 0, 0, 32]


@pytest.mark.parametrize(("num_sequences", "seconds"), [(1, 0.0011), (8, 0.009), (500, 0.021)])
def test_longer_steps_are_told_one_by_one(num_sequences: int, seconds: float) -> None:
    scripted = Scripted()
    for _ in range(5):
        assert scripted.step(num_sequences, seconds) == num_sequences


def test_no_text_waits_longer_than_a_fiftieth_of_a_second() -> None:
    scripted = Scripted()
    scripted.step(500, 0.001)
    numbers = [scripted.step(500, seconds=0.0021) for _ in range(10)]
    assert numbers == [0] * 9 + [5000]


@pytest.mark.parametrize("event", [tokens(3), failure(3)], ids=["first or last", "failed"])
def test_what_is_urgent_takes_along_what_was_before_it(event: EngineEvent) -> None:
    scripted = Scripted()
    scripted.step(8, seconds=0.001)
    assert scripted.step(8, seconds=0.001) == 0
    scripted.news.tell(event)
    scripted.news.flush_due()
    assert scripted.told[8:] == [*map(tokens, range(8)), event]
    assert scripted.step(8, seconds=0.001) == 0  # the next ones wait again


def test_everything_is_told_before_the_engine_sleeps() -> None:
    scripted = Scripted()
    scripted.step(8, seconds=0.001)
    scripted.step(8, seconds=0.001)
    scripted.news.flush()
    assert len(scripted.told) == 16


def test_steps_are_reported_though_tokens_wait() -> None:
    scripted = Scripted()
    scripted.step(8, seconds=0.001)
    report = cast(StepReport, cast(Any, object()))
    scripted.news.report(report)
    assert scripted.step(8, seconds=0.001) == 0
    assert scripted.steps == [report]


def test_nothing_waits_where_steps_keep_the_host_busy() -> None:
    scripted = Scripted(may_wait=False)
    for number in range(3):
        scripted.news.tell_tokens(tokens(number))
        assert len(scripted.told) == number + 1
