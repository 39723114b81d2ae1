# mypy: ignore-errors
"""Triton kernel: paged split-KV decode and verify over a pool in float8_e4m3fn, 16-bit models.

The same work, plan and results as triton_kernels.split_attention. A pool row is read as 16-bit
pairs of neighbouring columns, so that tiles go from shared memory to tensor cores as 16-bit tiles
do (8-bit ones would be transposed byte by byte); a pair is unpacked in registers. The even and the
odd columns of a row are two matrices of half the width, for q and the result as well.

Products are in float16, which holds every e4m3 number: Hopper converts to it in one instruction for
two numbers, to bfloat16 in four. Rows of q are scaled by a power of two to fit it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PIECE = tl.constexpr(5)
_WORKER = tl.constexpr(8)
_LN2 = tl.constexpr(0.6931471805599453)
# Smaller scales of values count as this one, as in triton_kernels.
_LEAST_SCALE = tl.constexpr(2.0**-100)
_LEAST_Q = tl.constexpr(2.0**-100)


@triton.jit
def _unpack(pairs, PTX: tl.constexpr):
    """int16 pairs of e4m3 numbers -> two float16 tensors: even columns (low bytes) and odd ones."""
    if PTX:
        even, odd = tl.inline_asm_elementwise(
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
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def _log2(x, PTX: tl.constexpr):
    """To 2 ** -22, which tl.log2 exceeds with a polynomial. x: no subnormal number."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _load_scales(ptr, rows, is_key, IN_PAGE: tl.constexpr):
    """Scales of a tile's keys, whatever the pool holds past the last key. IN_PAGE: the rows are all
    in one page, so that they may be loaded without a mask, which would make a load of each number.
    """
    if IN_PAGE:
        return tl.load(ptr + rows)
    else:
        return tl.load(ptr + rows, mask=is_key, other=1.0)


