# mypy: ignore-errors
"""Gluon kernel for Hopper: paged split-KV MLA decode over float8_e4m3fn latents.

The plan, slots and results of gluon_mla_kernel.split_mla, for latents of 512 + 64 columns in pages
of multiples of 64 keys, without a window; a program has 16 heads. Tiles are copied as they are
stored. They go from shared memory to registers as 16-bit pairs of columns, once with keys as rows
for the scores and once transposed for the values, are converted there to float16, which holds every
e4m3 number, and are the first operand of warpgroup products: converted tiles never go back to
shared memory, whose bandwidth would bound the kernel.

Of a 32-bit word [a0 a1 b0 b1], two pairs a and b of neighbouring columns of one key, the products
of the scores take a as one operand's word and b as another's, so that no byte moves; q is laid out
accordingly, see `_q_columns`. Transposed, a and b are of neighbouring keys: a0 b0 and a1 b1 are
words of the even and of the odd columns, which are accumulated apart.

A program is a warpgroup that computes and one warp that copies, at most two tiles ahead of it and
without a break between pieces. It copies a tile as four quarters of the value columns, the rope
part and, with scales a token, these. Registers hold a quarter twice: the warpgroup converts one
while the tensor cores multiply the one before. Barriers, all with one arrival a phase:
full[buffer], the copies of a tile have landed; empty[buffer], the tile is in the result.

Rows of q are scaled by a power of two to fit float16, as in triton_fp8_kernel. Where keys are many
two programs share an SM: one computes while the other waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.backends.gluon_mla_kernel import block_barrier, copy_block, zero_rows

# What the kernel is written for: rows of a program, keys of a tile, columns of a value and of rope.
ROWS = 16
KEYS = 64
DIM = 512
PE = 64

# Registers of a thread at launch, of two warpgroups, so that two programs fit an SM. Then the
# copying warp's group gives most of its own to the other.
MAX_REGISTERS = 128
_COPY_REGISTERS = gl.constexpr(24)

# Fields of a piece and of a worker's record, see split_plan.
_PIECE = gl.constexpr(5)
_WORKER = gl.constexpr(8)

_LN2 = gl.constexpr(0.6931471805599453)
# As in triton_fp8_kernel.
_LEAST_SCALE = gl.constexpr(2.0**-100)
_LEAST_Q = gl.constexpr(2.0**-100)

_ROWS = gl.constexpr(ROWS)
_KEYS = gl.constexpr(KEYS)
_DIM = gl.constexpr(DIM)
_PE = gl.constexpr(PE)
# Pairs of columns of a quarter of a value, which is a block of a tile, and of the rope part.
_PAIRS = gl.constexpr(DIM // 8)
_PE_PAIRS = gl.constexpr(PE // 2)

# Keys x rows and columns x rows.
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, _SCORES.value, 2))
_KEY = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_ROW = gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_SCALES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_Q_COPY = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))


class _Form(NamedTuple):
    """Constants of a call, see split_mla_fp8."""

    NUM_HEADS: int
    PAGE_SIZE: int
    TOKEN_SCALES: bool


@gluon.constexpr_function
def _form(*values):
    return _Form(*values)


class _Call(NamedTuple):
    """Arguments of the kernel and the worker's record."""

    q_ptr: object
    quarter_desc: object
    pe_desc: object
    scales_desc: object
    out_ptr: object
    lse_ptr: object
    part_out_ptr: object
    part_lse_ptr: object
    page_table_ptr: object
    page_table_stride: object
    pieces_ptr: object
    qk_scale: object
    pool_scale: object
    first_piece: object
    end_piece: object
    first_sequence: object
    first_start: object
    first_end: object
    first_page: object


class _Shared(NamedTuple):
    """Shared memory of a program."""

    quarters: object  # int16 [8, KEYS, PAIRS]: 4 * buffer + quarter of the value columns
    pe: object  # int16 [2, KEYS, PE_PAIRS]
    scales: object  # float32 [2, 1, KEYS], of the keys of a tile; with scales a token
    q: object  # float16 [8, ROWS, PAIRS]: 2 * quarter + word, see _q_columns
    q_pe: object  # float16 [2, ROWS, PE_PAIRS]
    weights: object  # float16 [KEYS, ROWS]
    full: object  # [2, 1]: the copy of the tile in a buffer has landed
    empty: object  # [2, 1]: the tile in a buffer has been added


