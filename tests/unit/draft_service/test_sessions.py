"""Decode workers and their sequences are remembered within bounds."""

from __future__ import annotations

import pytest

from draft_service.sessions import Session, Sessions
from draft_service.step_answer import Outcome
from kvbraid.errors import InvalidRequestError, OverloadedError
from kvbraid.transport.draft_answers import AnsweredStep


def test_keys_of_workers_never_meet() -> None:
    assert Session(1, 0, 4).own_key("a") != Session(17, 1, 4).own_key("a")
    assert Session(1, 0, 4).own_key("1/a") != Session(17, 1, 4).own_key("a")


def test_the_least_recently_used_sequences_go() -> None:
    session = Session(1, 0, 3)
    assert session.touch("abc") == []
    assert session.touch("a") == []
    assert session.touch("de") == ["b", "c"]
    session.forget("ax")
    assert session.keys == ("d", "e")


def test_only_the_last_answers_are_kept() -> None:
    session = Session(1, 0, 3)
    for step_id in range(1, 21):
        assert session.answer_to(step_id) is None
        session.begin(step_id).settle(AnsweredStep(step_id, ()))
    known = session.answer_to(13)
    assert known is not None
    told: list[Outcome] = []
    known.then(told.append)
    assert told == [AnsweredStep(13, ())]
    with pytest.raises(InvalidRequestError, match="step_id is 12, accepted: above 20"):
        session.answer_to(12)
    assert session.answer_to(10**6) is None


def test_workers_without_a_stream_make_room_oldest_first() -> None:
    evicted: list[int] = []
    sessions = Sessions(
        max_sessions=2, max_keys=4, on_forget=lambda session: evicted.append(session.incarnation)
    )
    first, second = object(), object()
    one = sessions.attach(1, first)
    two = sessions.attach(2, second)
    with pytest.raises(OverloadedError, match="2 decode workers"):
        sessions.attach(3, object())
    sessions.detach(one, first)
    sessions.detach(two, second)
    assert sessions.attach(1, second) is one, "a worker that comes back finds its session"
    sessions.detach(one, first)
    assert sessions.num_attached == 1, "an old stream that ends does not end the new one"
    assert sessions.attach(3, first).number not in (one.number, two.number)
    assert evicted == [2]


def test_whoever_repeats_a_step_is_told_when_it_is_answered() -> None:
    session = Session(1, 0, 3)
    told: list[tuple[str, Outcome]] = []
    session.begin(1).then(lambda outcome: told.append(("first", outcome)))
    repeated = session.answer_to(1)
    assert repeated is not None
    repeated.then(lambda outcome: told.append(("again", outcome)))
    assert told == []
    answered = AnsweredStep(1, ())
    repeated.settle(answered)
    assert told == [("first", answered), ("again", answered)]
