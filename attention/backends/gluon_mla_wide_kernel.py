# mypy: ignore-errors
"""Gluon kernel for Hopper: paged split-KV MLA decode and verify of 33 rows and more.

The plan, slots and results of gluon_mla_kernel.split_mla, for latents of 512 + 64 columns in pages
of multiples of 64 keys. Two warpgroups work on one block of 64 rows and take its tiles of 64 keys
in turn. The owner of a tile computes its scores and leaves its weights and the running maximum and
sum of each row in shared memory; then both add the tile to their half of the value columns, the
owner with the weights that it still has in registers. So the products of the scores are 64 x 64,
which read q half as often as two warpgroups with 32 keys each, and while one warpgroup is at its
softmax the other's products can run. The window of a verify step is one more tile, from its own
tensor.

One more warp copies q and the tiles, each half of a tile as soon as the warpgroup that keeps that
half of the columns has added the tile before in that buffer. What else reads a tile are the scores,
which its owner has before `ready`. Barriers, all with one arrival a phase:

- full[side, buffer], q_full: the copy of that half of a tile, of a piece's q has landed;
- empty[side, buffer]: warpgroup `side` has added the tile in that buffer;
- ready[side]: weights, maximum and sum of a tile that warpgroup `side` owns are in shared memory;
- done[side]: warpgroup `side` has added all tiles of a piece and written its half of the result,
  by way of q's shared memory. The copying warp waits for both before it copies the next piece's q,
  and each warpgroup for the other, because of the weights.

There is one buffer for the weights: who reads it writes it next, after its product, and at the end
of a piece all are done. No barrier gets two phases ahead of a waiter: of each, a phase can end only
after something that the waiter of the phase before does after its wait.
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

from attention.backends.gluon_mla_kernel import (
    block_barrier,
    copy_block,
    store_rows,
    zero_rows,
)

# What the kernel is written for: rows of a program, keys of a tile, columns of a value and of rope.
ROWS = 64
KEYS = 64
DIM = 512
PE = 64

# Registers of a thread at launch, of three warpgroups. Then the copying warp's group gives most of
# its own to the other two.
MAX_REGISTERS = 168
_PRODUCT_REGISTERS = gl.constexpr(240)
_COPY_REGISTERS = gl.constexpr(24)

# Fields of a piece and of a worker's record, see split_plan.
_PIECE = gl.constexpr(5)
_WORKER = gl.constexpr(8)

_LN2 = gl.constexpr(0.6931471805599453)

_ROWS = gl.constexpr(ROWS)
_KEYS = gl.constexpr(KEYS)
_DIM = gl.constexpr(DIM)
_PE = gl.constexpr(PE)
_HALF = gl.constexpr(DIM // 2)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM // 2, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _ACC.value, 2))
_ROW = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_ACC_ROW = gl.constexpr(gl.SliceLayout(1, _ACC.value))
_STATE_SMEM = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class _Rows(NamedTuple):
    """Descriptors for the copy engine of a tensor [rows, DIM + PE]: blocks of HALF and of PE."""

    half: object
    pe: object


class _Form(NamedTuple):
    """Constants of a call, see split_mla_wide."""

    NUM_HEADS: int
    WINDOW: int
    HAS_WINDOW: bool
    CAUSAL: bool
    PAGE_SIZE: int


@gluon.constexpr_function
def _form(*values):
    return _Form(*values)


class _Call(NamedTuple):
    """Arguments of the kernel and the worker's record."""

    q: object  # _Rows
    latent: object  # _Rows
    window: object  # _Rows
    out_ptr: object
    lse_ptr: object
    part_out_ptr: object
    part_lse_ptr: object
    page_table_ptr: object
    page_table_stride: object
    pieces_ptr: object
    qk_scale: object
    first_piece: object
    end_piece: object
    first_sequence: object
    first_start: object
    first_end: object
    first_page: object


class _Shared(NamedTuple):
    """Shared memory of a program."""

    left: object  # [2, KEYS, HALF]
    right: object  # [2, KEYS, HALF]
    pe: object  # [2, KEYS, PE]
    q_left: object  # [ROWS, HALF]
    q_right: object  # [ROWS, HALF]
    q_pe: object  # [ROWS, PE]
    weights: object  # [ROWS, KEYS]
    state: object  # [2, ROWS] float32: maximum (base 2) and sum of each row
    full: object  # [4, 1]: 2 * side + buffer
    empty: object  # [4, 1]: the same
    q_full: object  # [1, 1]
    ready: object  # [2, 1]
    done: object  # [2, 1]


