"""Plans steps into the same buffers, in Triton's interpreter, and prints the errors as JSON.

A program of its own because TRITON_INTERPRET must be set before triton is imported. Lengths grow
and shrink, and some plans grow where they are; every page table entry past a sequence's pages is
huge, also those that the buffers keep from the step before; rows of other ranks, stale rows and
rows of the window are NaN.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.backends.triton_backend import TritonBackend
from attention.dcp import DcpAttention, DecodePlan
from attention.exchanges.ag_rs import AgRsExchange
from attention.interface import (
    AttentionResult,
    DecodeBatch,
    GQACache,
    GQAGeometry,
    MLACache,
    MLAGeometry,
)
from attention.layout import HeadLayout, StripeLayout
from attention.reference import attend, merge, window_visibility

HUGE_PAGE = 2**31 - 1
MAX_LEN, PAGE_SIZE, BATCH_SIZE = 600, 16, 4
HEADS = 6

# Lengths before the window; 0 is padding. Long after short, short after long, all padding.
STEPS = ((3, 600, 0, 65), (0, 1, 2, 0), (599, 300, 64, 63), (0, 0, 0, 0), (40, 0, 0, 0))


@dataclass(frozen=True)
class Case:
    is_mla: bool
    dcp_size: int
    window: int
    deterministic: bool = False
    fp8: bool = False
    growth: int = 0


CASES = (
    Case(is_mla=True, dcp_size=1, window=1, growth=2),
    Case(is_mla=True, dcp_size=2, window=3),
    Case(is_mla=False, dcp_size=1, window=4, fp8=True),
    Case(is_mla=False, dcp_size=2, window=1),
    Case(is_mla=False, dcp_size=1, window=1, deterministic=True, growth=1),
)


class _Member:
    """A rank whose collectives are not called: kernels are, one rank after the other."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Rank:
    """One rank's layer, its buffers, and its pool, laid out token by token."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        geometry: GQAGeometry | MLAGeometry = GQAGeometry(32, 32**-0.5)
        if case.is_mla:
            geometry = MLAGeometry(32, 16, 16, 16, 48**-0.5)
        self.layer = DcpAttention(
            geometry=geometry,
            stripe=StripeLayout(case.dcp_size, rank, PAGE_SIZE),
            heads=HeadLayout(HEADS, 1 if case.is_mla else 3, case.dcp_size, rank, case.dcp_size),
            group=_Member(rank, case.dcp_size),
            backend=TritonBackend(deterministic=case.deterministic),
            exchange=AgRsExchange(),
            q_mode="replicate",
        )
        self.buffers = [
            self.layer.decode_buffers(
                batch_size=BATCH_SIZE + extra,
                max_len=MAX_LEN,
                window=case.window,
                window_mask="causal",
                dtype=torch.float32,
                kv_dtype=torch.float8_e4m3fn if case.fp8 else torch.float32,
                device="cpu",
                max_growth=case.growth,
            )
            for extra in (0, 2)
        ]

    def pool(self, rows: list[Tensor], lengths: list[int], table: Tensor) -> Tensor:
        pool = torch.full((180, PAGE_SIZE, *rows[0].shape[1:]), float("nan"))
        for tokens, length, pages in zip(rows, lengths, table.tolist(), strict=True):
            for index, position in enumerate(range(self.rank, length, self.case.dcp_size)):
                pool[pages[index // PAGE_SIZE], index % PAGE_SIZE] = tokens[position]
        return pool.to(torch.float8_e4m3fn) if self.case.fp8 else pool


def page_table(lengths: list[int], case: Case) -> Tensor:
    counts = [-(-(n + case.growth) // (PAGE_SIZE * case.dcp_size)) if n else 0 for n in lengths]
    table = torch.full((len(lengths), 60), HUGE_PAGE, dtype=torch.int32)
    for row, pages in zip(table, (1 + torch.randperm(sum(counts))).split(counts), strict=True):
        row[: len(pages)] = pages
    return table


def step_error(case: Case, ranks: list[Rank], lengths: list[int], which: int) -> float:
    """Largest error of a step that is planned into the buffers number `which`, and of those to
    which it grows."""
    table = page_table(lengths, case)
    # Decode counts its new token, which is in the pool; a padding row has none.
    in_hand = case.window if case.window > 1 else 0
    totals = torch.tensor([n + in_hand if n else 0 for n in lengths], dtype=torch.int32)
    batch = DecodeBatch(totals, table, case.window)
    plans = [rank.layer.plan_decode(batch, "cpu", into=rank.buffers[which]) for rank in ranks]
    errors = [forward_error(case, ranks, plans, lengths, table)]
    for grown in range(1, case.growth + 1):
        for rank in ranks:
            rank.buffers[which].grow()
        now = [n + grown if n else 0 for n in lengths]
        errors.append(forward_error(case, ranks, plans, now, table))
    return max(errors)


def forward_error(
    case: Case, ranks: list[Rank], plans: list[DecodePlan], lengths: list[int], table: Tensor
) -> float:
    window, heads = case.window, 1 if case.is_mla else 3
    in_hand = window if window > 1 else 0
    keys = [torch.randn(n + in_hand, heads, 48 if case.is_mla else 32) for n in lengths]
    if case.fp8:
        keys = [key.to(torch.float8_e4m3fn).float() for key in keys]
    values = [key[..., :32] if case.is_mla else key.flip(-1) for key in keys]
    q = torch.randn(len(lengths) * window, HEADS, keys[0].shape[-1])
    tail = [
        k[n:] if n else k.new_full((in_hand, *k.shape[1:]), torch.nan)
        for k, n in zip(keys, lengths, strict=True)
    ]
    window_key = torch.cat(tail) if in_hand else None
    parts = []
    for rank, plan in zip(ranks, plans, strict=True):
        pool = rank.pool(keys, lengths, table)
        if case.is_mla:
            latent = None if window_key is None else window_key[:, 0].contiguous()
            parts.append(plan.kernel.mla(q, MLACache(pool[:, :, 0]), latent))
        else:
            value = None if window_key is None else window_key.flip(-1)
            cache = GQACache(pool, pool.float().flip(-1).to(pool.dtype))
            parts.append(plan.kernel.gqa(q, cache, window_key, value))
    error = 0.0
    for b, length in enumerate(n + in_hand if n else 0 for n in lengths):
        rows = slice(b * window, (b + 1) * window)
        mine = [AttentionResult(part.out[rows], part.lse[rows]) for part in parts]
        if length == 0:
            assert all(bool((part.out == 0).all()) for part in mine)
            assert all(bool((part.lse == float("-inf")).all()) for part in mine)
            continue
        want = attend(
            q[rows],
            keys[b],
            values[b],
            scale=q.shape[-1] ** -0.5,
            kv_index=[h * heads // HEADS for h in range(HEADS)],
            visible=window_visibility(window, length),
        )
        got = merge(mine)
        rows_error = (got.out - want.out).norm(dim=-1) / want.out.norm(dim=-1)
        error = max(error, largest(rows_error), largest((got.lse - want.lse).abs()))
    return error


def largest(errors: Tensor) -> float:
    """Infinite if one is NaN, which max() would pass over."""
    return float(errors.nan_to_num(nan=torch.inf).max())


def run(case: Case) -> dict[str, object]:
    torch.manual_seed(0)
    ranks = [Rank(case, rank) for rank in range(case.dcp_size)]
    steps = [(list(step), 0) for step in STEPS]
    # The larger buffers in between, with padding rows.
    steps.insert(2, ([70, 5, 300, 1, 0, 0], 1))
    return {"case": str(case), "errors": [step_error(case, ranks, *step) for step in steps]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([run(case) for case in CASES]) + "\n")
