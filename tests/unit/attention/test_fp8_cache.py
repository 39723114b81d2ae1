"""Pools in float8_e4m3fn through the torch backend, against attention over their true values."""

from __future__ import annotations

import pytest
import torch

from attention import reference
from attention.backends.torch_backend import TorchBackend
from attention.dcp import DcpAttention
from attention.exchanges.a2a import A2AExchange
from attention.interface import (
    AttentionResult,
    DecodeBatch,
    ExtendBatch,
    GQACache,
    GQAGeometry,
    LatentExpansion,
    MLACache,
    MLAGeometry,
)
from attention.layout import HeadLayout, StripeLayout
from attention.rows import decode_rows
from attention.stored_rows import StoredPool
from tools.quantised_rows import KINDS, pool_scale, quantise

FP8 = torch.float8_e4m3fn
LENGTHS = (300, 0, 9, 14)
KV_INDEX = (0, 0, 1, 1)
KV_HEADS = 2


def sequences(kind: str, heads: int, width: int, window: int = 0):
    """Stored rows, scales [L, heads, 1] and true rows of LENGTHS, each with `window` raw rows."""
    parts, true = [], []
    for length in LENGTHS:
        part = quantise(torch.randn(length, heads, width), kind)
        raw = torch.randn(window if length else 0, heads, width)
        parts.append(part)
        true.append(torch.cat([part.values, raw.double()]))
    return [p.stored for p in parts], [p.scale[..., None] for p in parts], true


def quantised_pools(stripe_rows, dcp_size, kind, stored, scales, page_size=4):
    """For each rank its pools in fp8 and their scales, and the page table."""
    layout = {"dcp_size": dcp_size, "page_size": page_size}
    pools, table = stripe_rows(stored, **layout)
    scale_pools, _ = stripe_rows(scales, **layout)
    return [
        (
            [pool.to(FP8) for pool in rank_pools],
            [pool_scale(pool[..., 0], kind) for pool in rank_scales],
        )
        for rank_pools, rank_scales in zip(pools, scale_pools, strict=True)
    ], table


def batch_of(table: torch.Tensor, window: int) -> DecodeBatch:
    in_hand = window if window > 1 else 0
    totals = [length + in_hand if length else 0 for length in LENGTHS]
    return DecodeBatch(torch.tensor(totals, dtype=torch.int32), table, window)


def in_hand_rows(true, window, dtype):
    rows = [
        r[n:].to(dtype) if len(r) else torch.full((window, *r.shape[1:]), torch.nan, dtype=dtype)
        for r, n in zip(true, LENGTHS, strict=True)
    ]
    return torch.cat(rows) if window > 1 else None


def check_decode(parts, q, keys, values, kv_index, window, limit):
    for b, (key, value) in enumerate(zip(keys, values, strict=True)):
        own = slice(b * window, (b + 1) * window)
        mine = [AttentionResult(part.out[own], part.lse[own]) for part in parts]
        if len(key) == 0:
            assert all(bool((part.out == 0).all()) for part in mine)
            continue
        visible = reference.window_visibility(window, len(key))
        want = reference.attend(q[own], key, value, scale=0.3, kv_index=kv_index, visible=visible)
        got = reference.merge(mine)
        error = (got.out - want.out).norm(dim=-1) / want.out.norm(dim=-1)
        assert float(error.max()) <= limit
        assert float((got.lse - want.lse).abs().max()) <= 10 * limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dcp_size", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("is_mla", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode(stripe_rows, kind, dcp_size, window, is_mla, dtype):
    torch.manual_seed(0)
    heads, width = (1, 24) if is_mla else (KV_HEADS, 16)
    in_hand = window if window > 1 else 0
    stored, scales, keys = sequences(kind, heads, width, in_hand)
    tensors = [sequences(kind, heads, width, in_hand)] if not is_mla else []
    values = tensors[0][2] if tensors else [key[..., :16] for key in keys]
    # Window rows are in the model's dtype, and so are those that the oracle sees.
    for rows in (keys, values):
        for r, n in zip(rows, LENGTHS, strict=True):
            r[n:] = r[n:].to(dtype).double()
    pools, table = quantised_pools(
        stripe_rows,
        dcp_size,
        kind,
        [stored, *(t[0] for t in tensors)],
        [scales, *(t[1] for t in tensors)],
    )
    q = torch.randn(len(LENGTHS) * window, 4, width).to(dtype)
    kv_index = (0,) * 4 if is_mla else KV_INDEX
    window_key, window_value = (
        in_hand_rows(keys, window, dtype),
        in_hand_rows(values, window, dtype),
    )
    parts = []
    for rank, (rank_pools, rank_scales) in enumerate(pools):
        kernel = TorchBackend().plan_decode(
            decode_rows(batch_of(table, window), StripeLayout(dcp_size, rank, 4)),
            kv_index=kv_index,
            scale=0.3,
            value_width=16,
            device=torch.device("cpu"),
        )
        if is_mla:
            scale = rank_scales[0][:, 0] if kind == "per token" else rank_scales[0]
            cache = MLACache(rank_pools[0][:, :, 0], scale)
            parts.append(kernel.mla(q, cache, None if window == 1 else window_key[:, 0]))
        else:
            parts.append(
                kernel.gqa(q, GQACache(*rank_pools, *rank_scales), window_key, window_value)
            )
    assert all(part.out.dtype == dtype for part in parts)
    check_decode(parts, q, keys, values, kv_index, window, 1e-5 if dtype == torch.float32 else 8e-3)


