"""Looking through long rows of scores, on CPUs by blocks of columns.

There argmax and top-k over a whole row are ten times as slow as amax, so the maxima of blocks of 64
columns come first and only what they point at is looked at again. On GPUs launches cost more than
columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_COLUMNS = 64
_CACHED_ELEMENTS = 1 << 16


class Found(NamedTuple):
    """K elements of rows of scores, sorted by (row, column).

    rows, columns: int64 [K]. values: the scores' dtype, [K].
    """

    rows: Tensor
    columns: Tensor
    values: Tensor

    def keep(self, mask: Tensor) -> Found:
        """Those where mask [K] is true."""
        index = mask.nonzero().squeeze(1)
        return Found(self.rows[index], self.columns[index], self.values[index])


def row_parts(scores: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of [m, V]: on a CPU as many at a time as leave the intermediates
    of elementwise work in its cache, elsewhere all at once."""
    num_rows, num_columns = scores.shape
    is_cpu = scores.device.type == "cpu"
    step = max(1, _CACHED_ELEMENTS // max(1, num_columns)) if is_cpu else max(1, num_rows)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def block_maxima(scores: Tensor) -> Tensor:
    """Maxima of blocks of 64 columns (the last may be shorter): [m, V] -> [m, ceil(V / 64)].

    NaN counts as the maximum. Without columns there is one block, of -inf.
    """
    num_rows, num_columns = scores.shape
    if num_columns == 0:
        return scores.new_full((num_rows, 1), -torch.inf)
    num_whole = num_columns // BLOCK_COLUMNS
    end = num_whole * BLOCK_COLUMNS
    maxima = scores[:, :end].view(num_rows, num_whole, BLOCK_COLUMNS).amax(dim=2)
    if end == num_columns:
        return maxima
    return torch.cat((maxima, scores[:, end:].amax(dim=1, keepdim=True)), dim=1)


def first_maximum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each row of [m, V], V >= 1, and its first column (int64); NaN is the maximum."""
    if scores.device.type != "cpu":
        values, columns = scores.max(dim=1)
        return values, columns
    maxima = block_maxima(scores)
    block = maxima.argmax(dim=1, keepdim=True)
    columns = torch.arange(BLOCK_COLUMNS, device=scores.device) + block * BLOCK_COLUMNS
    # Columns past the end repeat the last one, which then is found at its first place.
    columns.clamp_(max=scores.shape[1] - 1)
    first = scores.gather(1, columns).argmax(dim=1, keepdim=True)
    return maxima.gather(1, block).squeeze(1), columns.gather(1, first).squeeze(1)


def kth_largest_bound(maxima: Tensor, k: Tensor) -> Tensor:
    """A value that at least k elements of the row reach: the k-th largest block maximum.

    maxima: [m, blocks] of `block_maxima`; k: int64 [m], >= 1. -inf where there are fewer blocks.
    """
    num_blocks = maxima.shape[1]
    reachable = k.clamp(max=num_blocks)
    largest = maxima.topk(int(reachable.max()), dim=1).values
    bound = largest.gather(1, reachable[:, None] - 1).squeeze(1)
    return torch.where(k <= num_blocks, bound, -torch.inf)


def at_least(scores: Tensor, bound: Tensor) -> Found:
    """The elements of [m, V] (contiguous) that reach their row's bound [m]."""
    flat = (scores >= bound[:, None]).view(-1).nonzero().squeeze(1)
    rows = torch.div(flat, max(1, scores.shape[1]), rounding_mode="floor")
    return Found(rows, flat - rows * scores.shape[1], scores.view(-1)[flat])


def take_rows(scores: Tensor, rows: Tensor) -> Tensor:
    """scores[rows] for distinct, ascending rows; `scores` itself when those are all."""
    return scores if len(rows) == len(scores) else scores[rows]
