"""Runs the triton backend's kernels in Triton's interpreter and prints what they got, as JSON.

A program of its own because TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from attention.backends.triton_backend import TritonBackend
from attention.interface import AttentionResult, DecodeBatch, GQACache, MLACache
from attention.layout import StripeLayout
from attention.reference import attend, merge, window_visibility
from attention.rows import decode_rows
from tools.quantised_rows import pool_scale, quantise

DEVICE = torch.device("cpu")
HUGE_PAGE = 2**31 - 1


@dataclass(frozen=True)
class Case:
    name: str
    num_heads: int
    num_kv_heads: int  # 0: MLA
    width: int
    rope: int
    lengths: tuple[int, ...]
    dcp_size: int
    page_size: int
    interleave: int = 1
    window: int = 1
    mask: str = "causal"
    dtype: str = "float32"
    deterministic: bool = False
    kv: str = "same"  # or float8 with a scale "per tensor" or "per token"


CASES = (
    Case("mla decode", 16, 0, 64, 16, (130, 0, 1, 64), 2, 16),
    Case("mla decode, more rows than a block", 40, 0, 64, 16, (70, 9), 3, 64),
    Case("mla verify", 4, 0, 64, 16, (130, 0, 7), 2, 4, window=3),
    Case("mla verify, full window", 4, 0, 64, 16, (130, 0, 7), 3, 1, window=3, mask="full"),
    Case("gqa decode", 9, 3, 64, 0, (130, 0, 7), 2, 4),
    Case("gqa decode, uneven groups", 9, 4, 32, 0, (130, 0, 7), 3, 4, interleave=2),
    Case("gqa decode, width of no power of two", 6, 3, 24, 0, (50, 3), 2, 128),
    Case("mqa decode, half precision", 8, 1, 64, 0, (300, 2), 2, 16, dtype="float16"),
    Case("gqa verify, window of two tiles", 8, 2, 32, 0, (90, 0, 20), 2, 16, window=18),
    Case("gqa decode, deterministic", 4, 2, 32, 0, (1100, 40), 2, 16, deterministic=True),
    Case("mla decode, fp8", 16, 0, 64, 16, (130, 0, 9), 2, 16, kv="per tensor"),
    Case("mla verify, fp8", 6, 0, 64, 16, (130, 0, 9), 3, 64, window=3, kv="per token"),
    Case("mla verify, fp8 in one scale", 4, 0, 32, 16, (70, 9), 2, 4, window=2, kv="per tensor"),
    Case("gqa decode, fp8", 9, 3, 64, 0, (130, 0, 7), 3, 4, kv="per token"),
    Case(
        "gqa decode, fp8, half precision",
        8,
        2,
        32,
        0,
        (200, 3),
        2,
        128,
        dtype="float16",
        kv="per token",
    ),
    Case(
        "mla decode, fp8 in pairs",
        20,
        0,
        64,
        16,
        (130, 0, 9),
        2,
        16,
        dtype="float16",
        kv="per token",
    ),
    Case(
        "mla verify, fp8 in pairs",
        5,
        0,
        48,
        16,
        (70, 0, 19),
        3,
        64,
        window=3,
        dtype="float16",
        kv="per tensor",
    ),
    Case(
        "gqa verify, fp8 in pairs",
        9,
        4,
        24,
        0,
        (90, 0, 20),
        2,
        4,
        2,
        18,
        "full",
        "float16",
        kv="per token",
    ),
    Case("gqa verify, fp8", 8, 2, 32, 0, (90, 0, 20), 2, 16, window=4, kv="per tensor"),
    # Fewer programs than tiles.
    Case("gqa decode, long", 9, 8, 32, 0, (900, 70), 1, 64, dtype="float16"),
    Case("gqa decode, fp8, long", 9, 8, 32, 0, (900, 70), 1, 64, dtype="float16", kv="per token"),
)


def stripes(case: Case, rows: list[Tensor], table: Tensor, rank: int) -> Tensor:
    """The rank's pool: its committed rows, everything else NaN."""
    pool = torch.full((64, case.page_size, *rows[0].shape[1:]), float("nan")).to(rows[0].dtype)
    if case.page_size == 1:
        pool = torch.full((256, 1, *rows[0].shape[1:]), float("nan")).to(rows[0].dtype)
    for sequence, tokens in zip(table.tolist(), rows, strict=True):
        committed = len(tokens)
        if case.kv == "same" and case.window > 1:
            committed -= case.window
        owned = [
            position
            for position in range(max(0, committed))
            if position // case.interleave % case.dcp_size == rank
        ]
        for index, position in enumerate(owned):
            pool[sequence[index // case.page_size], index % case.page_size] = tokens[position]
    return pool


def stored(case: Case, rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What the pool keeps of each sequence, its scales, and the true rows, the window's as given.

    The first sequence has scales per token with which weights vanish in half precision.
    """
    if case.kv == "same":
        return rows, [], rows
    window = case.window if case.window > 1 else 0
    parts = [
        quantise(r[: len(r) - window], case.kv, factor=1.0 if b else 2.0**-6)
        for b, r in enumerate(rows)
    ]
    true = [
        torch.cat([part.values, r[len(part.values) :].double()])
        for part, r in zip(parts, rows, strict=True)
    ]
    return [part.stored for part in parts], [part.scale[..., None] for part in parts], true


def pool_and_scale(
    case: Case, rows: list[Tensor], scales: list[Tensor], table: Tensor, rank: int
) -> tuple[Tensor, Tensor | None]:
    if case.kv == "same":
        return stripes(case, rows, table, rank), None
    pool = stripes(case, rows, table, rank).to(torch.float8_e4m3fn)
    return pool, pool_scale(stripes(case, scales, table, rank)[..., 0], case.kv)


def page_table(case: Case) -> Tensor:
    tokens = case.page_size * case.dcp_size
    counts = [-(-length // tokens) for length in case.lengths]
    order = 1 + torch.randperm(sum(counts))
    table = torch.full((len(counts), max(counts) + 1), HUGE_PAGE, dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    return table


def run(case: Case) -> dict[str, object]:
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    is_mla, window = case.num_kv_heads == 0, case.window
    num_kv_heads = max(1, case.num_kv_heads)
    key_width = case.width + case.rope
    keys = [torch.randn(n, num_kv_heads, key_width).to(dtype) for n in case.lengths]
    values = [
        key[..., : case.width] if is_mla else torch.randn(key.shape).to(dtype) for key in keys
    ]
    q = torch.randn(len(keys) * window, case.num_heads, key_width).to(dtype)
    kv_index = tuple(h * num_kv_heads // case.num_heads for h in range(case.num_heads))
    stored_keys, key_scales, true_keys = stored(case, keys)
    stored_values, value_scales, true_values = stored(case, values)
    if is_mla:
        true_values = [key[..., : case.width] for key in true_keys]
    scale, table = key_width**-0.5, page_table(case)
    backend = TritonBackend(deterministic=case.deterministic)
    batch = DecodeBatch(torch.tensor(case.lengths, dtype=torch.int32), table, window, case.mask)
    poison = torch.full((window, num_kv_heads, key_width), float("nan")).to(dtype)
    parts = []
    for rank in range(case.dcp_size):
        stripe = StripeLayout(case.dcp_size, rank, case.page_size, case.interleave)
        kernel = backend.plan_decode(
            decode_rows(batch, stripe),
            kv_index=kv_index,
            scale=scale,
            value_width=case.width,
            device=DEVICE,
        )
        pool, key_scale = pool_and_scale(case, stored_keys, key_scales, table, rank)
        in_hand = torch.cat([k[-window:] if len(k) else poison for k in keys])
        if is_mla:
            if key_scale is not None and key_scale.dim() == 3:
                key_scale = key_scale[:, 0]
            cache = MLACache(pool[:, :, 0], key_scale)
            parts.append(kernel.mla(q, cache, in_hand[:, 0].contiguous()))
        else:
            value_pool, value_scale = pool_and_scale(case, stored_values, value_scales, table, rank)
            values_in_hand = torch.cat([v[-window:] if len(v) else poison for v in values])
            gqa_cache = GQACache(pool, value_pool, key_scale, value_scale)
            parts.append(kernel.gqa(q, gqa_cache, in_hand, values_in_hand))
    return compare(case, q, true_keys, true_values, parts, kv_index, scale)


def compare(
    case: Case,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    parts: list[AttentionResult],
    kv_index: tuple[int, ...],
    scale: float,
) -> dict[str, object]:
    """Largest errors over rows with keys; whether rows without any are (0, -inf)."""
    error = lse_error = 0.0
    empties_are_empty = True
    for b, (key, value) in enumerate(zip(keys, values, strict=True)):
        rows = slice(b * case.window, (b + 1) * case.window)
        mine = [AttentionResult(part.out[rows], part.lse[rows]) for part in parts]
        got = merge(mine)
        if len(key) == 0:
            empties_are_empty &= all(
                bool((part.out == 0).all() and (part.lse == float("-inf")).all()) for part in mine
            )
            continue
        visible = window_visibility(case.window, len(key), case.mask)
        want = attend(q[rows], key, value, scale=scale, kv_index=kv_index, visible=visible)
        rows_error = (got.out - want.out).norm(dim=-1) / want.out.norm(dim=-1)
        error = max(error, largest(rows_error))
        lse_error = max(lse_error, largest((got.lse - want.lse).abs()))
    return {
        **asdict(case),
        "error": error,
        "lse_error": lse_error,
        "empties_are_empty": empties_are_empty,
    }


def largest(errors: Tensor) -> float:
    """Infinite if one is NaN, which max() would pass over."""
    return float(errors.nan_to_num(nan=torch.inf).max())


if __name__ == "__main__":
    sys.stdout.write(json.dumps([run(case) for case in CASES]) + "\n")