@triton.jit
def _load_columns(ptr, rows, first, columns, is_row, is_column):
    """Columns `first + 2 * columns` of rows at these offsets."""
    return tl.load(
        ptr + rows[:, None] + (first + 2 * columns)[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )


@triton.jit
def _accumulate(
    scores,
    v_scale,  # [KEYS], at least _LEAST_SCALE; of values per key
    v_even,
    v_odd,
    top,
    total,
    acc_even,
    acc_odd,
    HAS_SCALES: tl.constexpr,
    IS_WIDE: tl.constexpr,  # total is as wide as the scores
    PTX: tl.constexpr,
):
    """As triton_kernels._accumulate, for rows x keys and a value in two halves.

    `top` is the largest score with the logarithm of its scale, so that a share times its scale is
    at most 1; a share itself may be 1 / _LEAST_SCALE.
    """
    biased = scores
    if HAS_SCALES:
        biased += _log2(v_scale, PTX)[None, :]
    new_top = tl.maximum(top, tl.max(biased, 1))
    shares = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink[:, None] + shares if IS_WIDE else total * shrink + tl.sum(shares, 1)
    weights = (shares * v_scale[None, :] if HAS_SCALES else shares).to(v_even.dtype)
    acc_even = tl.dot(weights, v_even, acc=acc_even * shrink[:, None])
    acc_odd = tl.dot(weights, v_odd, acc=acc_odd * shrink[:, None])
    return new_top, total, acc_even, acc_odd


@triton.jit
def split_fp8(
    q_ptr,  # [B*w, H, D + PE]
    k_ptr,  # int16 [rows, Hk, D / 2] or, for MLA, [rows, (D + PE) / 2]
    v_ptr,  # int16 [rows, Hk, D / 2]; not read for MLA
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
    k_stride,  # pairs between rows of k
    v_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,  # a tile's columns for D / 2
    PE: tl.constexpr,
    HALF_PE_PAD: tl.constexpr,
    IS_MLA: tl.constexpr,
    SCALES: tl.constexpr,  # 0: none, 1: one, 2: one a row and KV head
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,  # unpack with NVIDIA's instructions
    PDL: tl.constexpr,
):
    """One program: block of rows of one KV head, over the pieces of one worker.

    Grid and order as in triton_kernels.split_attention.
    """
    blocks: tl.constexpr = (WINDOW * GROUP + BLOCK_ROWS - 1) // BLOCK_ROWS
    HALF: tl.constexpr = DIM // 2
    IN_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_KEYS == 0
    kv_head = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = row // GROUP
    head = tl.load(head_starts_ptr + kv_head) + row % GROUP
    is_row = (query < WINDOW) & (head < tl.load(head_starts_ptr + kv_head + 1))
    row_offset = query * NUM_HEADS + head
    dim = tl.arange(0, HALF_PAD)
    is_dim = dim < HALF
    pe = tl.arange(0, HALF_PE_PAD)
    is_pe = pe < PE // 2
    key = tl.arange(0, BLOCK_KEYS)
    if IS_MLA:
        k_head_ptr = k_ptr
        v_head_ptr = v_ptr
    else:
        k_head_ptr = k_ptr + kv_head * HALF
        v_head_ptr = v_ptr + kv_head * HALF
    k_scale_head_ptr = k_scale_ptr + kv_head * PAGE_SIZE
    v_scale_head_ptr = v_scale_ptr + kv_head * PAGE_SIZE
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
        q_even = _load_columns(q_ptr, q_rows, 0, dim, is_row, is_dim).to(tl.float32)
        q_odd = _load_columns(q_ptr, q_rows, 1, dim, is_row, is_dim).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q_even), 1), tl.max(tl.abs(q_odd), 1))
        pe_even = q_even
        pe_odd = q_odd
        if IS_MLA:
            pe_even = _load_columns(q_ptr, q_rows, DIM, pe, is_row, is_pe).to(tl.float32)
            pe_odd = _load_columns(q_ptr, q_rows, DIM + 1, pe, is_row, is_pe).to(tl.float32)
            largest_pe = tl.maximum(tl.max(tl.abs(pe_even), 1), tl.max(tl.abs(pe_odd), 1))
            largest = tl.maximum(largest, largest_pe)
        q_scale = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, _LEAST_Q))))
        shrink_q = (1.0 / q_scale)[:, None]
        q_even = (q_even * shrink_q).to(tl.float16)
        q_odd = (q_odd * shrink_q).to(tl.float16)
        pe_even = (pe_even * shrink_q).to(tl.float16)
        pe_odd = (pe_odd * shrink_q).to(tl.float16)
        row_scale = (q_scale * pool_qk_scale)[:, None]
        top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        # Summed up after the last tile: warps that share a row would wait for each other in each.
        # Beside values as wide as those of MLA there are no registers for that.
        if IS_MLA:
            total = tl.zeros([BLOCK_ROWS], tl.float32)
        else:
            total = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
        acc_even = tl.zeros([BLOCK_ROWS, HALF_PAD], tl.float32)
        acc_odd = tl.zeros([BLOCK_ROWS, HALF_PAD], tl.float32)
        table = page_table_ptr + sequence.to(tl.int64) * page_table_stride

        for tile in tl.range(start, end, BLOCK_KEYS, num_stages=STAGES):
            position = tile + key
            is_key = position < end
            if IN_PAGE:
                page = tl.load(table + tile // PAGE_SIZE).to(tl.int64)
                place = tl.multiple_of(tile % PAGE_SIZE, BLOCK_KEYS) + key
            else:
                page = tl.load(table + position // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
                place = position % PAGE_SIZE
            pool_row = page * PAGE_SIZE + place
            k_pairs = tl.load(
                k_head_ptr + (pool_row * k_stride)[:, None] + dim[None, :],
                mask=is_key[:, None] & is_dim[None, :],
                other=0,
            )
            k_even, k_odd = _unpack(tl.trans(k_pairs), PTX)
            scores = tl.dot(q_even, k_even)
            scores = tl.dot(q_odd, k_odd, acc=scores)
            if IS_MLA:
                pe_pairs = tl.load(
                    k_head_ptr + (pool_row * k_stride)[:, None] + (HALF + pe)[None, :],
                    mask=is_key[:, None] & is_pe[None, :],
                    other=0,
                )
                k_even, k_odd = _unpack(tl.trans(pe_pairs), PTX)
                scores = tl.dot(pe_even, k_even, acc=scores)
                scores = tl.dot(pe_odd, k_odd, acc=scores)
                v_pairs = k_pairs
            else:
                v_pairs = tl.load(
                    v_head_ptr + (pool_row * v_stride)[:, None] + dim[None, :],
                    mask=is_key[:, None] & is_dim[None, :],
                    other=0,
                )
            scores *= row_scale
            v_scale = top
            if SCALES == 2:
                scale_row = page * (NUM_KV_HEADS * PAGE_SIZE) + place
                k_scale = _load_scales(k_scale_head_ptr, scale_row, is_key, IN_PAGE)
                scores *= k_scale[None, :]
                if IS_MLA:
                    v_scale = k_scale
                else:
                    v_scale = _load_scales(v_scale_head_ptr, scale_row, is_key, IN_PAGE)
                # Also past the last key, where a weight is 0 but a scale may be NaN.
                v_scale = tl.where(is_key & ~(v_scale < _LEAST_SCALE), v_scale, _LEAST_SCALE)
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            v_even, v_odd = _unpack(v_pairs, PTX)
            top, total, acc_even, acc_odd = _accumulate(
                scores,
                v_scale,
                v_even,
                v_odd,
                top,
                total,
                acc_even,
                acc_odd,
                SCALES == 2,
                not IS_MLA,
                PTX,
            )
        if not IS_MLA:
            total = tl.sum(total, 1)
        if SCALES == 1:
            acc_even *= tl.load(v_scale_ptr)
            acc_odd *= tl.load(v_scale_ptr)

        if HAS_WINDOW and tl.load(fields + 4) > 0:
            # The window is not quantised: products in the model's dtype, as for q as it is.
            exact_even = _load_columns(q_ptr, q_rows, 0, dim, is_row, is_dim)
            exact_odd = _load_columns(q_ptr, q_rows, 1, dim, is_row, is_dim)
            for tile in range(0, WINDOW, BLOCK_WINDOW):
                place = tile + tl.arange(0, BLOCK_WINDOW)
                in_window = place < WINDOW
                window_row = sequence.to(tl.int64) * WINDOW + place
                if IS_MLA:
                    k_rows = window_row * (DIM + PE)
                else:
                    k_rows = (window_row * NUM_KV_HEADS + kv_head) * DIM
                key_even = _load_columns(window_k_ptr, k_rows, 0, dim, in_window, is_dim)
                key_odd = _load_columns(window_k_ptr, k_rows, 1, dim, in_window, is_dim)
                scores = tl.dot(exact_even, tl.trans(key_even))
                scores = tl.dot(exact_odd, tl.trans(key_odd), acc=scores)
                if IS_MLA:
                    value_even = key_even
                    value_odd = key_odd
                    for odd in tl.static_range(2):
                        q_half = _load_columns(q_ptr, q_rows, DIM + odd, pe, is_row, is_pe)
                        k_half = _load_columns(
                            window_k_ptr, k_rows, DIM + odd, pe, in_window, is_pe
                        )
                        scores = tl.dot(q_half, tl.trans(k_half), acc=scores)
                else:
                    value_even = _load_columns(window_v_ptr, k_rows, 0, dim, in_window, is_dim)
                    value_odd = _load_columns(window_v_ptr, k_rows, 1, dim, in_window, is_dim)
                visible = in_window[None, :]
                if CAUSAL:
                    visible = visible & (place[None, :] <= query[:, None])
                scores = tl.where(visible, scores * qk_scale, float("-inf"))
                top, total, acc_even, acc_odd = _accumulate(
                    scores,
                    top,
                    value_even,
                    value_odd,
                    top,
                    total,
                    acc_even,
                    acc_odd,
                    False,
                    False,
                    PTX,
                )

        has_keys = total > 0
        share = tl.where(has_keys, 1.0 / total, 0.0)
        lse = tl.where(has_keys, top * _LN2 + tl.log(total), float("-inf"))
        # A row whose scores are NaN must not pass for one without keys.
        share = tl.where(total == total, share, total)[:, None]
        lse = tl.where(total == total, lse, total)
        owner = tl.where(slot < 0, sequence, slot).to(tl.int64)
        out_rows = owner * (WINDOW * NUM_HEADS) + row_offset
        offsets = out_rows[:, None] * DIM + 2 * dim[None, :]
        is_out = is_row[:, None] & is_dim[None, :]
        if slot < 0:
            dtype: tl.constexpr = out_ptr.dtype.element_ty
            tl.store(out_ptr + offsets, (acc_even * share).to(dtype), mask=is_out)
            tl.store(out_ptr + offsets + 1, (acc_odd * share).to(dtype), mask=is_out)
            tl.store(lse_ptr + out_rows, lse, mask=is_row)
        else:
            tl.store(part_out_ptr + offsets, acc_even * share, mask=is_out)
            tl.store(part_out_ptr + offsets + 1, acc_odd * share, mask=is_out)
            tl.store(part_lse_ptr + out_rows, lse, mask=is_row)
