# mypy: ignore-errors
"""The Triton kernel of the fused exchange: merge local splits, push to peers, merge own heads.

Imported only where triton is installed. The protocol and why it is safe: see fused. A word is
int64: 32 bits of payload below, the step that wrote it above.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.exchanges.piece_kernels import finite_top, home_of


@triton.jit
def _local_row(
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    slot_starts_ptr,
    token,
    head,
    col,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,  # 0: no sequence has slots
    BLOCK_COLS: tl.constexpr,
):
    """Columns `col` of this rank's result of a row in float32, and its lse; (0, -inf): no keys."""
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
def _to_words(values, step, dtype: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """float32 [BLOCK_COLS] as words in `dtype`: one value a word, or two of 16 bits."""
    if dtype.primitive_bitwidth == 32:
        payload = values.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        low, high = tl.split(tl.reshape(values.to(dtype), [BLOCK_COLS // 2, 2]))
        payload = low.to(tl.uint16, bitcast=True).to(tl.int64)
        payload |= high.to(tl.uint16, bitcast=True).to(tl.int64) << 16
    return payload | (step.to(tl.int64) << 32)


@triton.jit
def _from_words(words, dtype: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The reverse of _to_words."""
    if dtype.primitive_bitwidth == 32:
        values = words.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.uint16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.uint16).to(dtype, bitcast=True)
        values = tl.reshape(tl.join(low, high), [BLOCK_COLS]).to(tl.float32)
    return values


@triton.jit
def _await_word(word_ptr, step):
    """The word once it is of this step. A loop without anything in which threads must meet."""
    word = tl.load(word_ptr, volatile=True)
    while (word >> 32).to(tl.int32) != step:
        word = tl.load(word_ptr, volatile=True)
    return word


@triton.jit
def _await_words(words_ptr, is_word, step):
    """The words once all of them are of this step."""
    words = tl.load(words_ptr, mask=is_word, other=0, volatile=True)
    while tl.sum((is_word & ((words >> 32).to(tl.int32) != step)).to(tl.int32), 0) > 0:
        words = tl.load(words_ptr, mask=is_word, other=0, volatile=True)
    return words


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
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    PER_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    BLOCK_WORDS: tl.constexpr = BLOCK_COLS // PER_WORD
    LSE_START: tl.constexpr = MAX_ROWS * ROW_WORDS
    ARRIVAL: tl.constexpr = LSE_START + MAX_ROWS
    program = first_program + tl.program_id(0)
    if PDL:
        # What follows reads what kernels before this one have written, the counts included.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    step = tl.load(counts_ptr + program) + 1
    slot = (step & 1).to(tl.int64) * ((SIZE - 1) * SOURCE_WORDS)

    if program < PROGRAMS:
        if program == 0:
            for dest in tl.static_range(SIZE):
                if dest != RANK and HEAD_STARTS[dest] == HEAD_STARTS[dest + 1]:
                    idle = tl.load(addresses_ptr + dest).to(tl.pointer_type(tl.int64))
                    region = idle + slot + (RANK - 1 if dest < RANK else RANK) * SOURCE_WORDS
                    tl.store(region + ARRIVAL, step.to(tl.int64) << 32, cache_modifier=".wt")
        if NUM_OTHER > 0:
            for item in range(program, num_tokens * NUM_OTHER * COL_BLOCKS, PROGRAMS):
                other = item // COL_BLOCKS % NUM_OTHER
                block = item % COL_BLOCKS
                token = item // (COL_BLOCKS * NUM_OTHER)
                head = tl.where(other < FIRST_OWN, other, other + NUM_OWN)
                dest, first, heads = home_of(head, HEAD_STARTS, SIZE)
                col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
                out, lse = _local_row(
                    out_ptr,
                    lse_ptr,
                    part_out_ptr,
                    part_lse_ptr,
                    slot_starts_ptr,
                    token,
                    head,
                    col,
                    NUM_HEADS,
                    WINDOW,
                    DIM,
                    BLOCK_SLOTS,
                    BLOCK_COLS,
                )
                address = tl.load(addresses_ptr + dest).to(tl.pointer_type(tl.int64))
                source_slot = tl.where(dest < RANK, RANK - 1, RANK).to(tl.int64) * SOURCE_WORDS
                region = tl.multiple_of(address, 16) + (slot + source_slot)
                row = tl.cast(token * heads + head - first, tl.int64)
                word = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
                tl.store(
                    region + row * ROW_WORDS + word,
                    _to_words(out, step, dtype, BLOCK_COLS),
                    mask=word < ROW_WORDS,
                    cache_modifier=".wt",
                )
                if block == 0:
                    bits = lse.to(tl.uint32, bitcast=True).to(tl.int64)
                    tl.store(
                        region + LSE_START + row,
                        bits | (step.to(tl.int64) << 32),
                        cache_modifier=".wt",
                    )
    else:
        if NUM_OWN == 0 and program == PROGRAMS:
            for source in tl.static_range(SIZE - 1):
                _await_word(received_ptr + slot + source * SOURCE_WORDS + ARRIVAL, step)
        if NUM_OWN > 0:
            for item in range(program - PROGRAMS, num_tokens * NUM_OWN * COL_BLOCKS, PROGRAMS):
                row = tl.cast(item // COL_BLOCKS, tl.int64)
                block = item % COL_BLOCKS
                col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
                acc, top = _local_row(
                    out_ptr,
                    lse_ptr,
                    part_out_ptr,
                    part_lse_ptr,
                    slot_starts_ptr,
                    item // (COL_BLOCKS * NUM_OWN),
                    FIRST_OWN + item // COL_BLOCKS % NUM_OWN,
                    col,
                    NUM_HEADS,
                    WINDOW,
                    DIM,
                    BLOCK_SLOTS,
                    BLOCK_COLS,
                )
                total = tl.where(top == float("-inf"), 0.0, tl.exp(top - top))
                word = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
                for source in tl.static_range(SIZE - 1):
                    region = received_ptr + slot + source * SOURCE_WORDS
                    words = _await_words(region + row * ROW_WORDS + word, word < ROW_WORDS, step)
                    values = _from_words(words, dtype, BLOCK_COLS)
                    lse_word = _await_word(region + LSE_START + row, step)
                    lse = lse_word.to(tl.uint32).to(tl.float32, bitcast=True)
                    new_top = tl.maximum(top, lse)
                    base = finite_top(new_top)
                    shrink = tl.exp(top - base)
                    weight = tl.exp(lse - base)
                    total = total * shrink + weight
                    acc = acc * shrink + values * weight  # 0 was sent where there are no keys
                    top = new_top
                merged = acc * tl.where(total == 0.0, 0.0, 1.0 / total)
                tl.store(merged_ptr + row * DIM + col, merged.to(dtype), mask=col < DIM)
    # Every thread has read the count before any writes it.
    tl.debug_barrier()
    tl.store(counts_ptr + program, step)
