# mypy: ignore-errors
"""Triton kernels: causal attention over [prefix | chunk] for GQA and expanded MLA, and its merge.

Imported only by the triton backend, and only where triton is installed. Symbols as in
attention.interface. A row is one (query of the chunk, query head) pair of a KV head, r = query * G
+ head, G the most query heads that any KV head has, so that the heads of a group share their keys
and a short chunk still fills a tile. A tile is BLOCK_ROWS rows. Partial results have base-2 lse.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Fields of a piece and of a merge, see extend_schedule.
_FIELDS = tl.constexpr(8)


@triton.jit
def _load_rows(
    ptr, stride, num_rows, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED
):
    """[BLOCK, PAD] rows from ptr on: 0 past WIDTH and, if MASKED, in rows past num_rows."""
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, PAD)
    places = ptr + row[:, None] * stride + column[None, :]
    if WIDTH != PAD:
        is_column = column < WIDTH
        if MASKED:
            tile = tl.load(places, mask=(row < num_rows)[:, None] & is_column[None, :], other=0.0)
        else:
            tile = tl.load(places, mask=is_column[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(places, mask=(row < num_rows)[:, None], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def _attend(
    q,
    q_pe,
    top,
    total,
    acc,
    k_ptr,  # this head's column of the range's first row; so are v_ptr and pe_ptr
    v_ptr,
    pe_ptr,
    k_tiles,  # descriptors of all rows and heads; read with TMA only, as the places that follow
    v_tiles,
    pe_tiles,
    first_row,
    k_column,
    v_column,
    k_stride,
    v_stride,
    pe_stride,
    start,
    end,  # keys of the range
    limit,  # [rows], read with MASKED only: the first key that a row does not see
    qk_scale,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PE: tl.constexpr,
    PE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over keys [start, end). Every row sees a key in its first tile of keys."""
    for tile in tl.range(start, end, BLOCK_KEYS, num_stages=STAGES):
        if TMA:
            k = k_tiles.load([first_row + tile, k_column])
            v = v_tiles.load([first_row + tile, v_column])
            if MASKED:
                # Rows behind the range are another sequence's; what they hold must not count.
                is_key = tl.arange(0, BLOCK_KEYS) < end - tile
                v = tl.where(is_key[:, None], v, 0.0)
        else:
            k_rows = k_ptr + tl.cast(tile, tl.int64) * k_stride
            v_rows = v_ptr + tl.cast(tile, tl.int64) * v_stride
            k = _load_rows(k_rows, k_stride, end - tile, BLOCK_KEYS, DIM, DIM_PAD, MASKED)
            v = _load_rows(v_rows, v_stride, end - tile, BLOCK_KEYS, VALUE, VALUE_PAD, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if PE > 0:
            if TMA:
                k_pe = pe_tiles.load([first_row + tile, 0])
            else:
                pe_rows = pe_ptr + tl.cast(tile, tl.int64) * pe_stride
                k_pe = _load_rows(pe_rows, pe_stride, end - tile, BLOCK_KEYS, PE, PE_PAD, MASKED)
            scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores, input_precision="ieee")
        if MASKED:
            key = tile + tl.arange(0, BLOCK_KEYS)
            scores = tl.where(key[None, :] < limit[:, None], scores, float("-inf"))
        # qk_scale is positive. A maximum passes over NaN, but the weights then are NaN.
        new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
        weights = tl.exp2(scores * qk_scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc=acc, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit(
    do_not_specialize=["num_pieces", "heads_together", "num_heads", "num_kv_heads", "group"]
)
def extend_attention(
    q_ptr,  # [T, Hl, DIM + PE]
    out_ptr,  # [T, Hl, VALUE]
    part_out_ptr,  # [slots, KV heads, BLOCK_ROWS, VALUE] float32
    part_lse_ptr,  # [slots, KV heads, BLOCK_ROWS] float32
    pieces_ptr,  # [pieces, 8] int32, see extend_schedule
    head_starts_ptr,  # [KV heads + 1] int32, first query head of each KV head
    prefix_k_ptr,  # [S, KV heads, DIM]
    prefix_v_ptr,  # [S, KV heads, VALUE]
    prefix_pe_ptr,  # [S, PE], read if PE > 0; as columns DIM.. of the keys of every head
    chunk_k_ptr,  # as the prefix's, but [T, ...]
    chunk_v_ptr,
    chunk_pe_ptr,
    prefix_k_tiles,  # the same six as descriptors; read with TMA only
    prefix_v_tiles,
    prefix_pe_tiles,
    chunk_k_tiles,
    chunk_v_tiles,
    chunk_pe_tiles,
    q_stride,  # elements between tokens, then between heads
    q_head_stride,
    prefix_k_stride,
    prefix_k_head_stride,
    prefix_v_stride,
    prefix_v_head_stride,
    prefix_pe_stride,
    chunk_k_stride,
    chunk_k_head_stride,
    chunk_v_stride,
    chunk_v_head_stride,
    chunk_pe_stride,
    qk_scale,  # positive, for base-2 exponentials
    num_pieces,
    heads_together,  # divides num_kv_heads
    num_heads,
    num_kv_heads,
    group,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PE: tl.constexpr,
    PE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CARRIES: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: one piece for one KV head: a tile of rows over some of its keys.

    Grid: pieces * KV heads. Programs that run together work on heads_together heads, so that their
    keys stay in L2; pieces with most keys come first. CARRIES: some piece continues a partial
    result.
    """
    program = tl.program_id(0)
    wave = num_pieces * heads_together
    kv_head = program // wave * heads_together + program % heads_together
    fields = pieces_ptr + program % wave // heads_together * _FIELDS
    token = tl.load(fields).to(tl.int64)
    chunk_len = tl.load(fields + 1)
    first_row = tl.load(fields + 2)
    prefix_start = tl.load(fields + 3)
    prefix_len = tl.load(fields + 4)
    adds_chunk = tl.load(fields + 5)
    slot_in = tl.load(fields + 6)
    slot_out = tl.load(fields + 7)

    place = tl.arange(0, BLOCK_ROWS)
    first_query = first_row // group
    query = (first_row + place) // group
    first_head = tl.load(head_starts_ptr + kv_head)
    head = (first_row + place) % group
    is_row = (query < chunk_len) & (first_head + head < tl.load(head_starts_ptr + kv_head + 1))
    dim = tl.arange(0, DIM_PAD)
    value = tl.arange(0, VALUE_PAD)
    is_out = is_row[:, None] & (value < VALUE)[None, :]
    q_rows = q_ptr + (token + first_query) * q_stride + first_head * q_head_stride
    q_places = q_rows + ((query - first_query) * q_stride + head * q_head_stride)[:, None]
    q = tl.load(q_places + dim[None, :], mask=is_row[:, None] & (dim < DIM)[None, :], other=0.0)
    q_pe = q
    if PE > 0:
        pe = tl.arange(0, PE_PAD)
        q_pe = tl.load(
            q_places + (DIM + pe)[None, :], mask=is_row[:, None] & (pe < PE)[None, :], other=0.0
        )

    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, VALUE_PAD], tl.float32)
    if CARRIES:
        # A normalised partial result is the state of one key that weighs exp2(lse).
        carries = (slot_in + tl.zeros([BLOCK_ROWS], tl.int32)) >= 0
        rows = (slot_in.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_ROWS + place
        top = tl.load(part_lse_ptr + rows, mask=carries, other=float("-inf"))
        total = tl.where(carries, total + 1.0, total)
        acc = tl.load(
            part_out_ptr + rows[:, None] * VALUE + value[None, :],
            mask=carries[:, None] & (value < VALUE)[None, :],
            other=0.0,
        )

    k = prefix_k_ptr + prefix_start.to(tl.int64) * prefix_k_stride + kv_head * prefix_k_head_stride
    v = prefix_v_ptr + prefix_start.to(tl.int64) * prefix_v_stride + kv_head * prefix_v_head_stride
    pe_rows = prefix_pe_ptr + prefix_start.to(tl.int64) * prefix_pe_stride
    unmasked_end = prefix_len // BLOCK_KEYS * BLOCK_KEYS
    limit = tl.zeros([BLOCK_ROWS], tl.int32) + prefix_len
    for part in tl.static_range(2):
        top, total, acc = _attend(
            q,
            q_pe,
            top,
            total,
            acc,
            k,
            v,
            pe_rows,
            prefix_k_tiles,
            prefix_v_tiles,
            prefix_pe_tiles,
            prefix_start,
            kv_head * prefix_k_head_stride,
            kv_head * prefix_v_head_stride,
            prefix_k_stride,
            prefix_v_stride,
            prefix_pe_stride,
            0 if part == 0 else unmasked_end,
            unmasked_end if part == 0 else prefix_len,
            limit,
            qk_scale,
            DIM,
            DIM_PAD,
            PE,
            PE_PAD,
            VALUE,
            VALUE_PAD,
            BLOCK_KEYS,
            part == 1,
            TMA,
            STAGES,
        )

    k = chunk_k_ptr + token * chunk_k_stride + kv_head * chunk_k_head_stride
    v = chunk_v_ptr + token * chunk_v_stride + kv_head * chunk_v_head_stride
    pe_rows = chunk_pe_ptr + token * chunk_pe_stride
    # Every row of the tile sees the keys up to its first query.
    unmasked_end = (first_query + 1) // BLOCK_KEYS * BLOCK_KEYS * adds_chunk
    last_query = (first_row + BLOCK_ROWS - 1) // group
    chunk_end = tl.minimum(chunk_len, last_query + 1) * adds_chunk
    for part in tl.static_range(2):
        top, total, acc = _attend(
            q,
            q_pe,
            top,
            total,
            acc,
            k,
            v,
            pe_rows,
            chunk_k_tiles,
            chunk_v_tiles,
            chunk_pe_tiles,
            token.to(tl.int32),
            kv_head * chunk_k_head_stride,
            kv_head * chunk_v_head_stride,
            chunk_k_stride,
            chunk_v_stride,
            chunk_pe_stride,
            0 if part == 0 else unmasked_end,
            unmasked_end if part == 0 else chunk_end,
            query + 1,
            qk_scale,
            DIM,
            DIM_PAD,
            PE,
            PE_PAD,
            VALUE,
            VALUE_PAD,
            BLOCK_KEYS,
            part == 1,
            TMA,
            STAGES,
        )

    # Every piece has keys; a total of NaN stays one.
    acc = acc / total[:, None]
    if slot_out < 0:
        out_rows = out_ptr + ((token + first_query) * num_heads + first_head) * VALUE
        out_places = ((query - first_query) * num_heads + head) * VALUE
        tl.store(
            out_rows + out_places[:, None] + value[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=is_out,
        )
    else:
        rows = (slot_out.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_ROWS + place
        tl.store(
            part_out_ptr + rows[:, None] * VALUE + value[None, :],
            acc,
            mask=(value < VALUE)[None, :],
        )
        tl.store(part_lse_ptr + rows, top + tl.log2(total))


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads", "group"])
def merge_pieces(
    out_ptr,  # [T, Hl, VALUE]
    part_out_ptr,  # [slots, KV heads, BLOCK_ROWS, VALUE] float32
    part_lse_ptr,  # [slots, KV heads, BLOCK_ROWS] float32
    merges_ptr,  # [merges, 8] int32, see extend_schedule
    head_starts_ptr,  # [KV heads + 1] int32
    num_heads,
    num_kv_heads,
    group,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS rows of a tile of one KV head, over the tile's slots.

    Grid: (merges, KV heads, BLOCK_ROWS // ROWS).
    """
    fields = merges_ptr + tl.program_id(0) * _FIELDS
    token = tl.load(fields).to(tl.int64)
    chunk_len = tl.load(fields + 1)
    first_row = tl.load(fields + 2)
    first_slot = tl.load(fields + 3)
    end_slot = tl.load(fields + 4)
    kv_head = tl.program_id(1)
    place = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    query = (first_row + place) // group
    head = tl.load(head_starts_ptr + kv_head) + (first_row + place) % group
    is_row = (query < chunk_len) & (head < tl.load(head_starts_ptr + kv_head + 1))
    value = tl.arange(0, VALUE_PAD)
    is_value = value < VALUE

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for slot in range(first_slot, end_slot):
        rows = (tl.cast(slot, tl.int64) * num_kv_heads + kv_head) * BLOCK_ROWS + place
        lse = tl.load(part_lse_ptr + rows)
        part = tl.load(
            part_out_ptr + rows[:, None] * VALUE + value[None, :],
            mask=is_value[None, :],
            other=0.0,
        )
        # Slots always hold keys, so a maximum is finite unless scores were not.
        new_top = tl.maximum(top, lse)
        weight = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        top = new_top
    acc = acc / total[:, None]
    out_rows = (token + query) * num_heads + head
    tl.store(
        out_ptr + out_rows[:, None] * VALUE + value[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_value[None, :],
    )


def row_tiles(tensor: torch.Tensor, num_rows: int) -> TensorDescriptor:
    """Descriptor of tiles of num_rows rows of one head; tensor [n, Hk, D] or [n, D]."""
    width = tensor.shape[-1]
    columns = width if tensor.dim() == 2 else (tensor.shape[1] - 1) * tensor.stride(1) + width
    return TensorDescriptor(
        tensor, [tensor.shape[0], columns], [tensor.stride(0), 1], [num_rows, width]
    )