class _State(NamedTuple):
    """Online softmax: maximum (base 2) and sum of each row, and half of the value columns."""

    top: object
    total: object
    acc: object


class _Tile(NamedTuple):
    """Where a tile is, and which of its 64 rows are keys."""

    buffer: object
    phase: object  # of its `full` barriers
    num_keys: object
    is_window: object


@gluon.jit
def _load_piece(pieces_ptr, piece, is_piece):
    """Sequence, first key, end of keys and window flag of a piece; zeros where it is none."""
    fields = pieces_ptr + piece * _PIECE
    sequence = gl.load(fields, mask=is_piece, other=0)
    start = gl.load(fields + 1, mask=is_piece, other=0)
    end = gl.load(fields + 2, mask=is_piece, other=0)
    window = gl.load(fields + 4, mask=is_piece, other=0)
    return sequence, start, end, window


@gluon.jit
def _side_of(left, right, SIDE: gl.constexpr):
    if SIDE == 0:
        return left
    else:
        return right


@gluon.jit
def _copy_tile(rows, row, shared, num_tiles):
    """Copy 64 rows from `row` on into the next buffer, each half as soon as it is free."""
    buffer = num_tiles % 2
    free = num_tiles // 2 % 2 ^ 1
    half_bytes: gl.constexpr = rows.half.block_type.nbytes
    pe_bytes: gl.constexpr = rows.pe.block_type.nbytes
    full = shared.full.index(buffer)
    mbarrier.wait(shared.empty.index(buffer), free)
    mbarrier.expect(full, half_bytes)
    copy_block(rows.half, [row, 0], full, shared.left.index(buffer))
    full = shared.full.index(2 + buffer)
    mbarrier.wait(shared.empty.index(2 + buffer), free)
    mbarrier.expect(full, half_bytes + pe_bytes)
    copy_block(rows.half, [row, _HALF], full, shared.right.index(buffer))
    copy_block(rows.pe, [row, _DIM], full, shared.pe.index(buffer))


@gluon.jit
def _copy_q(call, shared, sequence, turn, FORM: gl.constexpr):
    """Once the piece before is done. Rows past the sequence's are the next one's, or zero; their
    results are not stored."""
    row = sequence * (FORM.WINDOW * FORM.NUM_HEADS) + gl.program_id(0) * _ROWS
    half_bytes: gl.constexpr = call.q.half.block_type.nbytes
    pe_bytes: gl.constexpr = call.q.pe.block_type.nbytes
    mbarrier.wait(shared.done.index(0), turn ^ 1)
    mbarrier.wait(shared.done.index(1), turn ^ 1)
    full = shared.q_full.index(0)
    mbarrier.expect(full, 2 * half_bytes + pe_bytes)
    copy_block(call.q.half, [row, 0], full, shared.q_left)
    copy_block(call.q.half, [row, _HALF], full, shared.q_right)
    copy_block(call.q.pe, [row, _DIM], full, shared.q_pe)


