"""The fused rows of one step, cut into pieces that bound the memory of a long prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from attention.kv_rows import on_device
from kvbraid.speculative.draft_compute import Context
from kvbraid.speculative.draft_kv import DraftKv, Int64Array
from kvbraid.speculative.draft_session import Admitted

MAX_CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class ContextRows:
    """All rows that a step brings, sequence by sequence.

    rows: [T, d], of any dtype and device. next_token_ids, positions, kept_slots: as in `Context`.
    slots, indices: sequence of each row and its place there. All int64 [T].
    """

    rows: Tensor
    next_token_ids: Int64Array
    positions: Int64Array
    kept_slots: Int64Array
    slots: Int64Array
    indices: Int64Array

    @classmethod
    def of(cls, admitted: Sequence[Admitted], spare_slot: int) -> ContextRows | None:
        """None where no task brings a row. spare_slot: the KV's."""
        bringing = [item for item in admitted if item.task.next_token_ids]
        if not bringing:
            return None
        tasks = [item.task for item in bringing]
        counts = np.array([len(task.next_token_ids) for task in tasks])
        ends = counts.cumsum()
        own_slots = np.array([item.sequence.slot for item in bringing])
        firsts = np.array([task.first_position for task in tasks])
        bases = np.array([item.sequence.base for item in bringing])
        # Row t of the step is row t - (end - count) of its sequence's.
        positions = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
        kept_slots = np.full(ends[-1], spare_slot)
        kept_slots[ends - 1] = own_slots
        ids = chain.from_iterable(task.next_token_ids for task in tasks)
        return cls(
            rows=join_rows([task.rows for task in tasks]),
            next_token_ids=np.fromiter(ids, np.int64, int(ends[-1])),
            positions=positions,
            kept_slots=kept_slots,
            slots=np.repeat(own_slots, counts),
            indices=positions - np.repeat(bases, counts),
        )

    def __len__(self) -> int:
        return len(self.positions)

    def pieces(self, most_rows: int) -> Iterator[ContextRows]:
        """All rows in order, at most most_rows at a time."""
        for start in range(0, len(self), most_rows):
            span = slice(start, start + most_rows)
            yield ContextRows(
                self.rows[span],
                self.next_token_ids[span],
                self.positions[span],
                self.kept_slots[span],
                self.slots[span],
                self.indices[span],
            )


def context_chunks(context: ContextRows, kv: DraftKv, dtype: torch.dtype) -> Iterator[Context]:
    """All rows in order, at most MAX_CHUNK_ROWS at a time; pages must be there."""
    for piece in context.pieces(MAX_CHUNK_ROWS):
        yield Context(
            piece.rows.to(kv.device, dtype, non_blocking=True),
            on_device(piece.next_token_ids, kv.device),
            on_device(piece.positions, kv.device),
            on_device(piece.kept_slots, kv.device),
            kv.write_plan(piece.slots, piece.indices),
        )


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows [m, d] of several sequences as one tensor, on the device of all or of the first."""
    if len(parts) == 1:
        return parts[0]
    device = parts[0].device
    return torch.cat([rows if rows.device == device else rows.to(device) for rows in parts])