class _State(NamedTuple):
    """Online softmax: maximum (base 2) of each row, sums as wide as the scores, and the even and
    odd columns of the quarters of the result."""

    top: object
    total: object
    even_0: object
    odd_0: object
    even_1: object
    odd_1: object
    even_2: object
    odd_2: object
    even_3: object
    odd_3: object


@gluon.jit
def _load_piece(pieces_ptr, piece, is_piece):
    """Sequence, first key and end of keys of a piece; zeros where it is none."""
    fields = pieces_ptr + piece * _PIECE
    sequence = gl.load(fields, mask=is_piece, other=0)
    start = gl.load(fields + 1, mask=is_piece, other=0)
    end = gl.load(fields + 2, mask=is_piece, other=0)
    return sequence, start, end


@gluon.jit
def _copy_tile(call, shared, row, num_tiles, FORM: gl.constexpr):
    """Copy 64 rows from `row` on, and their scales, into the next buffer as soon as it is free."""
    buffer = num_tiles % 2
    full = shared.full.index(buffer)
    quarter_bytes: gl.constexpr = call.quarter_desc.block_type.nbytes
    pe_bytes: gl.constexpr = call.pe_desc.block_type.nbytes
    scale_bytes: gl.constexpr = _KEYS * 4 if FORM.TOKEN_SCALES else 0
    mbarrier.wait(shared.empty.index(buffer), num_tiles // 2 % 2 ^ 1)
    mbarrier.expect(full, 4 * quarter_bytes + pe_bytes + scale_bytes)
    for i in gl.static_range(4):
        quarter = shared.quarters.index(4 * buffer + i)
        copy_block(call.quarter_desc, [row, i * _PAIRS], full, quarter)
    copy_block(call.pe_desc, [row, 4 * _PAIRS], full, shared.pe.index(buffer))
    if FORM.TOKEN_SCALES:
        copy_block(call.scales_desc, [row // _KEYS, 0], full, shared.scales.index(buffer))


@gluon.jit
def _copy_pieces(call, shared, FORM: gl.constexpr):
    """What the copying warp does: the tiles of all pieces. Rows from the end of a piece's keys on
    are copied too."""
    sequence = call.first_sequence
    start = call.first_start
    end = call.first_end
    page = call.first_page
    num_tiles = 0
    for piece in range(call.first_piece, call.end_piece):
        next_sequence, next_start, next_end = _load_piece(
            call.pieces_ptr, piece + 1, piece + 1 < call.end_piece
        )
        next_table = call.page_table_ptr + next_sequence.to(gl.int64) * call.page_table_stride
        next_page = gl.load(
            next_table + next_start // FORM.PAGE_SIZE, mask=next_start < next_end, other=0
        )
        table = call.page_table_ptr + sequence.to(gl.int64) * call.page_table_stride
        for tile in range(start, end, _KEYS):
            row = page * FORM.PAGE_SIZE + tile % FORM.PAGE_SIZE
            after = tile + _KEYS
            page = gl.load(table + after // FORM.PAGE_SIZE, mask=after < end, other=0)
            _copy_tile(call, shared, row, num_tiles, FORM)
            num_tiles += 1
        sequence = next_sequence
        start = next_start
        end = next_end
        page = next_page


@gluon.jit
def _q_columns(q_rows, is_row, first, WORD: gl.constexpr, NUM: gl.constexpr):
    """[ROWS, NUM] float32, the columns of q that meet `_words(...)[WORD]` of NUM pairs: of every
    four from `first` on the first two (WORD 0) or the last two (WORD 1)."""
    place = gl.arange(0, NUM, layout=gl.SliceLayout(0, _Q_COPY))
    columns = first + place // 2 * 4 + place % 2 + 2 * WORD
    mask = gl.expand_dims(is_row, 1) & (gl.expand_dims(columns, 0) >= 0)
    pointers = gl.expand_dims(q_rows, 1) + gl.expand_dims(columns, 0)
    return gl.load(pointers, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _largest(q, largest):
    return gl.maximum(largest, gl.max(gl.abs(q), 1))


@gluon.jit
def _store_q(q_ptr, shared, sequence, FORM: gl.constexpr):
    """Put a sequence's rows of q in shared memory, each divided by a power of two; these [ROWS]."""
    row = gl.program_id(0) * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _Q_COPY))
    is_row = row < FORM.NUM_HEADS
    q_rows = q_ptr + (sequence.to(gl.int64) * FORM.NUM_HEADS + row) * (_DIM + _PE)
    pe_0 = _q_columns(q_rows, is_row, _DIM, 0, _PE_PAIRS)
    pe_1 = _q_columns(q_rows, is_row, _DIM, 1, _PE_PAIRS)
    largest = gl.full([_ROWS], _LEAST_Q, gl.float32, gl.SliceLayout(1, _Q_COPY))
    largest = _largest(pe_1, _largest(pe_0, largest))
    for i in gl.static_range(8):
        largest = _largest(_q_columns(q_rows, is_row, i // 2 * 2 * _PAIRS, i % 2, _PAIRS), largest)
    exponent = gl.floor(gl.log2(largest))
    shrink = gl.expand_dims(gl.exp2(-exponent), 1)
    for i in gl.static_range(8):
        q = _q_columns(q_rows, is_row, i // 2 * 2 * _PAIRS, i % 2, _PAIRS)
        shared.q.index(i).store((q * shrink).to(gl.float16))
    shared.q_pe.index(0).store((pe_0 * shrink).to(gl.float16))
    shared.q_pe.index(1).store((pe_1 * shrink).to(gl.float16))
    return gl.convert_layout(gl.exp2(exponent), _ROW)


@gluon.jit
def _words(pairs):
    """int16 [KEYS, n] -> two float16 [KEYS, n]: of every two pairs the first, and the second."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _columns(pairs):
    """int16 [n, KEYS] -> two float16 [n, KEYS]: the even column of each pair and the odd one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 bytes;
        .reg .b16 low, high;
        prmt.b32 bytes, $2, 0, 0x3120;
        mov.b32 {low, high}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _scores(shared, buffer):
    """Products of a tile's keys and the rows of q. A part is converted while the one before is
    multiplied; registers of an operand are read until its product is done."""
    scores = gl.zeros([_KEYS, _ROWS], gl.float32, _SCORES)
    a, b = _words(shared.pe.index(buffer).load(_OPERAND))
    q = shared.q_pe.index(0).permute((1, 0))
    scores = warpgroup_mma(a, q, scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(b, shared.q_pe.index(1).permute((1, 0)), scores, is_async=True)
    a_0, b_0 = _words(shared.quarters.index(4 * buffer).load(_OPERAND))
    scores = warpgroup_mma(a_0, shared.q.index(0).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(b_0, shared.q.index(1).permute((1, 0)), scores, is_async=True)
    scores, a, b = warpgroup_mma_wait(2, deps=[scores, a, b])
    a_1, b_1 = _words(shared.quarters.index(4 * buffer + 1).load(_OPERAND))
    scores = warpgroup_mma(a_1, shared.q.index(2).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(b_1, shared.q.index(3).permute((1, 0)), scores, is_async=True)
    scores, a_0, b_0 = warpgroup_mma_wait(2, deps=[scores, a_0, b_0])
    a_2, b_2 = _words(shared.quarters.index(4 * buffer + 2).load(_OPERAND))
    scores = warpgroup_mma(a_2, shared.q.index(4).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(b_2, shared.q.index(5).permute((1, 0)), scores, is_async=True)
    scores, a_1, b_1 = warpgroup_mma_wait(2, deps=[scores, a_1, b_1])
    a_3, b_3 = _words(shared.quarters.index(4 * buffer + 3).load(_OPERAND))
    scores = warpgroup_mma(a_3, shared.q.index(6).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(b_3, shared.q.index(7).permute((1, 0)), scores, is_async=True)
    scores, a_2, b_2, a_3, b_3 = warpgroup_mma_wait(0, deps=[scores, a_2, b_2, a_3, b_3])
    return scores


@gluon.jit
def _rescaled(acc, shrink):
    shrink = gl.convert_layout(shrink, gl.SliceLayout(0, _ACC), assert_trivial=True)
    return acc * gl.expand_dims(shrink, 0)


@gluon.jit
def _weigh(shared, state, scores, row_scale, key_scale, num_keys, FORM: gl.constexpr):
    """Online softmax of a tile's scores; its weights go to shared memory. Every row sees a key in
    its first tile. The new maximum and sums, and the factor of the result so far.

    With scales a key as in triton_fp8_kernel._accumulate.
    """
    key = gl.arange(0, _KEYS, layout=_KEY)
    scores = scores * gl.expand_dims(row_scale, 0)
    if FORM.TOKEN_SCALES:
        scores = scores * gl.expand_dims(key_scale, 1)
    scores = gl.where(gl.expand_dims(key < num_keys, 1), scores, float("-inf"))
    biased = scores
    value_scale = gl.where(key_scale < _LEAST_SCALE, _LEAST_SCALE, key_scale)
    if FORM.TOKEN_SCALES:
        log_scale = gl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [value_scale],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
        biased = scores + gl.expand_dims(log_scale, 1)
    top = gl.maximum(state.top, gl.max(biased, 0))
    shrink = gl.exp2(state.top - top)
    shares = gl.exp2(scores - gl.expand_dims(top, 0))
    total = state.total * gl.expand_dims(shrink, 0) + shares
    weights = shares
    if FORM.TOKEN_SCALES:
        weights = shares * gl.expand_dims(value_scale, 1)
    shared.weights.store(weights.to(gl.float16))
    fence_async_shared()
    return top, total, shrink


@gluon.jit
def _values(shared, buffer, QUARTER: gl.constexpr):
    return _columns(shared.quarters.index(4 * buffer + QUARTER).permute((1, 0)).load(_OPERAND))


@gluon.jit
def _start(shared, a, b, even, odd, shrink):
    """Start adding a quarter of the columns."""
    even = warpgroup_mma(a, shared.weights, _rescaled(even, shrink), is_async=True)
    odd = warpgroup_mma(b, shared.weights, _rescaled(odd, shrink), is_async=True)
    return even, odd


@gluon.jit
def _add(shared, buffer, state, top, total, shrink):
    """Add a tile whose weights are in shared memory once all warps are past a barrier. Converts a
    quarter while the one before is multiplied."""
    a_0, b_0 = _values(shared, buffer, 0)
    block_barrier()
    even_0, odd_0 = _start(shared, a_0, b_0, state.even_0, state.odd_0, shrink)
    a_1, b_1 = _values(shared, buffer, 1)
    even_1, odd_1 = _start(shared, a_1, b_1, state.even_1, state.odd_1, shrink)
    even_0, odd_0, a_0, b_0 = warpgroup_mma_wait(2, deps=[even_0, odd_0, a_0, b_0])
    a_2, b_2 = _values(shared, buffer, 2)
    even_2, odd_2 = _start(shared, a_2, b_2, state.even_2, state.odd_2, shrink)
    even_1, odd_1, a_1, b_1 = warpgroup_mma_wait(2, deps=[even_1, odd_1, a_1, b_1])
    a_3, b_3 = _values(shared, buffer, 3)
    even_3, odd_3 = _start(shared, a_3, b_3, state.even_3, state.odd_3, shrink)
    even_2, odd_2, even_3, odd_3, a_2, b_2, a_3, b_3 = warpgroup_mma_wait(
        0, deps=[even_2, odd_2, even_3, odd_3, a_2, b_2, a_3, b_3]
    )
    return _State(top, total, even_0, odd_0, even_1, odd_1, even_2, odd_2, even_3, odd_3)


@gluon.jit
def _store_columns(ptr, rows, acc, factor, first, NUM_HEADS: gl.constexpr):
    """Columns first, first + 2, ... of [rows, DIM] results from acc [columns, ROWS] * factor."""
    row = gl.program_id(0) * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, _ACC))
    column = first + 2 * gl.arange(0, _PAIRS, layout=gl.SliceLayout(1, _ACC))
    offsets = gl.expand_dims((rows + row) * _DIM, 0) + gl.expand_dims(column, 1)
    factor = gl.convert_layout(factor, gl.SliceLayout(0, _ACC), assert_trivial=True)
    values = acc * gl.expand_dims(factor, 0)
    mask = gl.expand_dims(row < NUM_HEADS, 0) & gl.expand_dims(column >= 0, 1)
    gl.store(ptr + offsets, values.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _store(out_ptr, lse_ptr, owner, state, share, lse, NUM_HEADS: gl.constexpr):
    """Write a piece's result or partial result, the rows of `owner`."""
    rows = owner.to(gl.int64) * NUM_HEADS
    _store_columns(out_ptr, rows, state.even_0, share, 0, NUM_HEADS)
    _store_columns(out_ptr, rows, state.odd_0, share, 1, NUM_HEADS)
    _store_columns(out_ptr, rows, state.even_1, share, 2 * _PAIRS, NUM_HEADS)
    _store_columns(out_ptr, rows, state.odd_1, share, 2 * _PAIRS + 1, NUM_HEADS)
    _store_columns(out_ptr, rows, state.even_2, share, 4 * _PAIRS, NUM_HEADS)
    _store_columns(out_ptr, rows, state.odd_2, share, 4 * _PAIRS + 1, NUM_HEADS)
    _store_columns(out_ptr, rows, state.even_3, share, 6 * _PAIRS, NUM_HEADS)
    _store_columns(out_ptr, rows, state.odd_3, share, 6 * _PAIRS + 1, NUM_HEADS)
    row = gl.program_id(0) * _ROWS + gl.arange(0, _ROWS, layout=_ROW)
    gl.store(lse_ptr + rows + row, lse, mask=row < NUM_HEADS)


@gluon.jit
def _no_keys():
    """State before the first tile."""
    return _State(
        gl.full([_ROWS], float("-inf"), gl.float32, _ROW),
        gl.zeros([_KEYS, _ROWS], gl.float32, _SCORES),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
        gl.zeros([_PAIRS, _ROWS], gl.float32, _ACC),
    )


@gluon.jit
def _scales_of(shared, buffer, num_keys, FORM: gl.constexpr):
    """Scales of a tile's keys; 1 where there is none."""
    scales = gl.full([_KEYS], 1.0, gl.float32, _KEY)
    if FORM.TOKEN_SCALES:
        key = gl.arange(0, _KEYS, layout=_KEY)
        stored = shared.scales.index(buffer).reshape([_KEYS]).load(_KEY)
        scales = gl.where(key < num_keys, stored, scales)
    return scales


@gluon.jit
def _attend(call, shared, FORM: gl.constexpr):
    """What the warpgroup does: the products and results of all pieces."""
    num_tiles = 0
    for piece in range(call.first_piece, call.end_piece):
        sequence, start, end = _load_piece(call.pieces_ptr, piece, piece < call.end_piece)
        slot = gl.load(call.pieces_ptr + piece * _PIECE + 3)
        row_scale = _store_q(call.q_ptr, shared, sequence, FORM)
        row_scale = row_scale * (call.qk_scale * call.pool_scale)
        fence_async_shared()
        block_barrier()
        state = _no_keys()
        for tile in range(start, end, _KEYS):
            buffer = num_tiles % 2
            mbarrier.wait(shared.full.index(buffer), num_tiles // 2 % 2)
            if tile + _KEYS > end:
                for i in gl.static_range(4):
                    quarter = shared.quarters.index(4 * buffer + i)
                    zero_rows(quarter, end - tile, _PAIRS * 2, 4)
                fence_async_shared()
                block_barrier()
            key_scale = _scales_of(shared, buffer, end - tile, FORM)
            scores = _scores(shared, buffer)
            top, total, shrink = _weigh(
                shared, state, scores, row_scale, key_scale, end - tile, FORM
            )
            state = _add(shared, buffer, state, top, total, shrink)
            # All warps are done with the tile, with the weights and, if it is the last, with q.
            block_barrier()
            mbarrier.arrive(shared.empty.index(buffer), count=1)
            num_tiles += 1

        row_total = gl.sum(state.total, 0)
        has_keys = row_total > 0
        share = gl.where(has_keys, call.pool_scale / row_total, 0.0)
        lse = gl.where(has_keys, state.top * _LN2 + gl.log(row_total), float("-inf"))
        # A row whose scores are NaN must not pass for one without keys.
        share = gl.where(row_total == row_total, share, row_total)
        lse = gl.where(row_total == row_total, lse, row_total)
        if slot < 0:
            _store(call.out_ptr, call.lse_ptr, sequence, state, share, lse, FORM.NUM_HEADS)
        else:
            _store(call.part_out_ptr, call.part_lse_ptr, slot, state, share, lse, FORM.NUM_HEADS)


@gluon.jit
def split_mla_fp8(
    q_ptr,  # [B, H, DIM + PE]
    quarter_desc,  # TMA descriptors of the pool as int16 pairs and of its scales, `descriptors`
    pe_desc,
    scales_desc,
    scale_ptr,  # float32, true latent = stored * scale: one, or [rows]
    out_ptr,  # [B, H, DIM]
    lse_ptr,  # [B, H] float32
    part_out_ptr,  # [slots, 1, H, DIM] float32 or as q
    part_lse_ptr,  # [slots, 1, H] float32
    page_table_ptr,  # [B, max_pages] int32
    workers_ptr,  # [workers, 8] int32, see split_plan
    pieces_ptr,  # [pieces, 5] int32, see split_plan
    qk_scale,
    page_table_stride,
    NUM_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SCALES: gl.constexpr,  # 0: none, 1: one, 2: one a row
    PDL: gl.constexpr,
):
    """One program: a block of ROWS query heads over the pieces of one worker.

    Grid: (blocks of heads, workers), 4 warps; warp_specialize adds one, which copies. A worker's
    pieces either all have keys or none has.
    """
    Q_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _PAIRS], gl.float16)
    Q_PE_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _PE_PAIRS], gl.float16)
    WEIGHTS_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_KEYS, _ROWS], gl.float16)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = _Shared(
        gl.allocate_shared_memory(gl.int16, [8, _KEYS, _PAIRS], quarter_desc.layout),
        gl.allocate_shared_memory(gl.int16, [2, _KEYS, _PE_PAIRS], pe_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, _KEYS], scales_desc.layout),
        gl.allocate_shared_memory(gl.float16, [8, _ROWS, _PAIRS], Q_SMEM),
        gl.allocate_shared_memory(gl.float16, [2, _ROWS, _PE_PAIRS], Q_PE_SMEM),
        gl.allocate_shared_memory(gl.float16, [_KEYS, _ROWS], WEIGHTS_SMEM),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for i in gl.static_range(2):
        mbarrier.init(shared.full.index(i), count=1)
        mbarrier.init(shared.empty.index(i), count=1)
    fence_async_shared()
    block_barrier()

    worker = workers_ptr + gl.program_id(1) * _WORKER
    first_piece = gl.load(worker)
    end_piece = gl.load(worker + 1)
    first_sequence = gl.load(worker + 2)
    first_start = gl.load(worker + 3)
    first_end = gl.load(worker + 4)
    first_page = gl.load(worker + 5)
    if PDL:
        # What follows reads what kernels before this one have written.
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
    pool_scale = gl.to_tensor(1.0)
    if SCALES == 1:
        pool_scale = gl.load(scale_ptr)
    call = _Call(
        q_ptr,
        quarter_desc,
        pe_desc,
        scales_desc,
        out_ptr,
        lse_ptr,
        part_out_ptr,
        part_lse_ptr,
        page_table_ptr,
        # Arguments that are 1 have become constants, which partitions do not take.
        gl.to_tensor(page_table_stride),
        pieces_ptr,
        gl.to_tensor(qk_scale),
        pool_scale,
        first_piece,
        end_piece,
        first_sequence,
        first_start,
        first_end,
        first_page,
    )
    FORM: gl.constexpr = _form(NUM_HEADS, PAGE_SIZE, SCALES == 2)
    gl.warp_specialize(
        [(_attend, (call, shared, FORM)), (_copy_pieces, (call, shared, FORM))],
        [1],
        [_COPY_REGISTERS],
    )


def descriptors(latent: torch.Tensor, scale: torch.Tensor | None) -> tuple[TensorDescriptor, ...]:
    """Descriptors for the copy engine of a float8_e4m3fn pool [N, P, DIM + PE] without gaps, as
    pairs of columns, of a quarter of a value's columns and of the rope part; and of its scales if
    there is one a token."""
    pairs = latent.view(torch.int16).view(-1, (DIM + PE) // 2)
    has_scales = scale is not None and scale.numel() > 1
    scales = scale.view(-1, KEYS) if has_scales else pairs.view(torch.float32)
    return (
        TensorDescriptor.from_tensor(pairs, [KEYS, DIM // 8], _tile_layout(DIM // 8)),
        TensorDescriptor.from_tensor(pairs, [KEYS, PE // 2], _tile_layout(PE // 2)),
        TensorDescriptor.from_tensor(scales, [1, KEYS], _SCALES_LAYOUT),
    )


def _tile_layout(width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([KEYS, width], gl.int16)
