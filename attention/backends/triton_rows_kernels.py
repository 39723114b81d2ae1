# mypy: ignore-errors
"""Triton kernels that move rows of a KV pool: append a step's tokens; gather and scatter rows.

Imported only by triton_rows, and only where triton is installed. A row is one (token, KV head)
pair. A row has two parts, each a contiguous run of numbers in the pool: key and value in GQA; in
MLA `key` is the rope key (or any tail of the joined row) and `value` the latent before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# attention.kv_rows.FP8_MAX and MIN_AMAX
_FP8_MAX = tl.constexpr(448.0)
_INVERSE_FP8_MAX = tl.constexpr(1.0 / 448.0)
_MIN_AMAX = tl.constexpr(2.0**-40)


@triton.jit
def _own_rows(slot, dcp_rank, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """The owner rule of attention.layout: whether this rank keeps `slot`, and its physical row.

    Negative slots are nobody's: dividing them rounds to zero here, so they are dropped first.
    """
    block = slot // INTERLEAVE
    is_own = (slot >= 0) & (block % DCP_SIZE == dcp_rank)
    return is_own, block // DCP_SIZE * INTERLEAVE + slot % INTERLEAVE


@triton.jit
def _rotate(
    x,  # [ROWS, PAD] float32
    source,  # [ROWS, 1] pointers to the first number of each row
    is_own,
    position,
    cos_ptr,
    sin_ptr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAD: tl.constexpr,
):
    """x with its first DIM numbers turned pair by pair; see attention.kv_rows.Rotation."""
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, PAD)
    if INTERLEAVED:
        is_first = dim % 2 == 0
        pair = dim // 2
        partner = dim ^ 1
    else:
        is_first = dim < HALF
        pair = dim % HALF
        partner = tl.where(is_first, dim + HALF, dim - HALF)
    is_turned = is_own[:, None] & (dim < DIM)[None, :]
    other = tl.load(source + partner[None, :], mask=is_turned, other=0.0).to(tl.float32)
    angle = position[:, None] * HALF + pair[None, :]
    cos = tl.load(cos_ptr + angle, mask=is_turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=is_turned, other=0.0).to(tl.float32)
    turned = tl.where(is_first[None, :], x * cos - other * sin, x * cos + other * sin)
    return tl.where((dim < DIM)[None, :], turned, x)


@triton.jit
def _row_scale(amax):
    return tl.maximum(amax, _MIN_AMAX) * _INVERSE_FP8_MAX


@triton.jit
def _store(x, store_ptr, offset, is_own, WIDTH: tl.constexpr, PAD: tl.constexpr):
    dim = tl.arange(0, PAD)
    dtype: tl.constexpr = store_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(
        store_ptr + offset[:, None] + dim[None, :],
        x.to(dtype),
        mask=is_own[:, None] & (dim < WIDTH)[None, :],
    )


@triton.jit(do_not_specialize=["num_rows", "dcp_rank"])
def append_rows(
    slots_ptr,  # [T] int64 or int32, logical
    key_ptr,  # [T, Hk, KEY_WIDTH]
    value_ptr,  # [T, Hk, VALUE_WIDTH]
    key_store_ptr,  # [N*P, Hk, KEY_STRIDE], one layer
    value_store_ptr,  # [N*P, Hk, VALUE_STRIDE], one layer; the same as the keys' in MLA
    key_scale_ptr,  # float32 [1] or [N, Hk, P]; None without HAS_SCALE
    value_scale_ptr,
    positions_ptr,  # [T]; None without ROTARY_DIM
    cos_ptr,  # [max_positions, ROTARY_DIM / 2]
    sin_ptr,
    num_rows,  # T * Hk
    dcp_rank,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_COLUMN: tl.constexpr,  # where the key begins in its store's row
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # P of the scales; 1 without PER_TOKEN
    ONE_STORE: tl.constexpr,  # key and value are one row with one scale
    ROTARY_DIM: tl.constexpr,  # 0: keys are stored as they are
    ROTARY_INTERLEAVED: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program: BLOCK_ROWS rows. Rows of other ranks are neither read nor written."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // NUM_HEADS).to(tl.int64)
    head = row % NUM_HEADS
    slot = tl.load(slots_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
    is_own, pool_row = _own_rows(slot, dcp_rank, DCP_SIZE, INTERLEAVE)
    scale_row = (pool_row // PAGE_SIZE * NUM_HEADS + head) * PAGE_SIZE + pool_row % PAGE_SIZE
    pool_row = pool_row * NUM_HEADS + head

    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    key_source = key_ptr + (token * key_token_stride + head * key_head_stride)[:, None]
    value_source = value_ptr + (token * value_token_stride + head * value_head_stride)[:, None]
    key = tl.load(
        key_source + key_dim[None, :],
        mask=is_own[:, None] & (key_dim < KEY_WIDTH)[None, :],
        other=0.0,
    )
    value = tl.load(
        value_source + value_dim[None, :],
        mask=is_own[:, None] & (value_dim < VALUE_WIDTH)[None, :],
        other=0.0,
    )
    if ROTARY_DIM > 0:
        position = tl.load(positions_ptr + token, mask=is_own, other=0).to(tl.int64)
        key = _rotate(
            key.to(tl.float32),
            key_source,
            is_own,
            position,
            cos_ptr,
            sin_ptr,
            ROTARY_DIM,
            ROTARY_INTERLEAVED,
            KEY_PAD,
        )
    if HAS_SCALE:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
        if PER_TOKEN:
            key_amax = tl.max(tl.abs(key), 1)
            value_amax = tl.max(tl.abs(value), 1)
            if ONE_STORE:
                key_amax = tl.maximum(key_amax, value_amax)
                value_amax = key_amax
            key_scale = _row_scale(key_amax)
            value_scale = _row_scale(value_amax)
            tl.store(key_scale_ptr + scale_row, key_scale, mask=is_own)
            if not ONE_STORE:
                tl.store(value_scale_ptr + scale_row, value_scale, mask=is_own)
        else:
            key_scale = tl.zeros([BLOCK_ROWS], tl.float32) + tl.load(key_scale_ptr)
            value_scale = tl.zeros([BLOCK_ROWS], tl.float32) + tl.load(value_scale_ptr)
        # Exactly rounded: a pool holds the same bytes whoever wrote it.
        key = tl.div_rn(key, key_scale[:, None])
        value = tl.div_rn(value, value_scale[:, None])
    _store(key, key_store_ptr, pool_row * KEY_STRIDE + KEY_COLUMN, is_own, KEY_WIDTH, KEY_PAD)
    _store(value, value_store_ptr, pool_row * VALUE_STRIDE, is_own, VALUE_WIDTH, VALUE_PAD)


@triton.jit
def _move_part(
    store_ptr,
    packed_ptr,
    rows_ptr,
    num_rows,
    layer,
    head_start,
    rows_per_layer,
    INTO_POOL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMN: tl.constexpr,
    PACKED_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK words of one layer: of key or value, all rows and heads in a line."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_word = word < num_rows * (HEADS * WORDS)
    place = word // WORDS
    column = word % WORDS
    row = tl.load(rows_ptr + place // HEADS, mask=is_word, other=0)
    head = head_start + place % HEADS
    pool_row = (layer.to(tl.int64) * rows_per_layer + row) * NUM_HEADS + head
    in_pool = store_ptr + pool_row * WORDS + column
    packed_row = tl.program_id(1).to(tl.int64) * num_rows * HEADS + place
    in_packed = packed_ptr + packed_row * PACKED_WORDS + (COLUMN + column)
    if INTO_POOL:
        tl.store(in_pool, tl.load(in_packed, mask=is_word), mask=is_word)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=is_word), mask=is_word)


@triton.jit(do_not_specialize=["num_rows", "layer_start", "head_start"])
def move_rows(
    key_ptr,  # [L, N*P, Hk, KEY_WORDS]
    value_ptr,  # [L, N*P, Hk, VALUE_WORDS]
    packed_ptr,  # [layers, n, HEADS, KEY_WORDS + VALUE_WORDS]
    rows_ptr,  # [n] int64, physical
    num_rows,  # n
    layer_start,
    head_start,
    rows_per_layer,  # N * P
    INTO_POOL: tl.constexpr,  # scatter; else gather
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (blocks of words, layers, 1 or 2 parts). Rows are moved as words of 1 to 8 bytes."""
    layer = layer_start + tl.program_id(1)
    if tl.program_id(2) == 0:
        _move_part(
            key_ptr,
            packed_ptr,
            rows_ptr,
            num_rows,
            layer,
            head_start,
            rows_per_layer,
            INTO_POOL,
            NUM_HEADS,
            HEADS,
            KEY_WORDS,
            0,
            KEY_WORDS + VALUE_WORDS,
            BLOCK,
        )
    elif VALUE_WORDS > 0:
        _move_part(
            value_ptr,
            packed_ptr,
            rows_ptr,
            num_rows,
            layer,
            head_start,
            rows_per_layer,
            INTO_POOL,
            NUM_HEADS,
            HEADS,
            VALUE_WORDS,
            KEY_WORDS,
            KEY_WORDS + VALUE_WORDS,
            BLOCK,
        )
