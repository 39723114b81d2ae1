"""The flashinfer backend on a GPU against float64 attention over the unstriped sequence.

Ranks of a DCP group are looped over in one process and merged by their lse in float64. Rows that a
rank does not own, rows of the window, page tails and page 0 are NaN, page ids past a sequence's
pages huge. The first case of each kernel waits for FlashInfer to compile it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from attention.accelerator import current_accelerator
from attention.backends.flashinfer_backend import FlashInferBackend
from attention.dispatch import AttentionNeeds, choose
from attention.interface import (
    AttentionResult,
    DecodeBatch,
    GQACache,
    GQAGeometry,
    MLACache,
    MLAGeometry,
)
from attention.layout import StripeLayout
from attention.rows import decode_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
    ),
]

SEED = 20261129
HUGE_PAGE = 2**31 - 1
RANK, ROPE = 512, 64
DEVICE = torch.device("cuda")
OUT_LIMIT, LSE_LIMIT = 5e-3, 2e-3
FOUND = current_accelerator() if torch.cuda.is_available() else None
IS_HOPPER = FOUND is not None and FOUND.architecture == "sm90"
GENERATIONS = [
    "fa2",
    pytest.param("fa3", marks=pytest.mark.skipif(not IS_HOPPER, reason="fa3 needs Hopper")),
]


@dataclass(frozen=True)
class Case:
    """kv_index: of GQA; None is MLA. kv_scale: of an fp8 pool. committed: before the window; None
    is a padding row."""

    heads: int = 16
    kv_index: tuple[int, ...] | None = None
    head_dim: int = 128
    dcp_size: int = 2
    page: tuple[int, int] = (64, 1)
    window: tuple[int, str] = (1, "causal")
    committed: tuple[int | None, ...] = field(default=(0, 1, 2, None, 129, 700, 4097))
    kv_scale: float | None = None

    @property
    def extra(self) -> int:
        return self.window[0] if self.window[0] > 1 else 0

    @property
    def lengths(self) -> list[int]:
        return [0 if n is None else n + self.extra for n in self.committed]

    @property
    def widths(self) -> tuple[int, int]:
        """Of keys and values."""
        return (RANK + ROPE, RANK) if self.kv_index is None else (self.head_dim, self.head_dim)

    @property
    def scale(self) -> float:
        return self.widths[0] ** -0.5

    def __str__(self) -> str:
        kind = "mla" if self.kv_index is None else f"gqa{self.kv_index[-1] + 1}d{self.head_dim}"
        scale = "" if self.kv_scale is None else "-fp8"
        page, window = "i".join(map(str, self.page)), "".join(map(str, self.window))
        return f"{kind}-h{self.heads}-c{self.dcp_size}-p{page}-w{window}{scale}"


def grouped(heads: int, kv_heads: int, **changes: object) -> Case:
    kv_index = tuple(head * kv_heads // heads for head in range(heads))
    return replace(Case(heads=heads, kv_index=kv_index), **changes)


MLA_CASES = [
    Case(heads=1, dcp_size=1, page=(1, 1)),
    Case(heads=5, dcp_size=3, page=(16, 4)),
    Case(heads=16, dcp_size=2, page=(64, 1), window=(4, "causal")),
    Case(heads=16, dcp_size=3, page=(1, 1), window=(3, "full")),
    Case(heads=64, dcp_size=2, page=(16, 1)),
    Case(heads=64, dcp_size=1, page=(64, 1), window=(8, "causal")),
    Case(heads=128, dcp_size=3, page=(64, 2)),
    Case(heads=128, dcp_size=2, page=(1, 1), window=(2, "causal")),
    Case(heads=128, dcp_size=1, page=(64, 1), committed=(131072,)),
    Case(heads=16, dcp_size=3, page=(64, 1), committed=(131072,)),
]
GQA_CASES = [
    grouped(32, 8, dcp_size=1, page=(64, 1)),
    grouped(32, 8, dcp_size=3, page=(1, 1), window=(4, "causal")),
    grouped(16, 1, dcp_size=2, page=(16, 2)),
    grouped(16, 16, dcp_size=2, page=(16, 1), window=(3, "full")),
    Case(heads=4, kv_index=(0, 1, 1, 1), dcp_size=3, page=(64, 1), window=(2, "causal")),
    grouped(32, 8, dcp_size=2, page=(64, 1), committed=(131072,)),
]
SMALL_HEADS = [
    grouped(9, 3, head_dim=64, dcp_size=2, page=(16, 1)),
    grouped(9, 3, head_dim=64, dcp_size=3, page=(1, 1), window=(5, "causal")),
]


class Problem:
    """Dense inputs with a needle in each stripe in turn; pools hold what is committed."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator(DEVICE).manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, generator=generator)

        self.case = case
        key_width, value_width = case.widths
        num_kv_heads = 1 if case.kv_index is None else case.kv_index[-1] + 1
        window = case.window[0]
        q = 2 * normal(len(case.committed) * window, case.heads, key_width)
        self.q = q.to(torch.bfloat16)
        self.keys, self.values = [], []
        for b, length in enumerate(case.lengths):
            key = normal(length, num_kv_heads, key_width)
            owned = self.stripe(case.committed[b] or 0, b % case.dcp_size)
            if len(owned):
                target = self.q[b * window, 0].float()
                key[owned[len(owned) // 2], 0] = 25 / case.scale * target / target.square().sum()
            self.keys.append(self.stored(key))
            self.values.append(
                self.keys[-1][..., :value_width]
                if case.kv_index is None
                else self.stored(normal(length, num_kv_heads, value_width))
            )
        self.table = self.page_table()

    def stored(self, rows: Tensor) -> Tensor:
        if self.case.kv_scale is None:
            return rows.to(torch.bfloat16)
        return (rows / self.case.kv_scale).to(torch.float8_e4m3fn)

    def true(self, rows: Tensor) -> Tensor:
        return rows.double() * (self.case.kv_scale or 1.0)

    def stripe(self, length: int, rank: int) -> Tensor:
        positions = torch.arange(length)
        return positions[positions // self.case.page[1] % self.case.dcp_size == rank]

    def page_table(self) -> Tensor:
        tokens = self.case.page[0] * self.case.dcp_size
        counts = [-(-(committed or 0) // tokens) for committed in self.case.committed]
        order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(SEED))
        table = torch.full((len(counts), max(counts) + 10), HUGE_PAGE, dtype=torch.int32)
        for b, pages in enumerate(order.split(counts)):
            table[b, : len(pages)] = pages
        return table

    def pool(self, rows: list[Tensor], rank: int) -> Tensor:
        page_size = self.case.page[0]
        used = self.table[self.table < HUGE_PAGE]
        num_pages = int(used.max()) + 2 if len(used) else 2
        shape = (num_pages * page_size, *rows[0].shape[1:])
        pool = torch.full(shape, float("nan"), device=DEVICE).to(rows[0].dtype)
        for b, committed in enumerate(self.case.committed):
            owned = self.stripe(committed or 0, rank)
            index = torch.arange(len(owned))
            ids = self.table[b, index // page_size].long() * page_size + index % page_size
            # Bytes: not every build can index fp8.
            pool.view(torch.uint8)[ids.to(DEVICE)] = rows[b].view(torch.uint8)[owned.to(DEVICE)]
        return pool.view(num_pages, page_size, *shape[1:])

    def window_rows(self, rows: list[Tensor]) -> Tensor | None:
        extra = self.case.extra
        if not extra:
            return None
        padding = torch.full((extra, *rows[0].shape[1:]), float("nan"), device=DEVICE)
        parts = [self.true(part[-extra:]) if len(part) else padding.double() for part in rows]
        return torch.cat(parts).to(torch.bfloat16)

    def expected(self, b: int) -> tuple[Tensor, Tensor]:
        """float64 out [w, H, Dv] and lse [w, H] of sequence b."""
        window, mask = self.case.window
        q = self.q[b * window : (b + 1) * window].double()
        length = self.case.lengths[b]
        position = torch.arange(length, device=DEVICE)
        hidden = position > torch.arange(length - window, length, device=DEVICE)[:, None]
        if mask == "full":
            hidden = torch.zeros_like(hidden)
        out = q.new_zeros(*q.shape[:2], self.case.widths[1])
        lse = q.new_zeros(q.shape[:2])
        for head, kv_head in enumerate(self.case.kv_index or (0,) * self.case.heads):
            scores = q[:, head] @ self.true(self.keys[b][:, kv_head]).T * self.case.scale
            scores.masked_fill_(hidden, float("-inf"))
            lse[:, head] = torch.logsumexp(scores, -1)
            out[:, head] = torch.softmax(scores, -1) @ self.true(self.values[b][:, kv_head])
        return out, lse


def rank_result(problem: Problem, backend: FlashInferBackend, rank: int) -> AttentionResult:
    case = problem.case
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    kernel = backend.plan_decode(
        decode_rows(
            DecodeBatch(lengths, problem.table, *case.window),
            StripeLayout(case.dcp_size, rank, *case.page),
        ),
        kv_index=case.kv_index or (0,) * case.heads,
        scale=case.scale,
        value_width=case.widths[1],
        device=DEVICE,
    )
    key = problem.pool(problem.keys, rank)
    window_key = problem.window_rows(problem.keys)
    if case.kv_index is None:
        latent = None if window_key is None else window_key[:, 0]
        return kernel.mla(problem.q, MLACache(key[:, :, 0]), latent)
    value = problem.pool(problem.values, rank)
    cache = GQACache(key, value)
    if case.kv_scale is not None:
        scale = torch.tensor([case.kv_scale], device=DEVICE)
        cache = GQACache(key, value, scale, scale, (case.kv_scale, case.kv_scale))
    return kernel.gqa(problem.q, cache, window_key, problem.window_rows(problem.values))


def check(case: Case, backend: FlashInferBackend) -> None:
    problem = Problem(case)
    parts = [rank_result(problem, backend, rank) for rank in range(case.dcp_size)]
    window = case.window[0]
    worst_out = worst_lse = 0.0
    for b, committed in enumerate(case.committed):
        rows = slice(b * window, (b + 1) * window)
        for rank, part in enumerate(parts):
            has_window = bool(case.extra) and rank == 0 and committed is not None
            if not len(problem.stripe(committed or 0, rank)) and not has_window:
                assert bool((part.out[rows] == 0).all()), f"sequence {b}, rank {rank}"
                assert bool((part.lse[rows] == float("-inf")).all()), f"sequence {b}, rank {rank}"
        if not case.lengths[b]:
            continue
        lse = torch.logsumexp(torch.stack([part.lse[rows].double() for part in parts]), 0)
        out = sum(
            torch.exp(part.lse[rows].double() - lse)[..., None] * part.out[rows].double()
            for part in parts
        )
        expected, expected_lse = problem.expected(b)
        errors = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert bool(errors.isfinite().all()), f"sequence {b} is not finite"
        worst_out = max(worst_out, float(errors.max()))
        worst_lse = max(worst_lse, float((lse - expected_lse).abs().max()))
    assert worst_out <= OUT_LIMIT
    assert worst_lse <= LSE_LIMIT


@pytest.mark.parametrize("case", MLA_CASES, ids=str)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_latent_attention_against_float64(generation: str, case: Case) -> None:
    check(case, FlashInferBackend(mla=generation))


@pytest.mark.parametrize("case", GQA_CASES, ids=str)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_grouped_heads_against_float64(generation: str, case: Case) -> None:
    check(case, FlashInferBackend(gqa=generation))


@pytest.mark.parametrize("case", SMALL_HEADS, ids=str)
def test_heads_of_64_against_float64(case: Case) -> None:
    check(case, FlashInferBackend())


def test_grouped_heads_over_an_fp8_pool() -> None:
    check(grouped(32, 8, dcp_size=2, kv_scale=2**-5), FlashInferBackend())


def test_one_backend_serves_steps_in_turn() -> None:
    """Wrappers keep what they planned; each step must plan anew."""
    backend = FlashInferBackend()
    verify = Case(window=(4, "causal"), committed=(700, 3))
    for case in (Case(), verify, Case(committed=(4097,)), Case(heads=64), verify):
        check(case, backend)
    check(grouped(32, 8), backend)
    check(grouped(32, 8, window=(4, "causal"), committed=(700, 3)), backend)


def test_a_damaged_key_is_not_hidden() -> None:
    case = Case(dcp_size=1, committed=(4097, 129))
    problem = Problem(case)
    problem.keys[0][4000] = float("nan")
    part = rank_result(problem, FlashInferBackend(), 0)
    assert bool(part.lse[0].isnan().all())
    assert bool(part.out[1].isfinite().all())


@pytest.mark.skipif(not IS_HOPPER, reason="the measured row is for Hopper")
def test_dispatch_takes_it_where_it_was_measured_faster() -> None:
    needs = AttentionNeeds(
        geometry=MLAGeometry(512, 128, 64, 128, 0.1),
        num_q_heads=128,
        num_kv_heads=1,
        tp_size=2,
        dcp_size=2,
        page_size=64,
        device="cuda",
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        operations=frozenset({"decode", "verify", "extend"}),
    )
    assert choose(needs).backend.name == "flashinfer"
    grouped_needs = replace(needs, geometry=GQAGeometry(128, 0.1), num_q_heads=32, num_kv_heads=8)
    assert choose(grouped_needs, backend="flashinfer").backend.name == "flashinfer"


def test_the_doubles_of_the_cpu_tests_have_the_real_signatures() -> None:
    doubles = importlib.import_module("tests.unit.attention.vendor_doubles.flashinfer_double")
    trtllm = importlib.import_module("tests.unit.attention.vendor_doubles.trtllm_double")
    top, latent, _ = doubles.flashinfer_double()
    pairs = []
    for module, members in (("flashinfer", top), ("flashinfer.mla", latent)):
        for name, double in members.items():
            real = getattr(importlib.import_module(module), name)
            pairs += [(getattr(real, m), getattr(double, m)) for m in ("__init__", "plan", "run")]
    name = "trtllm_batch_decode_with_kv_cache_mla"
    real = getattr(importlib.import_module("flashinfer.mla"), name)
    pairs.append((real, getattr(trtllm.TrtllmDouble, name)))
    for real, double in pairs:
        parameters = list(inspect.signature(real).parameters)
        expected = list(inspect.signature(double).parameters)
        assert [p for p in parameters if p != "self"] == [p for p in expected if p != "self"]
