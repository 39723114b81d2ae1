# mypy: ignore-errors
"""Triton kernels around the NCCL exchanges: pack, merge and weigh. Format: see pieces.

Imported only where triton is installed. A program works on BLOCK_ROWS rows; a row is one (token,
head) pair. HEAD_STARTS, here and in fused_kernel: first head of each rank and H at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def home_of(head, HEAD_STARTS: tl.constexpr, SIZE: tl.constexpr):
    """The rank that keeps each head, that rank's first head and its number of heads."""
    rank = head * 0
    first = head * 0
    heads = head * 0 + HEAD_STARTS[1]
    for candidate in tl.static_range(1, SIZE):
        is_past = head >= HEAD_STARTS[candidate]
        rank = tl.where(is_past, candidate, rank)
        first = tl.where(is_past, HEAD_STARTS[candidate], first)
        heads = tl.where(is_past, HEAD_STARTS[candidate + 1] - HEAD_STARTS[candidate], heads)
    return rank, first, heads


@triton.jit
def finite_top(top):
    """`top` as the base of exponentials: 0 where there is no key, so that exp gives 0, not NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def whole_piece(elements, ALIGNMENT: tl.constexpr):
    """`elements` of a piece with their padding."""
    return (elements + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


@triton.jit(do_not_specialize=["num_tokens"])
def pack_pieces(
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] float32
    values_ptr,  # the wire, as elements of the dtype of out
    lses_ptr,  # the wire, as float32
    num_tokens,
    HEAD_STARTS: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr,  # a row's values on the wire, padding included
    LSE_ELEMENTS: tl.constexpr,  # elements in the space of a float32
    ALIGNMENT: tl.constexpr,  # of a piece, in elements
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Grid: blocks of rows."""
    num_heads: tl.constexpr = HEAD_STARTS[SIZE]
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_tokens * num_heads
    token = row // num_heads
    head = row % num_heads
    _, first, heads = home_of(head, HEAD_STARTS, SIZE)
    piece = row * 0
    for rank in tl.static_range(1, SIZE):
        rows = num_tokens.to(tl.int64) * (HEAD_STARTS[rank] - HEAD_STARTS[rank - 1])
        before = whole_piece(rows * (ROW_ELEMENTS + LSE_ELEMENTS), ALIGNMENT)
        piece = tl.where(head >= HEAD_STARTS[rank], piece + before, piece)
    place = token * heads + head - first
    lse = tl.load(lse_ptr + row, mask=is_row)
    lse_start = (piece + num_tokens * heads * ROW_ELEMENTS) // LSE_ELEMENTS
    tl.store(lses_ptr + lse_start + place, lse, mask=is_row)
    target = piece + place * ROW_ELEMENTS
    for start in tl.static_range(0, DIM, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        is_value = is_row[:, None] & (col < DIM)[None, :]
        values = tl.load(out_ptr + (row * DIM)[:, None] + col[None, :], mask=is_value)
        tl.store(values_ptr + target[:, None] + col[None, :], values, mask=is_value)


@triton.jit(do_not_specialize=["num_rows"])
def merge_pieces(
    values_ptr,  # [c, piece] as elements of the dtype of merged
    lses_ptr,  # the same as float32
    merged_ptr,  # [T, Hl, D]
    num_rows,  # T * Hl
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ROW_ELEMENTS: tl.constexpr,
    LSE_ELEMENTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Grid: (blocks of rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    is_value = is_row[:, None] & (col < DIM)[None, :]
    piece = whole_piece(num_rows.to(tl.int64) * (ROW_ELEMENTS + LSE_ELEMENTS), ALIGNMENT)
    lse_start = num_rows.to(tl.int64) * ROW_ELEMENTS
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for source in tl.static_range(SIZE):
        lse = tl.load(
            lses_ptr + (source * piece + lse_start) // LSE_ELEMENTS + row,
            mask=is_row,
            other=float("-inf"),
        )
        values = tl.load(
            values_ptr + source * piece + (row * ROW_ELEMENTS)[:, None] + col[None, :],
            mask=is_value,
            other=0.0,
        ).to(tl.float32)
        new_top = tl.maximum(top, lse)
        base = finite_top(new_top)
        shrink = tl.exp(top - base)
        weight = tl.exp(lse - base)
        total = total * shrink + weight
        # Values without keys may be NaN, and NaN * 0 is NaN.
        weighed = tl.where((weight == 0.0)[:, None], 0.0, values * weight[:, None])
        acc = acc * shrink[:, None] + weighed
        top = new_top
    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(
        merged_ptr + (row * DIM)[:, None] + col[None, :],
        (acc * share[:, None]).to(merged_ptr.dtype.element_ty),
        mask=is_value,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def weigh_pieces(
    out_ptr,  # [T, H, D]
    lses_ptr,  # [c, T, H] float32
    send_ptr,  # [c, T, MOST, D] float32
    num_tokens,
    HEAD_STARTS: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    MOST: tl.constexpr,  # most heads of a rank
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Grid: (blocks of rows of a destination, destinations * blocks of columns)."""
    num_heads: tl.constexpr = HEAD_STARTS[SIZE]
    blocks: tl.constexpr = (DIM + BLOCK_COLS - 1) // BLOCK_COLS
    dest = tl.program_id(1) // blocks
    col = tl.program_id(1) % blocks * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    place = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_place = place < num_tokens * MOST
    first = 0
    end = HEAD_STARTS[1]
    for rank in tl.static_range(1, SIZE):
        first = tl.where(dest == rank, HEAD_STARTS[rank], first)
        end = tl.where(dest == rank, HEAD_STARTS[rank + 1], end)
    head = first + place % MOST
    is_row = is_place & (head < end)
    row = place // MOST * num_heads + head
    own = tl.load(lses_ptr + RANK * num_tokens * num_heads + row, mask=is_row, other=float("-inf"))
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for source in tl.static_range(SIZE):
        lse = tl.load(
            lses_ptr + source * num_tokens * num_heads + row, mask=is_row, other=float("-inf")
        )
        new_top = tl.maximum(top, lse)
        base = finite_top(new_top)
        total = total * tl.exp(top - base) + tl.exp(lse - base)
        top = new_top
    share = tl.where(own == float("-inf"), 0.0, tl.exp(own - finite_top(top)) / total)
    # Another rank's NaN reaches the sum through that rank's own share.
    is_value = is_row[:, None] & (col < DIM)[None, :]
    values = tl.load(out_ptr + (row * DIM)[:, None] + col[None, :], mask=is_value, other=0.0)
    weighed = tl.where((share == 0.0)[:, None], 0.0, values.to(tl.float32) * share[:, None])
    target = (dest.to(tl.int64) * num_tokens * MOST + place) * DIM
    tl.store(
        send_ptr + target[:, None] + col[None, :],
        weighed,
        mask=is_place[:, None] & (col < DIM)[None, :],
    )
