"""Decode and verify captured once in CUDA graphs and replayed for steps of other lengths.

Ranks of a DCP group are looped over in one process and merged by their lse in float64. In every
step all pool rows that no sequence of the step has are NaN, page ids past a sequence's pages are
huge, so that whatever a replay keeps from an earlier step shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attention.backends.triton_backend import TritonBackend
from attention.dcp import DcpAttention, DecodePlan
from attention.decode_buffers import DecodeBuffers
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

SEED = 20261130
HUGE_PAGE = 2**31 - 1
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
MAX_LEN, PAGE_SIZE, BATCH_SIZES = 20000, 64, (6, 2)
NUM_STEPS = 30


@dataclass(frozen=True)
class Case:
    is_mla: bool
    window: int
    dcp_size: int
    heads: int = 16
    fp8: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        kind = "mla" if self.is_mla else "gqa"
        marks = ("-fp8" if self.fp8 else "") + ("-deterministic" if self.deterministic else "")
        return f"{kind}-h{self.heads}-w{self.window}-c{self.dcp_size}{marks}"

    @property
    def num_kv_heads(self) -> int:
        return 1 if self.is_mla else 4

    @property
    def key_width(self) -> int:
        return 576 if self.is_mla else 128

    @property
    def value_width(self) -> int:
        return 512 if self.is_mla else 128


CASES = [
    *(Case(is_mla, window, c) for is_mla in (True, False) for window in (1, 4) for c in (1, 2)),
    Case(is_mla=True, window=1, dcp_size=1, heads=64),
    Case(is_mla=True, window=4, dcp_size=2, fp8=True),
    Case(is_mla=False, window=1, dcp_size=2, fp8=True),
    Case(is_mla=True, window=1, dcp_size=2, deterministic=True),
    Case(is_mla=False, window=4, dcp_size=1, deterministic=True),
]


@dataclass
class Step:
    """lengths: before the window, 0 is padding."""

    lengths: list[int]
    table: Tensor
    batch: DecodeBatch


class _Member:
    """A rank whose collectives are not called."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Captured:
    """One rank's kernel of one batch size in a graph, with the tensors that it reads."""

    def __init__(self, case: Case, layer: DcpAttention, buffers: DecodeBuffers, pool: Tensor):
        self.case, self.layer, self.buffers, self.pool = case, layer, buffers, pool
        num_tokens = buffers.batch_size * case.window
        self.q = torch.randn(num_tokens, case.heads, case.key_width, device=DEVICE, dtype=DTYPE)
        self.window = torch.randn(
            num_tokens, case.num_kv_heads, case.key_width, device=DEVICE, dtype=DTYPE
        )

    def plan(self, step: Step) -> DecodePlan:
        return self.layer.plan_decode(step.batch, DEVICE, into=self.buffers)

    def call(self, plan: DecodePlan) -> AttentionResult:
        window = self.window if self.case.window > 1 else None
        if self.case.is_mla:
            latent = None if window is None else window[:, 0]
            return plan.kernel.mla(self.q, MLACache(self.pool[:, :, 0]), latent)
        # Keys are their own values here.
        return plan.kernel.gqa(self.q, GQACache(self.pool, self.pool), window, window)

    def capture(self, step: Step) -> None:
        plan = self.plan(step)
        self.call(plan)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.call(plan)


