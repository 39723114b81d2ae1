# mypy: ignore-errors
"""Gluon kernel for Hopper: paged split-KV MLA decode and verify in 16-bit types.

The same work, plan and results as triton_kernels.split_attention with IS_MLA, for tiles of 64 keys
and warpgroup matrix instructions. Written in Gluon because the order matters here: the next tile's
copy must be under way while this tile is computed, also from one piece to the next, which Triton's
pipeliner does not do for two buffers. A tile is copied once and is both key and value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_KEYS = 64

# Renamed after Triton 3.6.
block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_elements = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)

# Fields of a piece and of a worker's record, see split_plan.
_PIECE = gl.constexpr(5)
_WORKER = gl.constexpr(8)

_LN2 = gl.constexpr(0.6931471805599453)


class _Form(NamedTuple):
    """Constants of a call: of a row [DIM + PE], of the pool and of the threads that copy."""

    TMA: object
    PAGE_SIZE: object
    BLOCK_KEYS: object
    DIM: object
    PE: object
    LATENT_COPY: object
    PE_COPY: object


@gluon.constexpr_function
def _form(*values):
    return _Form(*values)


class _Pool(NamedTuple):
    """Where a worker finds its keys."""

    latent_ptr: object
    latent_desc: object
    pe_desc: object
    page_table_ptr: object
    page_table_stride: object
    pieces_ptr: object
    end_piece: object


class _Tiles(NamedTuple):
    """Two tiles in shared memory, and the row of each key in the layouts of the two copies."""

    latent: object  # [2, KEYS, DIM]
    pe: object  # [2, KEYS, PE]
    barriers: object  # [2, 1]
    key: object
    pe_key: object


class _Ahead(NamedTuple):
    """The tile to copy next, whose page is loaded, and the piece after the one that it is in."""

    table: object
    tile: object
    end: object
    piece: object
    page: object
    pe_page: object
    after_sequence: object
    after_start: object
    after_end: object


@gluon.jit
def _copy_rows(
    latent_smem,
    pe_smem,
    base,  # pointer that rows count from
    rows,  # [KEYS] row of each key, in the layout of the latent copy
    pe_rows,  # the same in the layout of the rope copy
    is_key,
    is_pe_key,
    FORM: gl.constexpr,
):
    """Start copying rows to shared memory and commit; rows that are not keys become zero."""
    dim = gl.arange(0, FORM.DIM, layout=gl.SliceLayout(0, FORM.LATENT_COPY))
    pe = gl.arange(0, FORM.PE, layout=gl.SliceLayout(0, FORM.PE_COPY))
    offsets = (rows * (FORM.DIM + FORM.PE))[:, None] + dim[None, :]
    copy_elements(latent_smem, base + offsets, mask=is_key[:, None])
    pe_offsets = (pe_rows * (FORM.DIM + FORM.PE))[:, None] + (FORM.DIM + pe)[None, :]
    copy_elements(pe_smem, base + pe_offsets, mask=is_pe_key[:, None])
    async_copy.commit_group()


@gluon.jit
def _copy_tile(pool, tiles, buffer, ahead, FORM: gl.constexpr):
    """Start the copy of the tile in `ahead`. With TMA its keys from the end on are copied too."""
    tile = ahead.tile
    end = ahead.end
    latent_smem = tiles.latent.index(buffer)
    pe_smem = tiles.pe.index(buffer)
    if FORM.TMA:
        barrier = tiles.barriers.index(buffer)
        row = ahead.page * FORM.PAGE_SIZE + tile % FORM.PAGE_SIZE
        is_tile = tile < end
        nbytes: gl.constexpr = pool.latent_desc.block_type.nbytes + pool.pe_desc.block_type.nbytes
        mbarrier.expect(barrier, nbytes, pred=is_tile)
        copy_block(pool.latent_desc, [row, 0], barrier, latent_smem, pred=is_tile)
        copy_block(pool.pe_desc, [row, FORM.DIM], barrier, pe_smem, pred=is_tile)
    else:
        if FORM.PAGE_SIZE % FORM.BLOCK_KEYS == 0:
            row = ahead.page.to(gl.int64) * FORM.PAGE_SIZE + tile % FORM.PAGE_SIZE
            base = pool.latent_ptr + row * (FORM.DIM + FORM.PE)
            rows = tiles.key
            pe_rows = tiles.pe_key
        else:
            base = pool.latent_ptr
            rows = ahead.page.to(gl.int64) * FORM.PAGE_SIZE + (tile + tiles.key) % FORM.PAGE_SIZE
            pe_rows = (
                ahead.pe_page.to(gl.int64) * FORM.PAGE_SIZE + (tile + tiles.pe_key) % FORM.PAGE_SIZE
            )
        is_key = tile + tiles.key < end
        is_pe_key = tile + tiles.pe_key < end
        _copy_rows(latent_smem, pe_smem, base, rows, pe_rows, is_key, is_pe_key, FORM)


@gluon.jit
def _load_pages(table, tile, end, tiles, FORM: gl.constexpr):
    """Pages of a tile's keys: one, or one a key for each of the two copies."""
    if FORM.PAGE_SIZE % FORM.BLOCK_KEYS == 0:
        page = gl.load(table + tile // FORM.PAGE_SIZE, mask=tile < end, other=0)
        return page, page
    else:
        key = tile + tiles.key
        pe_key = tile + tiles.pe_key
        page = gl.load(table + key // FORM.PAGE_SIZE, mask=key < end, other=0)
        pe_page = gl.load(table + pe_key // FORM.PAGE_SIZE, mask=pe_key < end, other=0)
        return page, pe_page


@gluon.jit
def _load_piece(pieces_ptr, piece, end_piece):
    """Sequence, first key, end of keys and slot of a piece; without keys past the last piece."""
    fields = pieces_ptr + piece * _PIECE
    is_piece = piece < end_piece
    sequence = gl.load(fields, mask=is_piece, other=0)
    start = gl.load(fields + 1, mask=is_piece, other=0)
    end = gl.load(fields + 2, mask=is_piece, other=0)
    slot = gl.load(fields + 3, mask=is_piece, other=0)
    return sequence, start, end, slot


@gluon.jit
def _copy_ahead(pool, tiles, buffer, ahead, FORM: gl.constexpr):
    """Start the copy of the tile in `ahead`, go on to the next tile and load its page."""
    _copy_tile(pool, tiles, buffer, ahead, FORM)
    table = ahead.table
    tile = ahead.tile + FORM.BLOCK_KEYS
    end = ahead.end
    piece = ahead.piece
    after_sequence = ahead.after_sequence
    after_start = ahead.after_start
    after_end = ahead.after_end
    if tile >= end:
        piece += 1
        table = pool.page_table_ptr + after_sequence.to(gl.int64) * pool.page_table_stride
        tile = after_start
        end = after_end
        after_sequence, after_start, after_end, _ = _load_piece(
            pool.pieces_ptr, piece + 1, pool.end_piece
        )
    page, pe_page = _load_pages(table, tile, end, tiles, FORM)
    return _Ahead(table, tile, end, piece, page, pe_page, after_sequence, after_start, after_end)


@gluon.jit
def zero_rows(block, num_rows, ROW_BYTES: gl.constexpr, num_warps: gl.constexpr):
    """Overwrite the rows of a tile from num_rows on: whatever the pool holds there must not be a
    value. block: 64 rows in shared memory, in swizzled columns of 128 bytes one after the other.

    num_rows is not negative. The loop runs once a piece, and loading its instructions is what it
    costs; so it must not be unrolled, and ends at a number that the compiler does not know.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])
    COLUMN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    NUM_COLUMNS: gl.constexpr = ROW_BYTES // 128
    columns = block._reinterpret(gl.int32, [NUM_COLUMNS, 64, 32], COLUMN)
    is_kept = gl.arange(0, 64, layout=gl.SliceLayout(1, WORDS)) < num_rows
    for i in range(gl.minimum(num_rows, 0) + NUM_COLUMNS):
        gl.inline_asm_elementwise(
            '.pragma "nounroll"; // $0', "=r", [], gl.int32, is_pure=False, pack=1
        )
        column = columns.index(i)
        words = column.load(WORDS)
        column.store(gl.where(gl.expand_dims(is_kept, 1), words, gl.zeros_like(words)))


@gluon.jit
def _start_scores(
    q_smem,
    q_pe_smem,
    latent,
    k_pe,
    SWAP: gl.constexpr,
    SHAPE: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Start the products of rows and keys; they are in registers after warpgroup_mma_wait."""
    scores = gl.zeros(SHAPE, gl.float32, SCORES)
    if SWAP:
        scores = warpgroup_mma(latent, q_smem.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(k_pe, q_pe_smem.permute((1, 0)), scores, is_async=True)
    else:
        scores = warpgroup_mma(q_smem, latent.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_pe_smem, k_pe.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _accumulate(
    scores,
    latent,
    weights_smem,
    visible,  # bool, broadcastable to the scores
    qk_scale,
    top,
    total,  # partial sums, as wide as the scores
    acc,
    SWAP: gl.constexpr,
    ACC: gl.constexpr,
):
    """Online softmax over one tile. Every row sees a key in its first tile."""
    AXIS: gl.constexpr = 0 if SWAP else 1
    scores = gl.where(visible, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, AXIS) * qk_scale)
    shrink = gl.exp2(top - new_top)
    weights = gl.exp2(scores * qk_scale - gl.expand_dims(new_top, AXIS))
    total = total * gl.expand_dims(shrink, AXIS) + weights
    weights_smem.store(weights.to(weights_smem.dtype))
    fence_async_shared()
    shrink_acc = gl.convert_layout(shrink, gl.SliceLayout(AXIS, ACC), assert_trivial=True)
    acc = acc * gl.expand_dims(shrink_acc, AXIS)
    block_barrier()
    if SWAP:
        acc = warpgroup_mma(latent.permute((1, 0)), weights_smem, acc, is_async=True)
    else:
        acc = warpgroup_mma(weights_smem, latent, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return new_top, total, acc


@gluon.jit
def store_rows(
    ptr, first_row, block, NUM_ROWS: gl.constexpr, DIM: gl.constexpr, num_warps: gl.constexpr
):
    """Write a block [64, n] from shared memory to rows of DIM columns from first_row on, those
    before NUM_ROWS. A warp writes whole lines, of which accumulators' layouts have 16 bytes each.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    offsets = gl.expand_dims(row * DIM, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(row < NUM_ROWS, 1) & gl.expand_dims(column >= 0, 0)
    for part in gl.static_range(block.shape[1] // 64):
        values = block.slice(part * 64, 64, dim=1).load(LINES)
        gl.store(ptr + part * 64 + offsets, values.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def split_mla(
    q_ptr,  # [B*w, H, DIM + PE]
    latent_ptr,  # [rows, DIM + PE]
    latent_desc,  # TMA descriptors of the same with blocks of [64, DIM] and [64, PE]; TMA only
    pe_desc,
    window_ptr,  # [B*w, DIM + PE]
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
    DIM: gl.constexpr,
    PE: gl.constexpr,
    SWAP: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    TMA: gl.constexpr,
    PRODUCT_FIRST: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: a block of BLOCK_ROWS (query, head) rows over the pieces of one worker.

    Grid: (blocks of rows, workers). The copies run one tile ahead of the products through all
    pieces of the worker: `ahead` is the tile to copy next, whose page has been loaded already.
    A worker's pieces either all have keys or none has.
    """
    BLOCK_KEYS: gl.constexpr = 64
    STRIDE: gl.constexpr = DIM + PE
    NUM_ROWS: gl.constexpr = WINDOW * NUM_HEADS
    PE_LANES: gl.constexpr = PE // 8
    DIM_LANES: gl.constexpr = 32 if DIM // 8 > 32 else DIM // 8
    LATENT_COPY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // DIM_LANES, DIM_LANES], [num_warps, 1], [1, 0]
    )
    PE_COPY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // PE_LANES, PE_LANES], [num_warps, 1], [1, 0]
    )
    if SWAP:
        SCORES: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [num_warps, 1], [16, BLOCK_ROWS, 16]
        )
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_ROWS, 16])
        AXIS: gl.constexpr = 0
        SCORES_SHAPE: gl.constexpr = [BLOCK_KEYS, BLOCK_ROWS]
        ACC_SHAPE: gl.constexpr = [DIM, BLOCK_ROWS]
    else:
        SIDES: gl.constexpr = num_warps // 4
        SCORES: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, SIDES], [16, BLOCK_KEYS // SIDES, 16]
        )
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SIDES], [16, DIM // SIDES, 16])
        AXIS: gl.constexpr = 1
        SCORES_SHAPE: gl.constexpr = [BLOCK_ROWS, BLOCK_KEYS]
        ACC_SHAPE: gl.constexpr = [BLOCK_ROWS, DIM]
    AXIS_ROWS: gl.constexpr = 1 - AXIS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    LATENT_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KEYS, DIM], dtype)
    PE_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KEYS, PE], dtype)
    WEIGHTS_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SCORES_SHAPE, dtype)
    latent_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_KEYS, DIM], LATENT_SMEM)
    pe_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_KEYS, PE], PE_SMEM)
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_ROWS, DIM], LATENT_SMEM)
    q_pe_smem = gl.allocate_shared_memory(dtype, [BLOCK_ROWS, PE], PE_SMEM)
    weights_smem = gl.allocate_shared_memory(dtype, SCORES_SHAPE, WEIGHTS_SMEM)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if TMA:
        for i in gl.static_range(2):
            mbarrier.init(barriers.index(i), count=1)
        fence_async_shared()
        block_barrier()

    first_row = gl.program_id(0) * BLOCK_ROWS
    key = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, LATENT_COPY))
    pe_key = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(1, PE_COPY))
    q_row = first_row + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, LATENT_COPY))
    q_pe_row = first_row + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, PE_COPY))
    scores_key = gl.arange(0, BLOCK_KEYS, layout=gl.SliceLayout(AXIS_ROWS, SCORES))
    scores_row = first_row + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(AXIS, SCORES))
    acc_row = first_row + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(AXIS, ACC))
    acc_dim = gl.arange(0, DIM, layout=gl.SliceLayout(AXIS_ROWS, ACC))

    worker = workers_ptr + gl.program_id(1) * _WORKER
    first_piece = gl.load(worker)
    end_piece = gl.load(worker + 1)
    table = page_table_ptr + gl.load(worker + 2).to(gl.int64) * page_table_stride
    first_tile = gl.load(worker + 3)
    first_end = gl.load(worker + 4)
    FORM: gl.constexpr = _form(TMA, PAGE_SIZE, BLOCK_KEYS, DIM, PE, LATENT_COPY, PE_COPY)
    tiles = _Tiles(latent_smem, pe_smem, barriers, key, pe_key)
    if PAGE_SIZE % BLOCK_KEYS == 0:
        page = gl.load(worker + 5)
        pe_page = page
    else:
        page, pe_page = _load_pages(table, first_tile, first_end, tiles, FORM)
    if PDL:
        # What follows reads what kernels before this one have written.
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1
        )
    # What the copies go on with after the piece that they are in.
    after_sequence, after_start, after_end, _ = _load_piece(pieces_ptr, first_piece + 1, end_piece)
    ahead = _Ahead(
        table,
        first_tile,
        first_end,
        first_piece,
        page,
        pe_page,
        after_sequence,
        after_start,
        after_end,
    )
    pool = _Pool(
        latent_ptr,
        latent_desc,
        pe_desc,
        page_table_ptr,
        page_table_stride,
        pieces_ptr,
        end_piece,
    )
    ahead = _copy_ahead(pool, tiles, 0, ahead, FORM)

    num_tiles = 0
    for piece in range(first_piece, end_piece):
        # Loaded again and not carried: Triton 3.6 loses a carried lower bound of an inner loop.
        sequence, start, end, slot = _load_piece(pieces_ptr, piece, end_piece)
        # The last tile's readers of q must be done.
        block_barrier()
        _copy_rows(
            q_smem,
            q_pe_smem,
            q_ptr + sequence.to(gl.int64) * (NUM_ROWS * STRIDE),
            q_row,
            q_pe_row,
            q_row < NUM_ROWS,
            q_pe_row < NUM_ROWS,
            FORM,
        )
        top = gl.full([BLOCK_ROWS], float("-inf"), gl.float32, gl.SliceLayout(AXIS, SCORES))
        total = gl.zeros(SCORES_SHAPE, gl.float32, SCORES)
        acc = gl.zeros(ACC_SHAPE, gl.float32, ACC)
        async_copy.wait_group(0)
        fence_async_shared()
        block_barrier()

        for tile in range(start, end, BLOCK_KEYS):
            buffer = num_tiles % 2
            latent = latent_smem.index(buffer)
            k_pe = pe_smem.index(buffer)
            if not PRODUCT_FIRST:
                # All warps are done with the other buffer.
                block_barrier()
                ahead = _copy_ahead(pool, tiles, 1 - buffer, ahead, FORM)
            if TMA:
                mbarrier.wait(barriers.index(buffer), num_tiles // 2 % 2)
                if tile + BLOCK_KEYS > end:
                    zero_rows(latent, end - tile, DIM * 2, num_warps)
                    fence_async_shared()
                    block_barrier()
            else:
                async_copy.wait_group(0 if PRODUCT_FIRST else 1)
                fence_async_shared()
                block_barrier()
            scores = _start_scores(q_smem, q_pe_smem, latent, k_pe, SWAP, SCORES_SHAPE, SCORES)
            if PRODUCT_FIRST:
                # All warps are done with the other buffer.
                block_barrier()
                ahead = _copy_ahead(pool, tiles, 1 - buffer, ahead, FORM)
            scores = warpgroup_mma_wait(0, deps=[scores])
            top, total, acc = _accumulate(
                scores,
                latent,
                weights_smem,
                gl.expand_dims(tile + scores_key < end, AXIS_ROWS),
                qk_scale,
                top,
                total,
                acc,
                SWAP,
                ACC,
            )
            num_tiles += 1

        if HAS_WINDOW:  # noqa: SIM102 - compiled away, so it cannot be joined with a value
            if gl.load(pieces_ptr + piece * _PIECE + 4) > 0:
                # The other buffer already holds, or awaits, the next piece's first tile.
                buffer = 1 - num_tiles % 2
                block_barrier()
                _copy_rows(
                    latent_smem.index(buffer),
                    pe_smem.index(buffer),
                    window_ptr + sequence.to(gl.int64) * (WINDOW * STRIDE),
                    key,
                    pe_key,
                    key < WINDOW,
                    pe_key < WINDOW,
                    FORM,
                )
                async_copy.wait_group(0)
                fence_async_shared()
                block_barrier()
                visible = gl.expand_dims(scores_key < WINDOW, AXIS_ROWS)
                if CAUSAL:
                    seen_until = gl.expand_dims(scores_row // NUM_HEADS, AXIS)
                    visible = visible & (gl.expand_dims(scores_key, AXIS_ROWS) <= seen_until)
                scores = _start_scores(
                    q_smem,
                    q_pe_smem,
                    latent_smem.index(buffer),
                    pe_smem.index(buffer),
                    SWAP,
                    SCORES_SHAPE,
                    SCORES,
                )
                scores = warpgroup_mma_wait(0, deps=[scores])
                top, total, acc = _accumulate(
                    scores,
                    latent_smem.index(buffer),
                    weights_smem,
                    visible,
                    qk_scale,
                    top,
                    total,
                    acc,
                    SWAP,
                    ACC,
                )

        row_total = gl.sum(total, AXIS)
        has_keys = row_total > 0
        share = gl.where(has_keys, 1.0 / row_total, 0.0)
        lse = gl.where(has_keys, top * _LN2 + gl.log(row_total), float("-inf"))
        # A row whose scores are NaN must not pass for one without keys.
        share = gl.where(row_total == row_total, share, row_total)
        lse = gl.where(row_total == row_total, lse, row_total)
        share = gl.convert_layout(share, gl.SliceLayout(AXIS, ACC), assert_trivial=True)
        out = acc * gl.expand_dims(share, AXIS)
        owner = gl.where(slot < 0, sequence, slot).to(gl.int64) * NUM_ROWS
        offsets = gl.expand_dims(acc_row * DIM, AXIS) + gl.expand_dims(acc_dim, AXIS_ROWS)
        is_out = gl.expand_dims(acc_row < NUM_ROWS, AXIS)
        is_row = scores_row < NUM_ROWS
        # The buffer that holds no tile. Few rows' results are written from registers.
        staged = latent_smem.index(1 - num_tiles % 2)
        if not SWAP:
            block_barrier()
            staged.store(out.to(dtype))
            fence_async_shared()
            block_barrier()
        if slot < 0:
            if SWAP:
                gl.store(out_ptr + owner * DIM + offsets, out.to(dtype), mask=is_out)
            else:
                store_rows(out_ptr + owner * DIM, first_row, staged, NUM_ROWS, DIM, num_warps)
            gl.store(lse_ptr + owner + scores_row, lse, mask=is_row)
        else:
            part_ptr = part_out_ptr + owner * DIM
            if SWAP:
                gl.store(part_ptr + offsets, out.to(part_ptr.dtype.element_ty), mask=is_out)
            else:
                store_rows(part_ptr, first_row, staged, NUM_ROWS, DIM, num_warps)
            gl.store(part_lse_ptr + owner + scores_row, lse, mask=is_row)
    # No copy may land after the program's shared memory has been given to another.
    async_copy.wait_group(0)


def descriptors(latent: torch.Tensor, dim: int, pe: int) -> tuple[TensorDescriptor, ...]:
    """Descriptors for the copy engine of a pool [N, P, dim + pe] without gaps between rows."""
    pool = latent.view(-1, dim + pe)
    return tuple(
        TensorDescriptor.from_tensor(pool, [BLOCK_KEYS, width], _tile_layout(width, latent.dtype))
        for width in (dim, pe)
    )


@lru_cache
def _tile_layout(width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([BLOCK_KEYS, width], element)
