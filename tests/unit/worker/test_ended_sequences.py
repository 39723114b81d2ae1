"""Ends of sequences are told until a step that carried them was answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_answers import AnsweredStep
from kvbraid.transport.draft_step import MAX_DROPPED_KEYS
from kvbraid.transport.draft_stream import SentStep
from kvbraid.worker.ended_sequences import EndedSequences


class Step(SentStep):
    def wait(self, seconds: float) -> bool:
        return self.is_done


class Stream:
    """Writes down what steps carry."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []

    def begin_step(self, tasks: Sequence[DraftTask], dropped: Sequence[str]) -> SentStep:
        self.sent.append(list(dropped))
        return Step(len(tasks))


def ended(*keys: str) -> tuple[EndedSequences, Any]:
    sequences = EndedSequences()
    for key in keys:
        sequences.add(key)
    return sequences, Stream()


def test_an_answered_end_is_told_once() -> None:
    sequences, stream = ended("a", "b")
    sequences.begin_step(stream, ()).resolve(AnsweredStep(1, ()))
    assert not sequences.are_left()
    sequences.begin_step(stream, ())
    assert stream.sent == [["a", "b"], []]


def test_ends_without_an_answer_wait_for_it() -> None:
    sequences, stream = ended("a")
    step = sequences.begin_step(stream, ())
    sequences.add("b")
    sequences.begin_step(stream, ())
    assert stream.sent == [["a"], ["b"]]
    assert not sequences.are_left()
    step.resolve(None)
    assert sequences.are_left()


def test_lost_ends_are_told_again_before_later_ones() -> None:
    sequences, stream = ended("a", "b")
    sequences.begin_step(stream, ()).resolve(None)
    sequences.add("c")
    sequences.begin_step(stream, ()).resolve(None)
    sequences.begin_step(stream, ())
    assert stream.sent[1:] == [["a", "b", "c"]] * 2


def test_no_more_are_kept_than_a_step_takes() -> None:
    sequences, stream = ended(*(f"old{i}" for i in range(MAX_DROPPED_KEYS)))
    sequences.begin_step(stream, ()).resolve(None)
    sequences.add("new")
    sequences.begin_step(stream, ())
    names = stream.sent[1]
    assert len(names) == MAX_DROPPED_KEYS
    assert (names[0], names[-1]) == ("old1", "new")
