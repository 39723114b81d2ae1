# mypy: ignore-errors
"""Triton kernels: paged split-KV decode and verify for GQA and MLA, and the merge of splits.

Imported only by the triton backend, and only where triton is installed. A program works through
pieces of sequences that the plan gave it. Symbols as in attention.interface; a row is one (query
of the window, query head) pair of a KV head, r = query * G + head, G the most query heads that
any KV head has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import driver

# Fields of a piece and of a worker's record, see split_plan.
_PIECE = tl.constexpr(5)
_WORKER = tl.constexpr(8)

# The Hopper kernel is written against Gluon as it is from this version of Triton on.
HAS_GLUON = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)

_LN2 = tl.constexpr(0.6931471805599453)
# Smaller scales of values count as this one, 2 ** _LEAST_BIAS.
_LEAST_SCALE = tl.constexpr(2.0**-100)
_LEAST_BIAS = tl.constexpr(-100.0)


def max_shared_memory(device_index: int) -> int:
    """Bytes above which Triton refuses to launch a program on this GPU."""
    return driver.active.utils.get_device_properties(device_index)["max_shared_mem"]


@triton.jit
def _scores(q, q_pe, k, k_pe, qk_scale, SWAP: tl.constexpr, HAS_PE: tl.constexpr):
    """Base-2 scores: [rows, keys], or [keys, rows] with SWAP (q and q_pe then transposed)."""
    if SWAP:
        scores = tl.dot(k, q, input_precision="ieee")
        if HAS_PE:
            scores = tl.dot(k_pe, q_pe, acc=scores, input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_PE:
            scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores, input_precision="ieee")
    return scores * qk_scale


@triton.jit
def _accumulate(scores, bias, v, top, total, acc, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Online softmax over one tile of keys. Every row sees a key in its first tile.

    bias: log2 of the factor by which a key's value is larger than v. `top` is the largest score
    with its bias, so that the weights of v are at most 1 and keep their precision in 16 bits.
    """
    biased = scores
    if HAS_BIAS:
        biased += bias[:, None] if SWAP else bias[None, :]
    if SWAP:
        new_top = tl.maximum(top, tl.max(biased, 0))
        weights = tl.exp2(biased - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        shares = tl.exp2(scores - new_top[None, :]) if HAS_BIAS else weights
        total = total * shrink + tl.sum(shares, 0)
        acc = acc * shrink[None, :]
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc=acc, input_precision="ieee")
    else:
        new_top = tl.maximum(top, tl.max(biased, 1))
        weights = tl.exp2(biased - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        shares = tl.exp2(scores - new_top[:, None]) if HAS_BIAS else weights
        total = total * shrink + tl.sum(shares, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc=acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def split_attention(
    q_ptr,  # [B*w, H, D + PE]
    k_ptr,  # [rows, Hk, D] or, for MLA, [rows, D + PE]
    v_ptr,  # [rows, Hk, D]; not read for MLA
    k_scale_ptr,  # float32, true key = stored * scale: one, or one a row, [N, Hk, P]
    v_scale_ptr,  # the same of values; for MLA the same as k_scale_ptr
    window_k_ptr,  # [B*w, Hk, D] or [B*w, D + PE]
    window_v_ptr,  # [B*w, Hk, D]
    out_ptr,  # [B*w, H, D]
    lse_ptr,  # [B*w, H] float32
    part_out_ptr,  # [slots, w, H, D] float32
    part_lse_ptr,  # [slots, w, H] float32
    page_table_ptr,  # [B, max_pages] int32
    workers_ptr,  # [workers, 8] int32, see split_plan
    pieces_ptr,  # [pieces, 5] int32, see split_plan
    head_starts_ptr,  # [Hk + 1] int32, first query head of each KV head
    qk_scale,
    page_table_stride,
    k_stride,  # elements between rows of k
    v_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PE: tl.constexpr,
    PE_PAD: tl.constexpr,
    IS_MLA: tl.constexpr,
    SCALES: tl.constexpr,  # 0: none, 1: one, 2: one a row and KV head
    SWAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: block of rows of one KV head, over the pieces of one worker.

    Grid: (KV heads * blocks of rows, workers), so that programs that read the same keys run
    together. What is read before the wait for earlier kernels is the plan, which no kernel writes.
    """
    blocks: tl.constexpr = (WINDOW * GROUP + BLOCK_ROWS - 1) // BLOCK_ROWS
    kv_head = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = row // GROUP
    first_head = tl.load(head_starts_ptr + kv_head)
    head = first_head + row % GROUP
    is_row = (query < WINDOW) & (head < tl.load(head_starts_ptr + kv_head + 1))
    row_offset = query * NUM_HEADS + head
    dim = tl.arange(0, DIM_PAD)
    is_dim = dim < DIM
    pe = tl.arange(0, PE_PAD)
    is_pe = pe < PE
    key = tl.arange(0, BLOCK_KEYS)
    if IS_MLA:
        k_head_ptr = k_ptr
        v_head_ptr = v_ptr
    else:
        k_head_ptr = k_ptr + kv_head * DIM
        v_head_ptr = v_ptr + kv_head * DIM
    if PDL:
        # What follows reads what kernels before this one have written.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    pool_qk_scale = qk_scale * tl.load(k_scale_ptr) if SCALES == 1 else qk_scale
    first_piece = tl.load(workers_ptr + tl.program_id(1) * _WORKER)
    end_piece = tl.load(workers_ptr + tl.program_id(1) * _WORKER + 1)
    for piece in range(first_piece, end_piece):
        fields = pieces_ptr + piece * _PIECE
        sequence = tl.load(fields)
        start = tl.load(fields + 1)
        end = tl.load(fields + 2)
        slot = tl.load(fields + 3)
        q_rows = (sequence.to(tl.int64) * (WINDOW * NUM_HEADS) + row_offset) * (DIM + PE)
        if SWAP:
            q = tl.load(
                q_ptr + q_rows[None, :] + dim[:, None],
                mask=is_row[None, :] & is_dim[:, None],
                other=0.0,
            )
            top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            acc = tl.zeros([DIM_PAD, BLOCK_ROWS], tl.float32)
        else:
            q = tl.load(
                q_ptr + q_rows[:, None] + dim[None, :],
                mask=is_row[:, None] & is_dim[None, :],
                other=0.0,
            )
            top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            acc = tl.zeros([BLOCK_ROWS, DIM_PAD], tl.float32)
        q_pe = q
        if IS_MLA:
            if SWAP:
                q_pe = tl.load(
                    q_ptr + q_rows[None, :] + (DIM + pe)[:, None],
                    mask=is_row[None, :] & is_pe[:, None],
                    other=0.0,
                )
            else:
                q_pe = tl.load(
                    q_ptr + q_rows[:, None] + (DIM + pe)[None, :],
                    mask=is_row[:, None] & is_pe[None, :],
                    other=0.0,
                )
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        table = page_table_ptr + sequence.to(tl.int64) * page_table_stride

        for tile in tl.range(start, end, BLOCK_KEYS, num_stages=STAGES):
            position = tile + key
            is_key = position < end
            if PAGE_SIZE % BLOCK_KEYS == 0:
                page = tl.load(table + tile // PAGE_SIZE).to(tl.int64)
                place = tile % PAGE_SIZE + key
            else:
                page = tl.load(table + position // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
                place = position % PAGE_SIZE
            pool_row = page * PAGE_SIZE + place
            k = tl.load(
                k_head_ptr + (pool_row * k_stride)[:, None] + dim[None, :],
                mask=is_key[:, None] & is_dim[None, :],
                other=0.0,
            ).to(q.dtype)
            if IS_MLA:
                k_pe = tl.load(
                    k_head_ptr + (pool_row * k_stride)[:, None] + (DIM + pe)[None, :],
                    mask=is_key[:, None] & is_pe[None, :],
                    other=0.0,
                ).to(q.dtype)
                v = k
            else:
                k_pe = k
                v = tl.load(
                    v_head_ptr + (pool_row * v_stride)[:, None] + dim[None, :],
                    mask=is_key[:, None] & is_dim[None, :],
                    other=0.0,
                ).to(q.dtype)
            scores = _scores(q, q_pe, k, k_pe, pool_qk_scale, SWAP, IS_MLA)
            bias = top
            if SCALES == 2:
                scale_row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + place
                k_scale = tl.load(k_scale_ptr + scale_row, mask=is_key, other=1.0)
                scores *= k_scale[:, None] if SWAP else k_scale[None, :]
                if IS_MLA:
                    v_scale = k_scale
                else:
                    v_scale = tl.load(v_scale_ptr + scale_row, mask=is_key, other=1.0)
                # A bias of -inf would leave a row of such keys without a top.
                bias = tl.where(v_scale < _LEAST_SCALE, _LEAST_BIAS, tl.log2(v_scale))
            if SWAP:
                scores = tl.where(is_key[:, None], scores, float("-inf"))
            else:
                scores = tl.where(is_key[None, :], scores, float("-inf"))
            top, total, acc = _accumulate(scores, bias, v, top, total, acc, SWAP, SCALES == 2)
        if SCALES == 1:
            acc *= tl.load(v_scale_ptr)

        if HAS_WINDOW and tl.load(fields + 4) > 0:
            for tile in range(0, WINDOW, BLOCK_WINDOW):
                place = tile + tl.arange(0, BLOCK_WINDOW)
                is_key_w = place < WINDOW
                window_row = sequence.to(tl.int64) * WINDOW + place
                if IS_MLA:
                    k_rows = window_row * (DIM + PE)
                else:
                    k_rows = (window_row * NUM_KV_HEADS + kv_head) * DIM
                k = tl.load(
                    window_k_ptr + k_rows[:, None] + dim[None, :],
                    mask=is_key_w[:, None] & is_dim[None, :],
                    other=0.0,
                )
                if IS_MLA:
                    k_pe = tl.load(
                        window_k_ptr + k_rows[:, None] + (DIM + pe)[None, :],
                        mask=is_key_w[:, None] & is_pe[None, :],
                        other=0.0,
                    )
                    v = k
                else:
                    k_pe = k
                    v = tl.load(
                        window_v_ptr + k_rows[:, None] + dim[None, :],
                        mask=is_key_w[:, None] & is_dim[None, :],
                        other=0.0,
                    )
                scores = _scores(q, q_pe, k, k_pe, qk_scale, SWAP, IS_MLA)
                if SWAP:
                    visible = is_key_w[:, None]
                    if CAUSAL:
                        visible = visible & (place[:, None] <= query[None, :])
                else:
                    visible = is_key_w[None, :]
                    if CAUSAL:
                        visible = visible & (place[None, :] <= query[:, None])
                scores = tl.where(visible, scores, float("-inf"))
                top, total, acc = _accumulate(scores, top, v, top, total, acc, SWAP, False)

        has_keys = total > 0
        share = tl.where(has_keys, 1.0 / total, 0.0)
        lse = tl.where(has_keys, top * _LN2 + tl.log(total), float("-inf"))
        # A row whose scores are NaN must not pass for one without keys.
        share = tl.where(total == total, share, total)
        lse = tl.where(total == total, lse, total)
        owner = tl.where(slot < 0, sequence, slot).to(tl.int64)
        out_rows = owner * (WINDOW * NUM_HEADS) + row_offset
        if SWAP:
            out = acc * share[None, :]
            out_offsets = out_rows[None, :] * DIM + dim[:, None]
            is_out = is_row[None, :] & is_dim[:, None]
        else:
            out = acc * share[:, None]
            out_offsets = out_rows[:, None] * DIM + dim[None, :]
            is_out = is_row[:, None] & is_dim[None, :]
        if slot < 0:
            tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=is_out)
            tl.store(lse_ptr + out_rows, lse, mask=is_row)
        else:
            tl.store(part_out_ptr + out_offsets, out, mask=is_out)
            tl.store(part_lse_ptr + out_rows, lse, mask=is_row)


@triton.jit
def merge_splits(
    out_ptr,  # [B*w, H, D]
    lse_ptr,  # [B*w, H] float32
    part_out_ptr,  # [slots, w, H, D]
    part_lse_ptr,  # [slots, w, H] float32
    slot_starts_ptr,  # [B + 1] int32
    ROWS: tl.constexpr,  # w * H
    DIM: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_DIM columns of one row, over the slots of its sequence.

    Grid: (B * w * H, blocks of columns). Sequences of a single piece have no slots and are done.
    """
    sequence = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    first = tl.load(slot_starts_ptr + sequence)
    end = tl.load(slot_starts_ptr + sequence + 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if end > first:
        dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
        place = tl.arange(0, BLOCK_SLOTS)
        top = float("-inf")
        total = 0.0
        acc = tl.zeros([BLOCK_DIM], tl.float32)
        for start in range(first, end, BLOCK_SLOTS):
            slot = (start + place).to(tl.int64)
            is_slot = start + place < end
            part_lse = tl.load(part_lse_ptr + slot * ROWS + row, mask=is_slot, other=float("-inf"))
            part = tl.load(
                part_out_ptr + ((slot * ROWS + row) * DIM)[:, None] + dim[None, :],
                mask=is_slot[:, None] & (dim < DIM)[None, :],
                other=0.0,
            ).to(tl.float32)
            new_top = tl.maximum(top, tl.max(part_lse, 0))
            # Slots of a sequence always hold keys, so new_top is finite unless scores were not.
            weights = tl.exp(part_lse - new_top)
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(weights, 0)
            acc = acc * shrink + tl.sum(part * weights[:, None], 0)
            top = new_top
        out = acc / total
        row_index = tl.program_id(0).to(tl.int64)
        tl.store(out_ptr + row_index * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)
        if tl.program_id(1) == 0:
            tl.store(lse_ptr + row_index, top + tl.log(total))
