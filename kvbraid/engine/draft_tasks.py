"""What a drafter is told and asked in one step: the rows that it lacks, as far as they are here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbraid.engine.draft_drawing import WindowSampling
from kvbraid.engine.sequence import Sequence
from kvbraid.kv.slots import LogicalSlots, slots_between
from kvbraid.speculative.proposal import DraftTask

# Most rows of one sequence in one step: a long prompt is told over several steps, and only then
# drafted for.
_MOST_ROWS = 1024


class TaskRows(Protocol):
    """Where a drafter's rows are read: `FusedRows`, or some of it."""

    def num_missing(self, slots: LogicalSlots) -> int:
        """See FusedRows."""
        ...

    def read(self, slots: LogicalSlots) -> Tensor:
        """Rows [n, d] of these slots, every one of which is held; valid until the next step."""
        ...


class Wanted(NamedTuple):
    """Drafts for one sequence. num_rows: rows that the drafter holds as far as we know. drawn_at:
    how drafts behind an anchor are drawn."""

    sequence: Sequence
    key: str
    num_rows: int
    num_wanted: int
    drawn_at: WindowSampling


class _Told(NamedTuple):
    """Rows [first, end) of a sequence, in these slots; num_missing rows before them are gone."""

    first: int
    end: int
    slots: NDArray[np.int64]
    num_missing: int


def draft_tasks(wanted: Seq[Wanted], rows: TaskRows, logical_page_size: int) -> list[DraftTask]:
    """One task for each; row i goes with token i + 1. The rows of all are read at once."""
    told = [_told(item, rows, logical_page_size) for item in wanted]
    read = rows.read(LogicalSlots(np.concatenate([one.slots for one in told])))
    parts = torch.split(read, [one.end - one.first for one in told])
    return [
        DraftTask(
            key=item.key,
            first_position=one.first,
            rows=part,
            next_token_ids=tuple(item.sequence.token_ids[one.first + 1 : one.end + 1]),
            anchor_id=item.sequence.token_ids[one.end],
            num_wanted=item.num_wanted if one.end == len(item.sequence.token_ids) - 1 else 0,
            sampling=item.drawn_at(one.end),
            starts_cold=one.num_missing > 0,
        )
        for item, one, part in zip(wanted, told, parts, strict=True)
    ]


def _told(item: Wanted, rows: TaskRows, logical_page_size: int) -> _Told:
    newest = len(item.sequence.token_ids) - 1
    first = min(item.num_rows, newest)
    slots = slots_between(item.sequence.pages, first, newest, logical_page_size)
    num_missing = rows.num_missing(slots)
    first += num_missing
    end = min(newest, first + _MOST_ROWS)
    return _Told(first, end, slots.array[num_missing : num_missing + end - first], num_missing)
