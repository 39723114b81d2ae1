"""How the torch backend cuts a decode batch into pieces that are attended to in one call each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.rows import DecodeRows, contiguous_start, row_ids

# A batch is cut where padding a sequence to the longest would more than double its rows, unless
# all are so short that the extra calls cost more than the padding.
_SHORT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences of similar length. Keys of a sequence: `num_rows` pool rows, then the window.

    sequences: int64 [n] indices into the batch, or None for the whole batch in order.
    start: first pool row if this is one sequence of one contiguous run, else None.
    row_ids: int64 [n * (num_rows + window keys)] pool rows to gather, None if start is set or there
        are no pool rows. Places of window keys hold a live row and are overwritten.
    bias: float32 [n, 1, 1 or w, num_rows + window keys], 0 or -inf; None when all is visible.
    """

    num_sequences: int
    sequences: Tensor | None
    num_rows: int
    start: int | None
    row_ids: Tensor | None
    bias: Tensor | None


def plan_segments(rows: DecodeRows, device: torch.device) -> list[Segment]:
    """Segments of all sequences that have keys on this rank; the others are in none."""
    present = [
        i
        for i, length in enumerate(rows.committed_lens)
        if length > 0 or (rows.has_window and not rows.is_padding[i])
    ]
    return [_plan_segment(rows, sorted(members), device) for members in _cut(rows, present)]


def _cut(rows: DecodeRows, present: list[int]) -> list[list[int]]:
    pieces: list[list[int]] = []
    longest = 0
    for i in sorted(present, key=lambda i: -rows.committed_lens[i]):
        if not pieces or (longest > _SHORT_ROWS and 2 * rows.committed_lens[i] < longest):
            pieces.append([])
            longest = rows.committed_lens[i]
        pieces[-1].append(i)
    return pieces


def _plan_segment(rows: DecodeRows, members: list[int], device: torch.device) -> Segment:
    lengths = [rows.committed_lens[i] for i in members]
    num_rows = max(lengths)
    window_keys = rows.window if rows.has_window else 0
    is_whole_batch = len(members) == len(rows.committed_lens)
    start = ids = None
    if num_rows > 0:
        table = rows.page_table if is_whole_batch else rows.page_table[members]
        if len(members) == 1 and not window_keys:
            start = contiguous_start(table[0], num_rows, rows.page_size)
        if start is None:
            ids = row_ids(table, lengths, num_rows + window_keys, rows.page_size)
            ids = ids.flatten().to(device)
    return Segment(
        num_sequences=len(members),
        sequences=None if is_whole_batch else torch.tensor(members).to(device),
        num_rows=num_rows,
        start=start,
        row_ids=ids,
        bias=_bias(rows, lengths, device),
    )


def _bias(rows: DecodeRows, lengths: list[int], device: torch.device) -> Tensor | None:
    """Hides the padding behind each sequence's rows and, if causal, the window's later keys."""
    num_rows = max(lengths)
    is_causal = rows.has_window and rows.window_mask == "causal"
    if min(lengths) == num_rows and not is_causal:
        return None
    visible = torch.arange(num_rows)[None, None, :] < torch.tensor(lengths)[:, None, None]
    if rows.has_window:
        window = torch.ones(rows.window, rows.window, dtype=torch.bool)
        if is_causal:
            window.tril_()
        visible = torch.cat(
            [visible.expand(-1, rows.window, -1), window.expand(len(lengths), -1, -1)], dim=-1
        )
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return bias[:, None].to(device)