class Rank:
    """One rank: its layer, its pool, and a graph for each batch size, the largest first."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        geometry: GQAGeometry | MLAGeometry = GQAGeometry(128, 128**-0.5)
        if case.is_mla:
            geometry = MLAGeometry(512, 128, 64, 128, 576**-0.5)
        self.stripe = StripeLayout(case.dcp_size, rank, PAGE_SIZE)
        layer = DcpAttention(
            geometry=geometry,
            stripe=self.stripe,
            heads=HeadLayout(case.heads, case.num_kv_heads, case.dcp_size, rank, case.dcp_size),
            group=_Member(rank, case.dcp_size),
            backend=TritonBackend(deterministic=case.deterministic),
            exchange=AgRsExchange(),
            q_mode="replicate",
        )
        rows = (num_pages(case) * PAGE_SIZE, case.num_kv_heads, case.key_width)
        self.rows = torch.randn(*rows, device=DEVICE, dtype=DTYPE)
        kv_dtype = torch.float8_e4m3fn if case.fp8 else DTYPE
        self.rows = self.rows.to(kv_dtype).to(DTYPE)
        self.pool = torch.empty(
            num_pages(case), PAGE_SIZE, *rows[1:], device=DEVICE, dtype=kv_dtype
        )
        self.captured = {
            batch_size: Captured(
                case,
                layer,
                layer.decode_buffers(
                    batch_size=batch_size,
                    max_len=MAX_LEN,
                    window=case.window,
                    window_mask="causal",
                    dtype=DTYPE,
                    kv_dtype=kv_dtype,
                    device=DEVICE,
                ),
                self.pool,
            )
            for batch_size in BATCH_SIZES
        }

    def row_ids(self, step: Step, b: int) -> Tensor:
        index = torch.arange(self.stripe.local_length(step.lengths[b]))
        pages = step.table[b, index // PAGE_SIZE].long()
        return (pages * PAGE_SIZE + index % PAGE_SIZE).to(DEVICE)

    def poison_all_but(self, step: Step) -> None:
        used = torch.zeros(len(self.rows), dtype=torch.bool, device=DEVICE)
        for b in range(len(step.lengths)):
            used[self.row_ids(step, b)] = True
        live = self.rows.masked_fill(~used[:, None, None], float("nan"))
        self.pool.copy_(live.view(self.pool.shape))


def num_pages(case: Case) -> int:
    return 1 + max(BATCH_SIZES) * (-(-(MAX_LEN + 1) // (PAGE_SIZE * case.dcp_size)))


def steps(case: Case) -> list[Step]:
    """Two sizes in turn; long after short and short after long, with padding rows."""
    generator = random.Random(SEED)
    edges = (0, 1, case.dcp_size + 1, PAGE_SIZE * case.dcp_size, 129, 4097, MAX_LEN)
    made = []
    for i in range(NUM_STEPS):
        batch_size = BATCH_SIZES[i % 2]
        longest = MAX_LEN if i // 2 % 2 else 300
        lengths = [
            min(longest, generator.choice((generator.randint(1, longest), *edges)))
            for _ in range(batch_size)
        ]
        if not any(lengths):
            lengths[0] = longest
        counts = [-(-length // (PAGE_SIZE * case.dcp_size)) for length in lengths]
        order = list(range(1, num_pages(case)))
        generator.shuffle(order)
        table = torch.full((batch_size, max(counts) + 3), HUGE_PAGE, dtype=torch.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = torch.tensor(order[:count], dtype=torch.int32)
            del order[:count]
        in_hand = case.window if case.window > 1 else 0
        totals = torch.tensor([n + in_hand if n else 0 for n in lengths], dtype=torch.int32)
        made.append(Step(lengths, table, DecodeBatch(totals, table, case.window)))
    return made


def oracle(case: Case, ranks: list[Rank], step: Step, b: int) -> tuple[Tensor, Tensor]:
    """float64 out [w, H, Dv] and lse [w, H] of sequence b; keys of all ranks in any order."""
    captured = ranks[0].captured[len(step.lengths)]
    own = slice(b * case.window, (b + 1) * case.window)
    keys = torch.cat([rank.rows[rank.row_ids(step, b)] for rank in ranks])
    hidden = torch.zeros(case.window, len(keys), dtype=torch.bool, device=DEVICE)
    if case.window > 1:
        keys = torch.cat([keys, captured.window[own]])
        later = torch.ones(case.window, case.window, dtype=torch.bool, device=DEVICE).triu_(1)
        hidden = torch.cat([hidden, later], 1)
    group = case.heads // case.num_kv_heads
    keys = keys.double().repeat_interleave(group, dim=1)
    q = captured.q[own].double()
    scores = torch.einsum("whd,khd->whk", q, keys) * case.key_width**-0.5
    scores.masked_fill_(hidden[:, None], float("-inf"))
    out = torch.einsum("whk,khd->whd", scores.softmax(-1), keys[..., : case.value_width])
    return out, scores.logsumexp(-1)


def check(case: Case, ranks: list[Rank], step: Step, parts: list[AttentionResult]) -> None:
    for b, length in enumerate(step.lengths):
        own = slice(b * case.window, (b + 1) * case.window)
        mine = [AttentionResult(part.out[own].double(), part.lse[own].double()) for part in parts]
        if length == 0:
            assert all(bool((part.out == 0).all()) for part in mine)
            assert all(bool((part.lse == float("-inf")).all()) for part in mine)
            continue
        lse = torch.logsumexp(torch.stack([part.lse for part in mine]), 0)
        out = sum(torch.exp(part.lse - lse)[..., None] * part.out for part in mine)
        expected, expected_lse = oracle(case, ranks, step, b)
        error = float(((out - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        assert error <= 5e-3, f"sequence {b} of {length}: {error}"
        assert float((lse - expected_lse).abs().max()) <= 2e-3, f"sequence {b} of {length}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replay_computes_the_step_that_was_planned_last(case: Case) -> None:
    torch.manual_seed(SEED)
    ranks = [Rank(case, rank) for rank in range(case.dcp_size)]
    for size in BATCH_SIZES:
        # All ranks share q and the window, as a replicated q is.
        for rank in ranks[1:]:
            rank.captured[size].q = ranks[0].captured[size].q
            rank.captured[size].window = ranks[0].captured[size].window
    todo = steps(case)
    for rank in ranks:
        for step in todo[:2]:
            rank.captured[len(step.lengths)].capture(step)
    for number, step in enumerate(todo):
        parts = []
        for rank in ranks:
            rank.poison_all_but(step)
            captured = rank.captured[len(step.lengths)]
            plan = captured.plan(step)
            captured.graph.replay()
            parts.append(AttentionResult(*(part.clone() for part in captured.result)))
            eager = captured.call(plan)
            assert torch.equal(eager.out, parts[-1].out), f"step {number}"
            assert torch.equal(eager.lse, parts[-1].lse), f"step {number}"
        check(case, ranks, step, parts)
