# mypy: ignore-errors
"""The Triton kernel of the fused exchange: merge local splits, push to peers, merge own heads.

Imported only where triton is installed. The protocol and why it is safe: see fused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.exchanges.fused_wire import (
    await_arrivals,
    await_row,
    push_arrivals,
    push_row,
    region_of,
)
from attention.exchanges.piece_kernels import finite_top, home_of


@triton.jit
def _local_row(
    splits,
    token,
    head,
    col,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,  # 0: no sequence has slots
    BLOCK_COLS: tl.constexpr,
):
    """Columns `col` of this rank's result of a row in float32, and its lse; (0, -inf): no keys.

    splits: the first five arguments of exchange_splits."""
    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, slot_starts_ptr = splits
    row = tl.cast(token, tl.int64) * NUM_HEADS + head
    first = tl.cast(0, tl.int32)
    end = first
    if BLOCK_SLOTS > 0:
        first = tl.load(slot_starts_ptr + token // WINDOW)
        end = tl.load(slot_starts_ptr + token // WINDOW + 1)
    # A sequence without slots takes no turn of the loop below, one with slots does not load here.
    is_whole = first == end
    lse = tl.load(lse_ptr + row, mask=is_whole, other=float("-inf"))
    width = tl.where(is_whole, DIM, 0)
    out = tl.load(out_ptr + row * DIM + col, mask=col < width, other=0.0)
    has_keys = lse != float("-inf")
    acc = tl.where(has_keys, out.to(tl.float32), 0.0)
    if BLOCK_SLOTS > 0:
        top = lse
        total = tl.where(has_keys, 1.0, 0.0)
        place = tl.arange(0, BLOCK_SLOTS)
        slot_row = (token % WINDOW) * NUM_HEADS + head
        for start in range(first, end, BLOCK_SLOTS):
            is_slot = start + place < end
            part_row = (start + place).to(tl.int64) * (WINDOW * NUM_HEADS) + slot_row
            part_lse = tl.load(part_lse_ptr + part_row, mask=is_slot, other=float("-inf"))
            part = tl.load(
                part_out_ptr + (part_row * DIM)[:, None] + col[None, :],
                mask=is_slot[:, None] & (col < DIM)[None, :],
                other=0.0,
            ).to(tl.float32)
            new_top = tl.maximum(top, tl.max(part_lse, 0))
            base = finite_top(new_top)
            weight = tl.exp(part_lse - base)
            shrink = tl.exp(top - base)
            # A part without keys may hold NaN, and NaN * 0 is NaN.
            weighed = tl.where((weight == 0.0)[:, None], 0.0, part * weight[:, None])
            total = total * shrink + tl.sum(weight, 0)
            acc = acc * shrink + tl.sum(weighed, 0)
            top = new_top
        acc = acc * tl.where(total == 0.0, 0.0, 1.0 / total)
        lse = tl.where(is_whole, lse, finite_top(top) + tl.log(total))
    return acc, lse


@triton.jit
def _with_peer(acc, total, top, values, lse):
    """A running merge (sum of weighted rows, sum of weights, largest lse) and one more row."""
    new_top = tl.maximum(top, lse)
    base = finite_top(new_top)
    shrink = tl.exp(top - base)
    weight = tl.exp(lse - base)
    total = total * shrink + weight
    acc = acc * shrink + values * weight  # 0 was sent where there are no keys
    return acc, total, new_top


@triton.jit(do_not_specialize=["num_tokens", "first_program"])
def exchange_splits(
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] float32
    part_out_ptr,  # [slots, w * H, D]
    part_lse_ptr,  # [slots, w * H] float32
    slot_starts_ptr,  # [B + 1] int32
    merged_ptr,  # [T, Hl, D]
    received_ptr,  # int64 [2, c - 1, SOURCE_WORDS], this rank's; see FusedLayout
    addresses_ptr,  # int64 [c], where each rank has its `received`
    counts_ptr,  # int32 [2 * PROGRAMS], launches that each program has been in
    num_tokens,
    first_program,  # 0; tests launch the two halves of the grid one after the other
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_STARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SOURCE_WORDS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: PROGRAMS that push rows of other ranks' heads and never wait, then PROGRAMS that wait
    and merge rows of the own heads. Work items are (row, block of columns), dealt in turns."""
    NUM_HEADS: tl.constexpr = HEAD_STARTS[SIZE]
    FIRST_OWN: tl.constexpr = HEAD_STARTS[RANK]
    NUM_OWN: tl.constexpr = HEAD_STARTS[RANK + 1] - FIRST_OWN
    NUM_OTHER: tl.constexpr = NUM_HEADS - NUM_OWN
    COL_BLOCKS: tl.constexpr = (DIM + BLOCK_COLS - 1) // BLOCK_COLS
    LSE_START: tl.constexpr = MAX_ROWS * ROW_WORDS
    ARRIVAL: tl.constexpr = LSE_START + MAX_ROWS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    splits = (out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, slot_starts_ptr)
    program = first_program + tl.program_id(0)
    if PDL:
        # What follows reads what kernels before this one have written, the counts included.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    step = tl.load(counts_ptr + program) + 1
    slot = (step & 1).to(tl.int64) * ((SIZE - 1) * SOURCE_WORDS)

    if program < PROGRAMS:
        if program == 0:
            push_arrivals(addresses_ptr, slot, step, RANK, SIZE, HEAD_STARTS, SOURCE_WORDS, ARRIVAL)
        if NUM_OTHER > 0:
            for item in range(program, num_tokens * NUM_OTHER * COL_BLOCKS, PROGRAMS):
                other = item // COL_BLOCKS % NUM_OTHER
                block = item % COL_BLOCKS
                token = item // (COL_BLOCKS * NUM_OTHER)
                head = tl.where(other < FIRST_OWN, other, other + NUM_OWN)
                dest, first, heads = home_of(head, HEAD_STARTS, SIZE)
                col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
                out, lse = _local_row(
                    splits, token, head, col, NUM_HEADS, WINDOW, DIM, BLOCK_SLOTS, BLOCK_COLS
                )
                region = region_of(addresses_ptr, dest, slot, RANK, SOURCE_WORDS)
                row = tl.cast(token * heads + head - first, tl.int64)
                push_row(
                    region, row, block, out, lse, step, dtype, ROW_WORDS, LSE_START, BLOCK_COLS
                )
    else:
        received = received_ptr + slot
        if NUM_OWN == 0 and program == PROGRAMS:
            await_arrivals(received, step, SIZE, SOURCE_WORDS, ARRIVAL)
        if NUM_OWN > 0:
            for item in range(program - PROGRAMS, num_tokens * NUM_OWN * COL_BLOCKS, PROGRAMS):
                row = tl.cast(item // COL_BLOCKS, tl.int64)
                block = item % COL_BLOCKS
                token = item // (COL_BLOCKS * NUM_OWN)
                head = FIRST_OWN + item // COL_BLOCKS % NUM_OWN
                col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
                acc, top = _local_row(
                    splits, token, head, col, NUM_HEADS, WINDOW, DIM, BLOCK_SLOTS, BLOCK_COLS
                )
                total = tl.where(top == float("-inf"), 0.0, tl.exp(top - top))
                for source in tl.static_range(SIZE - 1):
                    region = received + source * SOURCE_WORDS
                    values, lse = await_row(
                        region, row, block, step, dtype, ROW_WORDS, LSE_START, BLOCK_COLS
                    )
                    acc, total, top = _with_peer(acc, total, top, values, lse)
                merged = acc * tl.where(total == 0.0, 0.0, 1.0 / total)
                tl.store(merged_ptr + row * DIM + col, merged.to(dtype), mask=col < DIM)
    # Every thread has read the count before any writes it.
    tl.debug_barrier()
    tl.store(counts_ptr + program, step)
