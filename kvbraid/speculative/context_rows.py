"""The fused rows of one step, cut into pieces that bound the memory of a long prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.kv_rows import WritePlan, on_device
from kvbraid.speculative.draft_kv import DraftKv
from kvbraid.speculative.draft_sequences import DraftSequence

MAX_CHUNK_ROWS = 2048


class SequenceRows(NamedTuple):
    """rows [m, d] of positions [first_position, first_position + m) of one sequence."""

    sequence: DraftSequence
    first_position: int
    rows: Tensor


class ContextChunk(NamedTuple):
    """Some of a step's rows. span: which, counted over all sequences in order. rows: [T, d] in
    the drafter's dtype. positions: absolute, int64 [T], on the device."""

    span: slice
    rows: Tensor
    positions: Tensor
    write_plan: WritePlan


def context_chunks(
    parts: Sequence[SequenceRows], kv: DraftKv, dtype: torch.dtype
) -> Iterator[ContextChunk]:
    """All rows of `parts` in order, at most MAX_CHUNK_ROWS at a time; pages must be there."""
    parts = [part for part in parts if len(part.rows)]
    if not parts:
        return
    counts = [len(part.rows) for part in parts]
    positions = np.concatenate(
        [np.arange(p.first_position, p.first_position + len(p.rows)) for p in parts]
    )
    bases = np.repeat([part.sequence.base for part in parts], counts)
    slots = np.repeat([part.sequence.slot for part in parts], counts)
    rows = join_rows([part.rows for part in parts])
    for start in range(0, len(rows), MAX_CHUNK_ROWS):
        span = slice(start, start + MAX_CHUNK_ROWS)
        yield ContextChunk(
            span,
            rows[span].to(kv.device, dtype, non_blocking=True),
            on_device(positions[span], kv.device),
            kv.write_plan(slots[span], positions[span] - bases[span]),
        )


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows [m, d] of several sequences as one tensor, on the device of all or of the first."""
    if len(parts) == 1:
        return parts[0]
    device = parts[0].device
    return torch.cat([rows if rows.device == device else rows.to(device) for rows in parts])
