"""What one side of a drafting stream writes, the other reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbraid.errors import DataLossError, IncompatibleError
from kvbraid.speculative.proposal import DraftSampling, DraftTask, Proposal, Resync
from kvbraid.transport.draft_answers import (
    AnsweredStep,
    Refused,
    answers_from_proto,
    fill_answers,
)
from kvbraid.transport.draft_grant import DraftGrant
from kvbraid.transport.draft_grant_wire import draft_grant_from_proto, draft_grant_to_proto
from kvbraid.transport.draft_rows import RowFormat, row_carrier, rows_are_finite
from kvbraid.transport.draft_step import fill_step, tasks_from_proto
from kvbraid.transport.draft_terms import (
    DraftPeer,
    DraftTerms,
    hello_from_proto,
    hello_to_proto,
    terms_from_proto,
    terms_to_proto,
)
from kvbraid.v1 import draft_pb2 as pb

TERMS = DraftTerms(
    epoch=2**64 - 1, drafter_kind="eagle3", drafter_digest="d", target_digest="t", hidden_size=3,
    row_dtype="bfloat16", tap_layers=(0, 5, 9), max_draft_tokens=7, predicts_from_anchor=False,
    vocab_size=100, draft_vocab_size=40, max_rows_per_message=64, max_sequences=4, max_position=99,
)  # fmt: skip
PEER = DraftPeer(2**64 - 1, "t", "d", 100, 7)


def test_handshake_round_trips() -> None:
    assert terms_from_proto(terms_to_proto(TERMS)) == TERMS
    assert hello_from_proto(hello_to_proto(PEER)) == PEER


@pytest.mark.parametrize(
    "field", [("protocol_version", 7), ("row_dtype", "int8"), ("hidden_size", 0),
              ("max_rows_per_message", 0), ("max_sequences", 0)],
)  # fmt: skip
def test_impossible_terms_are_refused(field: tuple[str, object]) -> None:
    message = terms_to_proto(TERMS)
    setattr(message, *field)
    with pytest.raises(IncompatibleError, match=field[0].split("_")[0]):
        terms_from_proto(message)


def test_grant_round_trips_and_impossible_ones_are_refused() -> None:
    grant = DraftGrant("host:1", bytes(16), 2**64 - 1, "a/0", "float16", 9)
    assert draft_grant_from_proto(draft_grant_to_proto(grant)) == grant
    for change in ({"transfer_id": b""}, {"row_dtype": "x"}, {"max_rows_per_message": 0}):
        with pytest.raises(IncompatibleError):
            replace(grant, **change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_steps_round_trip_bit_for_bit(dtype: str) -> None:
    row_format = RowFormat(3, dtype)
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(row_format.dtype)
    tasks = [
        DraftTask("a", 3, rows[:2], (1, 2), 2, 7, DraftSampling(0.5, -(2**63))),
        DraftTask("b", 0, rows[:0], (), 4, 1, starts_cold=True),
        DraftTask("c", 90, rows[2:].t().contiguous().t(), (99, 0, 5), 5, 0),
    ]
    carrier = row_carrier(row_format)
    message = pb.DraftStep(step_id=2**63)
    fill_step(message, tasks, ["x"], epoch=TERMS.epoch, carrier=carrier)
    read = pb.DraftStep.FromString(message.SerializeToString())
    got = tasks_from_proto(read, replace(TERMS, row_dtype=dtype), carrier, lambda key: f"p/{key}")
    for task, found in zip(tasks, got.tasks, strict=True):
        assert torch.equal(found.rows, task.rows)
        assert replace(found, rows=task.rows) == replace(task, key=f"p/{task.key}")
    assert (read.epoch, read.step_id, list(read.dropped_keys)) == (2**64 - 1, 2**63, ["x"])
    assert got.refused == frozenset()


def test_a_step_without_tasks_round_trips() -> None:
    carrier = row_carrier(TERMS.row_format)
    message = pb.DraftStep()
    fill_step(message, [], [], epoch=1, carrier=carrier)
    assert tasks_from_proto(message, TERMS, carrier, str).tasks == []


def message_of(step: AnsweredStep) -> pb.DraftAnswers:
    message = pb.DraftAnswers()
    fill_answers(message, step)
    return message


def test_answers_round_trip() -> None:
    step = AnsweredStep(
        7,
        (
            Proposal((1, -1, 2**31 - 1), (0.5, 0.25, 1.0)),
            Resync(12),
            Proposal(),
            Refused(),
            Proposal((3,)),
        ),
        0.25,
        0.000001,
    )
    assert answers_from_proto(message_of(step), 5) == step


@pytest.mark.parametrize("field", ["statuses", "num_held", "num_drafts", "num_confidences"])
def test_answers_that_do_not_fit_together_are_refused(field: str) -> None:
    message = message_of(AnsweredStep(7, (Proposal((1,), (0.5,)), Resync(1))))
    with pytest.raises(DataLossError, match="step 7 does not fit its 3 tasks"):
        answers_from_proto(message, 3)
    getattr(message, field).append(1)
    with pytest.raises(DataLossError):
        answers_from_proto(message, 2)


@pytest.mark.parametrize("field", ["token_ids", "confidences"])
def test_answers_with_stray_drafts_are_refused(field: str) -> None:
    message = message_of(AnsweredStep(7, (Proposal((1,), (0.5,)),)))
    getattr(message, field).append(1)
    with pytest.raises(DataLossError):
        answers_from_proto(message, 1)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ([1.0, 2.0, 3.0, 4.0], set()),
        ([1.0, float("-inf"), 3.0, float("inf")], {0, 2}),
        ([1.0, 2.0, float("nan"), 4.0], {2}),
        # Their sum is more than float32 holds; each of them is fine.
        ([3e38, 3e38, 3e38, 3e38], set()),
    ],
)
def test_tasks_whose_rows_are_not_finite_are_found(values: list[float], refused: set[int]) -> None:
    terms = replace(TERMS, row_dtype="float32")
    carrier = row_carrier(terms.row_format)
    rows = torch.tensor(values)[:, None].expand(4, 3)
    tasks = [
        DraftTask("a", 0, rows[:2], (1, 2), 2, 1),
        DraftTask("b", 0, rows[:0], (), 2, 1),
        DraftTask("c", 0, rows[2:], (1, 2), 2, 1),
    ]
    message = pb.DraftStep()
    fill_step(message, tasks, [], epoch=1, carrier=carrier)
    assert tasks_from_proto(message, terms, carrier, str).refused == refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_every_type_say_whether_they_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    for value in (float("inf"), float("-inf"), float("nan"), limits.max, limits.min, 0.0, -0.0):
        rows = torch.ones(5, 7, dtype=dtype)
        rows[3, 2] = value
        assert rows_are_finite(rows) == bool(rows.isfinite().all()), value
    assert rows_are_finite(rows[:0])