@gluon.jit
def _copy_pieces(call, shared, FORM: gl.constexpr):
    """What the copying warp does: q and tiles of all pieces, in the order in which they are used,
    but the first tile of a piece before its q, which has to wait for the piece before."""
    sequence = call.first_sequence
    start = call.first_start
    end = call.first_end
    page = call.first_page
    num_tiles = 0
    for piece in range(call.first_piece, call.end_piece):
        turn = (piece - call.first_piece) % 2
        window = gl.load(call.pieces_ptr + piece * _PIECE + 4)
        next_sequence, next_start, next_end, _ = _load_piece(
            call.pieces_ptr, piece + 1, piece + 1 < call.end_piece
        )
        next_table = call.page_table_ptr + next_sequence.to(gl.int64) * call.page_table_stride
        next_page = gl.load(
            next_table + next_start // FORM.PAGE_SIZE, mask=next_start < next_end, other=0
        )
        if start >= end:
            _copy_q(call, shared, sequence, turn, FORM)
        table = call.page_table_ptr + sequence.to(gl.int64) * call.page_table_stride
        for tile in range(start, end, _KEYS):
            row = page * FORM.PAGE_SIZE + tile % FORM.PAGE_SIZE
            after = tile + _KEYS
            page = gl.load(table + after // FORM.PAGE_SIZE, mask=after < end, other=0)
            _copy_tile(call.latent, row, shared, num_tiles)
            num_tiles += 1
            if tile == start:
                _copy_q(call, shared, sequence, turn, FORM)
        if FORM.HAS_WINDOW and window > 0:
            _copy_tile(call.window, sequence * FORM.WINDOW, shared, num_tiles)
            num_tiles += 1
        sequence = next_sequence
        start = next_start
        end = next_end
        page = next_page


@gluon.jit
def _give_back(shared, tile, SIDE: gl.constexpr):
    """Side SIDE of a tile may be overwritten: this warpgroup has added it."""
    block_barrier()
    mbarrier.arrive(shared.empty.index(2 * SIDE + tile.buffer), count=1)


@gluon.jit
def _start_scores(shared, tile):
    """Start the products of q and a tile; they are in registers after warpgroup_mma_wait."""
    scores = gl.zeros([_ROWS, _KEYS], gl.float32, _SCORES)
    left = shared.left.index(tile.buffer).permute((1, 0))
    right = shared.right.index(tile.buffer).permute((1, 0))
    pe = shared.pe.index(tile.buffer).permute((1, 0))
    mbarrier.wait(shared.full.index(tile.buffer), tile.phase)
    scores = warpgroup_mma(shared.q_left, left, scores, use_acc=False, is_async=True)
    mbarrier.wait(shared.full.index(2 + tile.buffer), tile.phase)
    scores = warpgroup_mma(shared.q_right, right, scores, is_async=True)
    scores = warpgroup_mma(shared.q_pe, pe, scores, is_async=True)
    return scores


@gluon.jit
def _hide(scores, tile, FORM: gl.constexpr):
    """Minus infinity for what is no key and, in a window, for keys after the row's query."""
    key = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, _SCORES))
    row = gl.program_id(0) * _ROWS + gl.arange(0, _ROWS, layout=_ROW)
    num_visible = gl.where(row >= 0, tile.num_keys, 0)
    if FORM.HAS_WINDOW and FORM.CAUSAL:
        num_seen = gl.minimum(row // FORM.NUM_HEADS + 1, num_visible)
        num_visible = gl.where(tile.is_window, num_seen, num_visible)
    visible = gl.expand_dims(key, 0) < gl.expand_dims(num_visible, 1)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _weigh(call, shared, state, scores, tile, FORM: gl.constexpr):
    """Online softmax of a tile's scores: new maximum and sum of each row, and weights."""
    is_partial = tile.num_keys < _KEYS
    if FORM.HAS_WINDOW:
        is_partial = is_partial | tile.is_window
    if is_partial:
        scores = _hide(scores, tile, FORM)
        zero_rows(shared.left.index(tile.buffer), tile.num_keys, _HALF * 2, 4)
        zero_rows(shared.right.index(tile.buffer), tile.num_keys, _HALF * 2, 4)
    top = gl.maximum(state.top, gl.max(scores, 1) * call.qk_scale)
    weights = gl.exp2(scores * call.qk_scale - gl.expand_dims(top, 1))
    total = state.total * gl.exp2(state.top - top) + gl.sum(weights, 1)
    return top, total, weights.to(shared.weights.dtype)


@gluon.jit
def _rescaled(acc, old_top, top):
    shrink = gl.convert_layout(gl.exp2(old_top - top), _ACC_ROW, assert_trivial=True)
    return acc * gl.expand_dims(shrink, 1)


@gluon.jit
def _add_own(shared, state, top, total, weights, tile, SIDE: gl.constexpr):
    """Give the weights of a tile to the other warpgroup and add the tile here. Each row of the
    state has seen a key: one of the tile, or one before."""
    shared.weights.store(weights)
    shared.state.index(0).store(top)
    shared.state.index(1).store(total)
    fence_async_shared()
    block_barrier()
    mbarrier.arrive(shared.ready.index(SIDE), count=1)
    acc = _rescaled(state.acc, state.top, top)
    values = _side_of(shared.left, shared.right, SIDE).index(tile.buffer)
    operand = gl.convert_layout(weights, _WEIGHTS)
    acc = warpgroup_mma(operand, values, acc, is_async=True)
    # The operand's registers are read until the product is done.
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    return _State(top, total, acc)


@gluon.jit
def _start_others(shared, state, tile, phase, SIDE: gl.constexpr):
    """Wait for the other warpgroup's weights of a tile and start adding it; its maximum and sum."""
    mbarrier.wait(shared.ready.index(1 - SIDE), phase)
    top = shared.state.index(0).load(_ROW)
    total = shared.state.index(1).load(_ROW)
    acc = _rescaled(state.acc, state.top, top)
    # Landed before its scores were computed; this makes it visible here too.
    mbarrier.wait(shared.full.index(2 * SIDE + tile.buffer), tile.phase)
    values = _side_of(shared.left, shared.right, SIDE).index(tile.buffer)
    acc = warpgroup_mma(shared.weights, values, acc, is_async=True)
    return top, total, acc


@gluon.jit
def _tile_at(start, end, i, num_tiles, FORM: gl.constexpr):
    """Tile i of a piece with keys [start, end). num_tiles: of the worker's pieces before."""
    num_keys = end - start - i * _KEYS
    is_window = num_keys <= 0
    if FORM.HAS_WINDOW:
        num_keys = gl.where(is_window, FORM.WINDOW, num_keys)
    return _Tile((num_tiles + i) % 2, (num_tiles + i) // 2 % 2, num_keys, is_window)


@gluon.jit
def _store(call, shared, state, sequence, slot, FORM: gl.constexpr, SIDE: gl.constexpr):
    """Write half of a piece's result, or of its partial result, and on side 0 the lse. By way of
    q's shared memory: both warpgroups have all scores of the piece."""
    NUM_ROWS: gl.constexpr = FORM.WINDOW * FORM.NUM_HEADS
    first_row = gl.program_id(0) * _ROWS
    row = first_row + gl.arange(0, _ROWS, layout=_ROW)
    has_keys = state.total > 0
    share = gl.where(has_keys, 1.0 / state.total, 0.0)
    lse = gl.where(has_keys, state.top * _LN2 + gl.log(state.total), float("-inf"))
    # A row whose scores are NaN must not pass for one without keys.
    share = gl.where(state.total == state.total, share, state.total)
    lse = gl.where(state.total == state.total, lse, state.total)
    share = gl.convert_layout(share, _ACC_ROW, assert_trivial=True)
    out = state.acc * gl.expand_dims(share, 1)
    staged = _side_of(shared.q_left, shared.q_right, SIDE)
    staged.store(out.to(shared.q_left.dtype))
    block_barrier()
    owner = gl.where(slot < 0, sequence, slot).to(gl.int64) * NUM_ROWS
    first = owner * _DIM + SIDE * _HALF
    if slot < 0:
        store_rows(call.out_ptr + first, first_row, staged, NUM_ROWS, _DIM, 4)
        if SIDE == 0:
            gl.store(call.lse_ptr + owner + row, lse, mask=row < NUM_ROWS)
    else:
        store_rows(call.part_out_ptr + first, first_row, staged, NUM_ROWS, _DIM, 4)
        if SIDE == 0:
            gl.store(call.part_lse_ptr + owner + row, lse, mask=row < NUM_ROWS)
    fence_async_shared()


@gluon.jit
def _attend(call, shared, FORM: gl.constexpr, SIDE: gl.constexpr):
    """What warpgroup SIDE does: it owns the tiles i of each piece with i % 2 == SIDE.

    Tiles are added in order, each before the scores of the owner's next one are started.
    """
    num_tiles = 0
    num_others = 0
    for piece in range(call.first_piece, call.end_piece):
        sequence, start, end, window = _load_piece(call.pieces_ptr, piece, piece < call.end_piece)
        slot = gl.load(call.pieces_ptr + piece * _PIECE + 3)
        num = (end - start + (_KEYS - 1)) // _KEYS
        if FORM.HAS_WINDOW:
            num += window
        state = _State(
            gl.full([_ROWS], float("-inf"), gl.float32, _ROW),
            gl.zeros([_ROWS], gl.float32, _ROW),
            gl.zeros([_ROWS, _HALF], gl.float32, _ACC),
        )
        turn = (piece - call.first_piece) % 2
        mbarrier.wait(shared.q_full.index(0), turn)

        if SIDE == 0 and num > 0:
            tile = _tile_at(start, end, 0, num_tiles, FORM)
            scores = warpgroup_mma_wait(0, deps=[_start_scores(shared, tile)])
            top, total, weights = _weigh(call, shared, state, scores, tile, FORM)
            state = _add_own(shared, state, top, total, weights, tile, SIDE)
            _give_back(shared, tile, SIDE)
        for i in range(2 - SIDE, num, 2):
            before = _tile_at(start, end, i - 1, num_tiles, FORM)
            tile = _tile_at(start, end, i, num_tiles, FORM)
            top, total, acc = _start_others(shared, state, before, num_others % 2, SIDE)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _give_back(shared, before, SIDE)
            state = _State(top, total, acc)
            # Started any earlier, these products delay those that the other warpgroup waits for.
            scores = warpgroup_mma_wait(0, deps=[_start_scores(shared, tile)])
            top, total, weights = _weigh(call, shared, state, scores, tile, FORM)
            state = _add_own(shared, state, top, total, weights, tile, SIDE)
            _give_back(shared, tile, SIDE)
            num_others += 1
        if (num > 0) & (num % 2 == SIDE):
            tile = _tile_at(start, end, num - 1, num_tiles, FORM)
            top, total, acc = _start_others(shared, state, tile, num_others % 2, SIDE)
            acc = warpgroup_mma_wait(0, deps=[acc])
            state = _State(top, total, acc)
            _give_back(shared, tile, SIDE)
            num_others += 1
        num_tiles += num

        _store(call, shared, state, sequence, slot, FORM, SIDE)
        block_barrier()
        mbarrier.arrive(shared.done.index(SIDE), count=1)
        mbarrier.wait(shared.done.index(1 - SIDE), turn)
        # A warp that waits still could miss the phase if the others went on to the next piece.
        block_barrier()


@gluon.jit
def split_mla_wide(
    q_half_desc,  # descriptors of q [B*w*H, DIM + PE], see `descriptors`
    q_pe_desc,
    latent_half_desc,  # of the pool [rows, DIM + PE]
    latent_pe_desc,
    window_half_desc,  # of the window [B*w, DIM + PE]
    window_pe_desc,
    out_ptr,  # [B*w, H, DIM]
    lse_ptr,  # [B*w, H] float32
    part_out_ptr,  # [slots, w, H, DIM]
    part_lse_ptr,  # [slots, w, H] float32
    page_table_ptr,  # [B, max_pages] int32
    workers_ptr,  # [workers, 8] int32, see split_plan
    pieces_ptr,  # [pieces, 5] int32, see split_plan
    qk_scale,
    page_table_stride,
    NUM_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program: a block of 64 (query, head) rows over the pieces of one worker.

    Grid: (blocks of rows, workers), 4 warps; warp_specialize adds four and one more, which copies.
    A worker's pieces either all have keys or none has.
    """
    dtype: gl.constexpr = q_half_desc.dtype
    HALF_SMEM: gl.constexpr = q_half_desc.layout
    PE_SMEM: gl.constexpr = q_pe_desc.layout
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    shared = _Shared(
        gl.allocate_shared_memory(dtype, [2, _KEYS, _HALF], HALF_SMEM),
        gl.allocate_shared_memory(dtype, [2, _KEYS, _HALF], HALF_SMEM),
        gl.allocate_shared_memory(dtype, [2, _KEYS, _PE], PE_SMEM),
        gl.allocate_shared_memory(dtype, [_ROWS, _HALF], HALF_SMEM),
        gl.allocate_shared_memory(dtype, [_ROWS, _HALF], HALF_SMEM),
        gl.allocate_shared_memory(dtype, [_ROWS, _PE], PE_SMEM),
        gl.allocate_shared_memory(dtype, [_ROWS, _KEYS], PE_SMEM),
        gl.allocate_shared_memory(gl.float32, [2, _ROWS], _STATE_SMEM),
        gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for i in gl.static_range(4):
        mbarrier.init(shared.full.index(i), count=1)
        mbarrier.init(shared.empty.index(i), count=1)
    mbarrier.init(shared.q_full.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(shared.ready.index(i), count=1)
        mbarrier.init(shared.done.index(i), count=1)
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
    call = _Call(
        _Rows(q_half_desc, q_pe_desc),
        _Rows(latent_half_desc, latent_pe_desc),
        _Rows(window_half_desc, window_pe_desc),
        out_ptr,
        lse_ptr,
        part_out_ptr,
        part_lse_ptr,
        page_table_ptr,
        # Arguments that are 1 have become constants, which partitions do not take.
        gl.to_tensor(page_table_stride),
        pieces_ptr,
        gl.to_tensor(qk_scale),
        first_piece,
        end_piece,
        first_sequence,
        first_start,
        first_end,
        first_page,
    )
    FORM: gl.constexpr = _form(NUM_HEADS, WINDOW, HAS_WINDOW, CAUSAL, PAGE_SIZE)
    gl.warp_specialize(
        [
            (_attend, (call, shared, FORM, 0)),
            (_attend, (call, shared, FORM, 1)),
            (_copy_pieces, (call, shared, FORM)),
        ],
        [4, 1],
        [_PRODUCT_REGISTERS, _COPY_REGISTERS],
    )


def descriptors(rows: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors for the copy engine of rows [..., DIM + PE] without gaps: of half a value's
    columns and of the rope part."""
    rows = rows.view(-1, DIM + PE)
    dtype = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    half, pe = (
        TensorDescriptor.from_tensor(
            rows, [KEYS, width], gl.NVMMASharedLayout.get_default_for([KEYS, width], dtype)
        )
        for width in (DIM // 2, PE)
    )
    return half, pe
