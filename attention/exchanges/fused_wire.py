# mypy: ignore-errors
"""What the fused exchange puts on the link, in Triton: rows of words that carry their step.

Imported only where triton is installed. The protocol and why it is safe: see fused. A word is
int64: 32 bits of payload below, the step that wrote it above. A region is what one rank keeps of
what another one sends in a step: rows of ROW_WORDS, from LSE_START on their lses, at ARRIVAL a word
for ranks that get no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def region_of(addresses_ptr, dest, slot, RANK: tl.constexpr, SOURCE_WORDS: tl.constexpr):
    """Where rank `dest` keeps what this rank sends it in this step."""
    address = tl.load(addresses_ptr + dest).to(tl.pointer_type(tl.int64))
    source_slot = tl.where(dest < RANK, RANK - 1, RANK).to(tl.int64) * SOURCE_WORDS
    return tl.multiple_of(address, 16) + (slot + source_slot)


@triton.jit
def push_arrivals(
    addresses_ptr,
    slot,
    step,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_STARTS: tl.constexpr,
    SOURCE_WORDS: tl.constexpr,
    ARRIVAL: tl.constexpr,
):
    """Tell the ranks without heads, which get no rows, that this rank is in this step."""
    for dest in tl.static_range(SIZE):
        if dest != RANK and HEAD_STARTS[dest] == HEAD_STARTS[dest + 1]:
            idle = tl.load(addresses_ptr + dest).to(tl.pointer_type(tl.int64))
            region = idle + slot + (RANK - 1 if dest < RANK else RANK) * SOURCE_WORDS
            tl.store(region + ARRIVAL, step.to(tl.int64) << 32, cache_modifier=".wt")


@triton.jit
def await_arrivals(
    received_ptr, step, SIZE: tl.constexpr, SOURCE_WORDS: tl.constexpr, ARRIVAL: tl.constexpr
):
    """The other side of push_arrivals, on a rank without heads."""
    for source in tl.static_range(SIZE - 1):
        _await_word(received_ptr + source * SOURCE_WORDS + ARRIVAL, step)


@triton.jit
def push_row(
    region,
    row,
    block,
    out,
    lse,
    step,
    dtype: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LSE_START: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """A block of columns of a row, and with the first block its lse, into a peer's region."""
    BLOCK_WORDS: tl.constexpr = BLOCK_COLS * dtype.primitive_bitwidth // 32
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


@triton.jit
def await_row(
    region,
    row,
    block,
    step,
    dtype: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LSE_START: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """What a peer has pushed with push_row: columns in float32, and the lse."""
    BLOCK_WORDS: tl.constexpr = BLOCK_COLS * dtype.primitive_bitwidth // 32
    word = block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    words = _await_words(region + row * ROW_WORDS + word, word < ROW_WORDS, step)
    values = _from_words(words, dtype, BLOCK_COLS)
    lse_word = _await_word(region + LSE_START + row, step)
    return values, lse_word.to(tl.uint32).to(tl.float32, bitcast=True)
