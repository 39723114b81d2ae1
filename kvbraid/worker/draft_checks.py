"""What may go to a draft service and what may come from one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbraid.speculative.proposal import Answer, DraftTask, Proposal, Resync
from kvbraid.transport.draft_answers import Refused, WireAnswer
from kvbraid.transport.draft_terms import DraftTerms

CountFallback = Callable[[str], None]


def within_terms(tasks: Sequence[DraftTask], terms: DraftTerms) -> list[DraftTask | None]:
    """For each task what of it goes into one step: itself, its first rows only (and then nothing
    is wanted), or None where there is no room, in the step or in the drafter's context: a step that
    asks for more ends the stream, and so the drafts of all others."""
    num_rows = terms.max_rows_per_message
    parts: list[DraftTask | None] = []
    for index, task in enumerate(tasks):
        num = len(task.next_token_ids)
        has_place = index < terms.max_sequences and task.anchor_position <= terms.max_position
        if not has_place or (num > 0 and num_rows == 0):
            parts.append(None)
            continue
        parts.append(task if num <= num_rows else _first_rows(task, num_rows))
        num_rows -= min(num, num_rows)
    return parts


def _first_rows(task: DraftTask, num: int) -> DraftTask:
    ids = task.next_token_ids[:num]
    return replace(task, rows=task.rows[:num], next_token_ids=ids, anchor_id=ids[-1], num_wanted=0)


def checked_answer(
    answer: WireAnswer,
    sent: DraftTask,
    task: DraftTask,
    vocab_size: int,
    count: CountFallback,
) -> Answer | None:
    """What the engine may see of the answer to `sent`, the part of `task` that was sent.

    Drafts end before the first id outside the vocabulary and after as many as were wanted.
    count: called with the reason where the sequence gets less than it asked for.
    """
    match answer:
        case Refused():
            count("refused")
            return None
        case Resync(num_rows) if not 0 <= num_rows < max(1, sent.first_position):
            # What it says it lacks was not missing.
            count("refused")
            return None
        case Resync():
            count("resync")
            return answer
        case Proposal() if sent is not task:
            count("resync")
            return Resync(sent.anchor_position)
        case Proposal():
            return _checked_proposal(answer, task.num_wanted, vocab_size, count)


def _checked_proposal(
    proposal: Proposal, num_wanted: int, vocab_size: int, count: CountFallback
) -> Proposal:
    ids, confidences = proposal.token_ids, proposal.confidences
    bad = (i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    num = min(next(bad, len(ids)), num_wanted)
    is_complete = num == len(ids)
    has_law = all(math.isfinite(c) and 0.0 <= c <= 1.0 for c in confidences)
    if len(confidences) not in (0, len(ids)) or not has_law:
        is_complete, confidences = False, ()
    if is_complete:
        return proposal
    count("bad_ids")
    return Proposal(ids[:num], confidences[:num])
