# mypy: ignore-errors
"""Triton kernel that multiplies rows with the matrices of the experts that they were routed to.

Imported only by grouped_experts, and only where triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_product(
    x_ptr,  # [*, IN]
    weight_ptr,  # [E, OUT, IN]
    out_ptr,  # [pairs, OUT]
    order_ptr,  # int64 [pairs]: the pair at each place of the order by expert
    bounds_ptr,  # int32 [E + 1]: places [bounds[e], bounds[e + 1]) are those of expert e
    scale_ptr,  # float32 [pairs]
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,  # of x; 0: x has a row a place and `out` a row a pair
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """With PAIRS_PER_ROW, out[place] = x[pair // PAIRS_PER_ROW] @ weight[e]^T; without it,
    out[pair] = x[place] @ weight[e]^T * scale[pair]."""
    expert = tl.program_id(1)
    first = tl.load(bounds_ptr + expert)
    end = tl.load(bounds_ptr + expert + 1)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lane = tl.arange(0, BLOCK_IN)
    matrix = weight_ptr + expert.to(tl.int64) * OUT * IN + column[None, :] * IN
    step = tl.num_programs(2) * BLOCK_ROWS
    for start in range(first + tl.program_id(2) * BLOCK_ROWS, end, step):
        place = start + tl.arange(0, BLOCK_ROWS)
        is_row = place < end
        pair = tl.load(order_ptr + place, mask=is_row, other=0)
        if PAIRS_PER_ROW:
            source, target = pair // PAIRS_PER_ROW, place.to(tl.int64)
        else:
            source, target = place.to(tl.int64), pair
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
        for begin in range(0, IN, BLOCK_IN):
            k = begin + lane
            rows = tl.load(
                x_ptr + source[:, None] * IN + k[None, :],
                mask=is_row[:, None] & (k < IN)[None, :],
                other=0.0,
            )
            columns = tl.load(
                matrix + k[:, None], mask=(k < IN)[:, None] & (column < OUT)[None, :], other=0.0
            )
            total = tl.dot(rows, columns, total, input_precision="ieee")
        if not PAIRS_PER_ROW:
            total *= tl.load(scale_ptr + pair, mask=is_row, other=0.0)[:, None]
        tl.store(
            out_ptr + target[:, None] * OUT + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (column < OUT)[None, :],
        )