def extend_layer(group, geometry, num_kv_heads) -> DcpAttention:
    return DcpAttention(
        geometry=geometry,
        stripe=StripeLayout(group.size, group.rank, 4),
        heads=HeadLayout(4, num_kv_heads, group.size, group.rank, group.size),
        group=group,
        backend=TorchBackend(),
        exchange=A2AExchange(),
        q_mode="gather",
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dcp_size", [1, 2, 3])
@pytest.mark.parametrize("is_mla", [True, False])
def test_extend_reads_the_true_values_of_every_ranks_prefix(
    run_ranks, stripe_rows, kind, dcp_size, is_mla
):
    torch.manual_seed(1)
    chunk = 3
    heads, width = (1, 10 + 4) if is_mla else (KV_HEADS, 8)
    stored, scales, keys = sequences(kind, heads, width, chunk)
    others = [] if is_mla else [sequences(kind, heads, width, chunk)]
    pools, table = quantised_pools(
        stripe_rows,
        dcp_size,
        kind,
        [stored, *(t[0] for t in others)],
        [scales, *(t[1] for t in others)],
    )
    chunks = [chunk if length else 0 for length in LENGTHS]
    batch = ExtendBatch(list(LENGTHS), chunks, table)
    in_hand = [
        torch.cat([r[n:] for r, n in zip(rows, LENGTHS, strict=True)]).float()
        for rows in (keys, *(t[2] for t in others))
    ]
    q = torch.randn(sum(chunks), 4, 6 + 4 if is_mla else 8)
    expansion = LatentExpansion(torch.randn(4, 6, 10), torch.randn(4, 10, 5))

    def body(group):
        geometry = MLAGeometry(10, 6, 4, 5, 0.3) if is_mla else GQAGeometry(8, 0.3)
        layer = extend_layer(group, geometry, heads)
        plan = layer.plan_extend(batch, "cpu")
        rank_pools, rank_scales = pools[group.rank]
        mine = layer.own_heads(q)
        if is_mla:
            scale = rank_scales[0][:, 0] if kind == "per token" else rank_scales[0]
            cache = MLACache(rank_pools[0][:, :, 0], scale)
            return layer.mla_extend(mine, in_hand[0][:, 0], cache, expansion, plan)
        return layer.gqa_extend(mine, *in_hand, GQACache(*rank_pools, *rank_scales), plan)

    out = torch.cat(run_ranks(dcp_size, body), dim=1)
    for b, key in enumerate(keys):
        own = slice(sum(chunks[:b]), sum(chunks[: b + 1]))
        if chunks[b] == 0:
            continue
        visible = reference.window_visibility(chunk, len(key))
        if is_mla:
            want = reference.mla_expanded(q[own], key[:, 0], expansion, scale=0.3, visible=visible)
        else:
            want = reference.attend(
                q[own], key, others[0][2][b], scale=0.3, kv_index=KV_INDEX, visible=visible
            )
        torch.testing.assert_close(out[own].double(), want.out, rtol=1e-4, atol=1e-5)


def test_only_gathered_rows_are_dequantised():
    pages, scale = torch.randn(250, 4, 2, 8).to(FP8), torch.rand(250, 2, 4)
    true = pages.float() * scale.transpose(1, 2)[..., None]
    pool = StoredPool.of(pages, scale)
    few = pool.select(torch.tensor([7, 3]))
    assert few.rows.dtype == FP8
    assert few.values(torch.float32).shape == (2, 2, 8)
    assert torch.equal(few.values(torch.float32), true.flatten(0, 1)[[7, 3]])
    assert torch.equal(pool.narrow(8, 6).values(torch.float32), true.flatten(0, 1)[8:14])


@pytest.mark.parametrize("shape", [(2,), (5, 4), (5, 1, 4), (5, 4, 2)])
def test_scales_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="scale of shape"):
        StoredPool.of(torch.zeros(5, 4, 2, 8), torch.ones(shape))
