from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.worker.draft_checks import within_terms

TERMS = DraftTerms(
    epoch=1, drafter_kind="eagle3", drafter_digest="", target_digest="", hidden_size=2,
    row_dtype="float32", tap_layers=(1,), max_draft_tokens=3, predicts_from_anchor=True,
    vocab_size=9, draft_vocab_size=9, max_rows_per_message=5, max_sequences=3, max_position=100,
)  # fmt: skip


def task(num_rows: int) -> DraftTask:
    ids = tuple(range(1, num_rows + 1))
    return DraftTask("a", 10, torch.zeros(num_rows, 2), ids, num_rows, 3)


def test_tasks_within_the_terms_go_as_they_are() -> None:
    tasks = [task(2), task(0), task(3)]
    assert all(part is t for part, t in zip(within_terms(tasks, TERMS), tasks, strict=True))


def test_the_first_rows_go_where_not_all_do_and_nothing_is_drafted_from_there() -> None:
    whole, cut, none = within_terms([task(2), task(4), task(1)], TERMS)
    assert whole is not None
    assert cut is not None
    assert (cut.next_token_ids, cut.anchor_id, cut.num_wanted) == ((1, 2, 3), 3, 0)
    assert (cut.rows.shape, cut.anchor_position) == ((3, 2), 13)
    assert none is None


def test_a_task_without_rows_goes_also_when_the_rows_are_used_up() -> None:
    parts = within_terms([task(5), task(0)], TERMS)
    assert [part is not None for part in parts] == [True, True]


def test_more_tasks_than_a_step_takes_stay() -> None:
    parts = within_terms([task(0)] * 5, TERMS)
    assert [part is None for part in parts] == [False] * 3 + [True] * 2


@pytest.mark.parametrize(("first", "goes"), [(97, True), (98, False)])
def test_a_sequence_beyond_the_drafters_context_stays(first: int, goes: bool) -> None:
    parts = within_terms([replace(task(3), first_position=first), task(1)], TERMS)
    assert [part is not None for part in parts] == [goes, True]
