"""Answers of a drafting stream between domain types and draft.proto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from kvbraid.errors import DataLossError
from kvbraid.speculative.proposal import Answer, Proposal, Resync
from kvbraid.v1 import draft_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refused:
    """The service took nothing: the task's rows are not finite."""


WireAnswer = Answer | Refused


@dataclass(frozen=True, slots=True)
class AnsweredStep:
    """What a service answered to the step `step_id`, one entry a task.

    queue_s: from the step's arrival to its computation. compute_s: of the computation.
    """

    step_id: int
    answers: tuple[WireAnswer, ...]
    queue_s: float = 0.0
    compute_s: float = 0.0


_PROPOSED = pb.DRAFT_STATUS_PROPOSED
_STATUSES: dict[type, pb.DraftStatus.ValueType] = {
    Proposal: _PROPOSED,
    Resync: pb.DRAFT_STATUS_NEED_RESYNC,
    Refused: pb.DRAFT_STATUS_REFUSED,
}
_NO_DRAFTS: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())


def fill_answers(message: pb.DraftAnswers, step: AnsweredStep) -> None:
    """Write an answered step into the empty `message`, in place."""
    drafts = [
        (a.token_ids, a.confidences) if isinstance(a, Proposal) else _NO_DRAFTS
        for a in step.answers
    ]
    message.step_id = step.step_id
    message.statuses.extend([_status(answer) for answer in step.answers])
    message.num_held.extend([a.num_rows if isinstance(a, Resync) else 0 for a in step.answers])
    message.num_drafts.extend([len(ids) for ids, _ in drafts])
    message.num_confidences.extend([len(confidences) for _, confidences in drafts])
    for ids, confidences in drafts:
        message.token_ids.extend(ids)
        message.confidences.extend(confidences)
    message.queue_us = round(step.queue_s * 1e6)
    message.compute_us = round(step.compute_s * 1e6)


def answers_from_proto(message: pb.DraftAnswers, num_tasks: int) -> AnsweredStep:
    """What a service answered, taken as it came: drafts are not looked at.

    Raises DataLossError when the message does not fit together or to `num_tasks`.
    """
    statuses, num_held = list(message.statuses), list(message.num_held)
    num_drafts, num_confidences = list(message.num_drafts), list(message.num_confidences)
    ids, confidences = tuple(message.token_ids), tuple(message.confidences)
    fits = (
        len(statuses) == len(num_held) == len(num_drafts) == len(num_confidences) == num_tasks
        and sum(num_drafts) == len(ids)
        and sum(num_confidences) == len(confidences)
    )
    if not fits:
        raise DataLossError(
            f"the answer to step {message.step_id} does not fit its {num_tasks} tasks"
        )
    drafts = zip(_parts(ids, num_drafts), _parts(confidences, num_confidences), strict=True)
    return AnsweredStep(
        step_id=message.step_id,
        answers=tuple(
            _answer(status, held, *draft)
            for status, held, draft in zip(statuses, num_held, drafts, strict=True)
        ),
        queue_s=message.queue_us / 1e6,
        compute_s=message.compute_us / 1e6,
    )


def _status(answer: WireAnswer) -> pb.DraftStatus.ValueType:
    return _STATUSES[type(answer)]


def _answer(
    status: int, num_held: int, token_ids: tuple[int, ...], confidences: tuple[float, ...]
) -> WireAnswer:
    if status == _PROPOSED:
        return Proposal(token_ids, confidences)
    if status == _STATUSES[Resync]:
        return Resync(num_held)
    return Refused()


def _parts(values: tuple[T, ...], counts: Sequence[int]) -> list[tuple[T, ...]]:
    return [values[begin:end] for begin, end in pairwise([0, *accumulate(counts)])]
