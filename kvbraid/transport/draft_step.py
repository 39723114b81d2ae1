"""Steps of a drafting stream between domain types and draft.proto."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvbraid.errors import InvalidRequestError
from kvbraid.speculative.proposal import DraftSampling, DraftTask
from kvbraid.transport.draft_rows import RowCarrier, rows_are_finite
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.v1 import draft_pb2 as pb

MAX_KEY_CHARS = 256
MAX_DROPPED_KEYS = 4096

_GREEDY = DraftSampling()

Columns = Mapping[str, list[Any]]


@dataclass(frozen=True, slots=True)
class ReceivedTasks:
    """A peer's tasks. refused: indices of those whose rows are not finite."""

    tasks: list[DraftTask]
    refused: frozenset[int]


def fill_step(
    step: pb.DraftStep,
    tasks: Sequence[DraftTask],
    dropped: Sequence[str],
    *,
    epoch: int,
    carrier: RowCarrier,
) -> None:
    """Write one step into the empty message `step`; its id is the stream's to set.

    In place: a message that is made a part of another one is copied, with all its rows.
    """
    step.epoch = epoch
    step.keys.extend([task.key for task in tasks])
    step.first_positions.extend([task.first_position for task in tasks])
    step.num_rows.extend([len(task.next_token_ids) for task in tasks])
    carrier.pack([task.rows for task in tasks], step.rows)
    for task in tasks:
        step.next_token_ids.extend(task.next_token_ids)
    step.anchor_ids.extend([task.anchor_id for task in tasks])
    step.num_wanted.extend([task.num_wanted for task in tasks])
    if any(task.sampling != _GREEDY for task in tasks):
        step.temperatures.extend([task.sampling.temperature for task in tasks])
        step.signed_keys.extend([task.sampling.signed_key for task in tasks])
    if any(task.starts_cold for task in tasks):
        step.starts_cold.extend([task.starts_cold for task in tasks])
    if dropped:
        step.dropped_keys.extend(dropped)


def tasks_from_proto(
    message: pb.DraftStep,
    terms: DraftTerms,
    carrier: RowCarrier,
    name: Callable[[str], str],
) -> ReceivedTasks:
    """The tasks of a peer's step, `num_wanted` cut to what the drafter can. name: from the peer's
    key to the task's.

    Raises InvalidRequestError naming the field: whatever does not fit together, does not fit
    `terms`, or lies outside the vocabulary.
    """
    columns = _columns(message)
    next_ids = tuple(message.next_token_ids)
    _check_counts(columns, len(next_ids), terms)
    _check_values(columns, next_ids, terms)
    check_dropped(message.dropped_keys)
    num_rows = columns["num_rows"]
    ends = [0, *accumulate(num_rows)]
    rows = carrier.unpack(message.rows, ends[-1])
    parts = torch.split(rows, num_rows) if len(num_rows) > 1 else (rows,)
    most = terms.max_draft_tokens
    tasks = [
        DraftTask(
            name(key),
            first,
            part,
            next_ids[begin : begin + num],
            anchor,
            min(wanted, most),
            DraftSampling(temperature, signed_key),
            cold,
        )
        for part, begin, key, first, num, anchor, wanted, temperature, signed_key, cold in zip(
            parts, ends, *columns.values(), strict=False
        )
    ]
    return ReceivedTasks(tasks, _not_finite(rows, parts))


def _columns(message: pb.DraftStep) -> Columns:
    """Fields with one entry a sequence, in the order in which a task is made of them. Lists, once:
    every look into a message costs as much as a line of Python, and list() twice a slice."""
    keys = message.keys[:]
    num = len(keys)
    return {
        "keys": keys,
        "first_positions": message.first_positions[:],
        "num_rows": message.num_rows[:],
        "anchor_ids": message.anchor_ids[:],
        "num_wanted": message.num_wanted[:],
        "temperatures": message.temperatures[:] or [0.0] * num,
        "signed_keys": message.signed_keys[:] or [0] * num,
        "starts_cold": message.starts_cold[:] or [False] * num,
    }


def _not_finite(rows: Tensor, parts: Sequence[Tensor]) -> frozenset[int]:
    if rows_are_finite(rows):
        return frozenset()
    return frozenset(i for i, part in enumerate(parts) if not bool(part.isfinite().all()))


def check_dropped(keys: Sequence[str]) -> None:
    """Raises InvalidRequestError for too many ended sequences or names that none has."""
    if keys:
        _check_most("dropped_keys", len(keys), MAX_DROPPED_KEYS)
        for key in keys:
            check_key(key)


def check_key(key: str) -> None:
    """Raises InvalidRequestError for a name that no sequence has."""
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise InvalidRequestError(
            f"a key has {len(key)} characters, accepted: 1 to {MAX_KEY_CHARS}", field="keys"
        )


def check_drafted_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError naming `field` unless every id is in [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequestError(
            f"{field} has {wrong}, accepted: 0 to {vocab_size - 1}", field=field
        )


def check_span(first_position: int, num_rows: int, max_position: int) -> None:
    """Raises InvalidRequestError unless the rows lie inside the drafter's context."""
    if first_position + num_rows > max_position:
        raise InvalidRequestError(
            f"positions [{first_position}, {first_position + num_rows}): accepted are those below "
            f"{max_position}",
            field="first_positions",
        )


def _check_counts(columns: Columns, num_next_ids: int, terms: DraftTerms) -> None:
    num = len(columns["keys"])
    for field, values in columns.items():
        if len(values) != num:
            raise InvalidRequestError(f"{field} has {len(values)} entries, not {num}", field=field)
    _check_most("keys", num, terms.max_sequences)
    num_rows = sum(columns["num_rows"])
    _check_most("num_rows", num_rows, terms.max_rows_per_message)
    if num_next_ids != num_rows:
        raise InvalidRequestError(
            f"next_token_ids has {num_next_ids} entries, not {num_rows}", field="next_token_ids"
        )
    if len(set(columns["keys"])) != num:
        raise InvalidRequestError("a sequence is in the step twice", field="keys")


def _check_values(columns: Columns, next_ids: Sequence[int], terms: DraftTerms) -> None:
    for key, first, num in zip(
        columns["keys"], columns["first_positions"], columns["num_rows"], strict=True
    ):
        check_key(key)
        check_span(first, num, terms.max_position)
    check_drafted_ids("next_token_ids", next_ids, terms.vocab_size)
    check_drafted_ids("anchor_ids", columns["anchor_ids"], terms.vocab_size)
    _check_anchors(columns, next_ids)
    for temperature in columns["temperatures"]:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise InvalidRequestError(
                f"a temperature is {temperature}, accepted: 0 or more", field="temperatures"
            )


def _check_anchors(columns: Columns, next_ids: Sequence[int]) -> None:
    """Of a sequence with rows the newest token is told twice; a drafter takes no contradiction."""
    num_rows = columns["num_rows"]
    for anchor, num, end in zip(columns["anchor_ids"], num_rows, accumulate(num_rows), strict=True):
        if num and anchor != next_ids[end - 1]:
            raise InvalidRequestError(
                f"anchor_ids has {anchor}, accepted: {next_ids[end - 1]}, the token after the "
                "last row",
                field="anchor_ids",
            )


def _check_most(field: str, found: int, most: int) -> None:
    if found > most:
        raise InvalidRequestError(f"{field} come to {found}, accepted: up to {most}", field=field)
