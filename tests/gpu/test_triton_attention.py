"""The triton backend on a GPU against float64 attention over the unstriped sequence.

The grid covers every pair of the factors below; SEED makes it the same grid each time. Ranks of a
DCP group are looped over in one process and merged by their lse in float64. Rows that a rank does
not own, rows of the window, stale tails and page 0 are NaN, page ids past a sequence's pages huge.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attention.backends.torch_backend import TorchBackend
from attention.backends.triton_backend import TritonBackend
from attention.dcp import DcpAttention
from attention.dispatch import AttentionNeeds, choose
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
from attention.rows import decode_rows
from tools.quantised_rows import KINDS as KINDS_OF_SCALE
from tools.quantised_rows import pool_scale, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

SEED = 20261129
HUGE_PAGE = 2**31 - 1
DEVICE = torch.device("cuda")

# name -> (is MLA, value width, rope width, query heads a KV head; 0: all on one)
KINDS = {
    "mla512": (True, 512, 64, 0),
    "mla64": (True, 64, 16, 0),
    "gqa128": (False, 128, 0, 4),
    "gqa64": (False, 64, 0, 2.7),
    "mqa256": (False, 256, 0, 0),
}
FACTORS = {
    "kind": tuple(KINDS),
    "heads": (1, 5, 16, 32, 64, 128),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dcp_size": (1, 2, 3, 4, 8),
    "page": ((1, 1), (16, 1), (16, 4), (64, 1), (128, 2)),
    "window": ((1, "causal"), (2, "causal"), (5, "full"), (8, "causal"), (9, "full")),
    "lengths": ("tiny", "page", "long", "huge"),
    "needle": (0, 1, 2, 3),
    "kv": ("same", *KINDS_OF_SCALE),
}
# Also of a pool in float8_e4m3fn, against its true values, are the limits of 16-bit types.
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 2e-3), torch.float16: (5e-3, 2e-3)}


@dataclass(frozen=True)
class Case:
    kind: str
    heads: int
    dtype: torch.dtype
    dcp_size: int
    page: tuple[int, int]
    window: tuple[int, str]
    lengths: str
    needle: int
    kv: str = "same"
    """Pool in the model's dtype, or in float8_e4m3fn with scales of this kind."""

    @property
    def committed(self) -> list[int]:
        c, page = self.dcp_size, self.page[0]
        return {
            "tiny": [0, 1, c - 1, c, c + 1],
            "page": [page * c - 1, page * c, page * c + 1, 129],
            "long": [4097, 129, 0, 700],
            "huge": [131072],
            "many": [131072, 65537, 0, 4097],
            "solo": [4097],
        }[self.lengths]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        page, window = "i".join(map(str, self.page)), "".join(map(str, self.window))
        return (
            f"{self.kind}-h{self.heads}-{dtype}-c{self.dcp_size}-p{page}-w{window}-{self.lengths}"
            f"-n{self.needle}-kv {self.kv}"
        )


def pairwise_grid() -> list[Case]:
    """Cases that together hold every pair of values of two factors, picked greedily."""
    names = list(FACTORS)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }
    generator = random.Random(SEED)
    cases = []
    while missing:
        candidates = [{name: generator.choice(FACTORS[name]) for name in names} for _ in range(60)]
        covered = [
            missing & set(itertools.combinations(candidate.items(), 2)) for candidate in candidates
        ]
        best = max(range(len(candidates)), key=lambda i: len(covered[i]))
        missing -= covered[best]
        if covered[best]:
            cases.append(Case(**candidates[best]))
    return cases


@dataclass
class Problem:
    """Dense inputs: q [B*w, H, W]; keys, values: of each sequence [L, Hk, ...], window last.

    stored: keys and values that the pool keeps, scales: theirs if these are float8_e4m3fn.
    """

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    stored: list[list[Tensor]]
    scales: list[list[Tensor]]
    kv_index: tuple[int, ...]
    scale: float
    is_mla: bool
    width: int


def make_problem(case: Case) -> Problem:
    """Skewed scores, and for each sequence a needle in the stripe of the case's rank."""
    is_mla, width, rope, group = KINDS[case.kind]
    window = case.window[0]
    generator = torch.Generator(DEVICE).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    num_kv_heads = max(1, int(case.heads / group)) if group else 1
    kv_index = tuple(h * num_kv_heads // case.heads for h in range(case.heads))
    scale = (width + rope) ** -0.5
    batch = len(case.committed)
    q = (2 * normal(batch * window, case.heads, width + rope)).to(case.dtype)
    keys, values = [], []
    for b, committed in enumerate(case.committed):
        length = committed + (window if window > 1 else 0)
        key = normal(length, num_kv_heads, width + rope)
        owned = stripe_positions(case, committed, case.needle % case.dcp_size)
        if len(owned):
            target = q[b * window, 0].float()
            key[owned[len(owned) // 2], kv_index[0]] = 30 / scale * target / target.square().sum()
        key = key.to(case.dtype)
        keys.append(key)
        values.append(
            key[..., :width] if is_mla else normal(length, num_kv_heads, width).to(case.dtype)
        )
    if case.kv == "same":
        return Problem(q, keys, values, [keys, values], [], kv_index, scale, is_mla, width)
    both = [quantised(case, rows) for rows in ((keys,) if is_mla else (keys, values))]
    keys, values = both[0][2], both[-1][2]
    if is_mla:
        values = [key[..., :width] for key in keys]
    stored, scales = [part[0] for part in both], [part[1] for part in both]
    return Problem(q, keys, values, stored, scales, kv_index, scale, is_mla, width)


def quantised(case: Case, rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What the pool keeps, its scales [L, Hk, 1], and the true rows; the window stays as it is."""
    parts = [quantise(r[:n], case.kv) for r, n in zip(rows, case.committed, strict=True)]
    true = [
        torch.cat([part.values, r[len(part.values) :].double()])
        for part, r in zip(parts, rows, strict=True)
    ]
    return [part.stored for part in parts], [part.scale[..., None] for part in parts], true


def stripe_positions(case: Case, length: int, rank: int) -> Tensor:
    positions = torch.arange(length)
    return positions[positions // case.page[1] % case.dcp_size == rank]


def striped_pool(case: Case, rows: list[Tensor], table: Tensor, rank: int) -> Tensor:
    page_size = case.page[0]
    num_pages = int(table[table < HUGE_PAGE].max()) + 2 if bool((table < HUGE_PAGE).any()) else 2
    pool = torch.full(
        (num_pages * page_size, *rows[0].shape[1:]),
        float("nan"),
        device=DEVICE,
        dtype=rows[0].dtype,
    )
    for b, committed in enumerate(case.committed):
        owned = stripe_positions(case, committed, rank)
        index = torch.arange(len(owned))
        ids = table[b, index // page_size].long() * page_size + index % page_size
        pool[ids.to(DEVICE)] = rows[b][owned.to(DEVICE)]
    return pool.view(num_pages, page_size, *rows[0].shape[1:])


def rank_cache(case: Case, problem: Problem, table: Tensor, rank: int) -> MLACache | GQACache:
    """The rank's pool."""
    pools = [striped_pool(case, rows, table, rank) for rows in problem.stored]
    scales: list[Tensor | None] = [None, None]
    if case.kv != "same":
        pools = [pool.to(torch.float8_e4m3fn) for pool in pools]
        scales = [
            pool_scale(striped_pool(case, rows, table, rank)[..., 0], case.kv)
            for rows in problem.scales
        ]
    if problem.is_mla:
        scale = scales[0]
        if scale is not None and scale.dim() == 3:
            scale = scale[:, 0]
        return MLACache(pools[0][:, :, 0], scale)
    return GQACache(pools[0], pools[1], scales[0], scales[1])


def page_table(case: Case) -> Tensor:
    tokens = case.page[0] * case.dcp_size
    counts = [-(-committed // tokens) for committed in case.committed]
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(SEED))
    table = torch.full((len(counts), max(counts) + 2), HUGE_PAGE, dtype=torch.int32)
    for b, pages in enumerate(order.split(counts)):
        table[b, : len(pages)] = pages
    return table


def rank_result(case: Case, problem: Problem, rank: int, backend: TritonBackend) -> AttentionResult:
    return cache_result(
        case, problem, rank, backend, rank_cache(case, problem, page_table(case), rank)
    )


def cache_result(
    case: Case, problem: Problem, rank: int, backend: TritonBackend, cache: MLACache | GQACache
) -> AttentionResult:
    window, mask = case.window
    extra = window if window > 1 else 0
    lengths = torch.tensor([n + extra for n in case.committed], dtype=torch.int32)
    stripe = StripeLayout(case.dcp_size, rank, *case.page)
    table = page_table(case)
    # The table is wide enough for the window too, whose pages hold nothing.
    table = torch.nn.functional.pad(table, (0, 10), value=HUGE_PAGE)
    kernel = backend.plan_decode(
        decode_rows(DecodeBatch(lengths, table, window, mask), stripe),
        kv_index=problem.kv_index,
        scale=problem.scale,
        value_width=problem.width,
        device=DEVICE,
    )
    last = [slice(n, n + extra) for n in case.committed]
    window_key, window_value = (
        torch.cat([r[s] for r, s in zip(rows, last, strict=True)]).to(case.dtype)
        for rows in (problem.keys, problem.values)
    )
    if isinstance(cache, MLACache):
        return kernel.mla(problem.q, cache, window_key[:, 0] if extra else None)
    return kernel.gqa(problem.q, cache, window_key, window_value)


def oracle(case: Case, problem: Problem, b: int) -> tuple[Tensor, Tensor]:
    """float64 out [w, H, Dv] and lse [w, H] of sequence b."""
    window, mask = case.window
    q = problem.q[b * window : (b + 1) * window].double()
    length = len(problem.keys[b])
    hidden = torch.zeros(window, length, dtype=torch.bool, device=DEVICE)
    if mask == "causal":
        hidden = (
            torch.arange(length, device=DEVICE)
            > torch.arange(length - window, length, device=DEVICE)[:, None]
        )
    out = q.new_zeros(*q.shape[:2], problem.width)
    lse = q.new_zeros(q.shape[:2])
    for head, kv_head in enumerate(problem.kv_index):
        scores = q[:, head] @ problem.keys[b][:, kv_head].double().T * problem.scale
        scores.masked_fill_(hidden, float("-inf"))
        lse[:, head] = torch.logsumexp(scores, -1)
        out[:, head] = torch.softmax(scores, -1) @ problem.values[b][:, kv_head].double()
    return out, lse


def merged(parts: list[AttentionResult]) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(torch.stack([part.lse.double() for part in parts]), 0)
    weights = [torch.exp(part.lse.double() - lse)[..., None] for part in parts]
    return sum(w * part.out.double() for w, part in zip(weights, parts, strict=True)), lse


@pytest.mark.parametrize("case", pairwise_grid(), ids=str)
def test_grid_against_float64(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    problem = make_problem(case)
    backend = TritonBackend()
    parts = [rank_result(case, problem, rank, backend) for rank in range(case.dcp_size)]
    window = case.window[0]
    limit, lse_limit = LIMITS[case.dtype if case.kv == "same" else torch.bfloat16]
    for b in range(len(case.committed)):
        rows = slice(b * window, (b + 1) * window)
        mine = [AttentionResult(part.out[rows], part.lse[rows]) for part in parts]
        if len(problem.keys[b]) == 0:
            for part in mine:
                assert bool((part.out == 0).all())
                assert bool((part.lse == float("-inf")).all())
            continue
        out, lse = merged(mine)
        expected, expected_lse = oracle(case, problem, b)
        errors = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(errors.max()) <= limit, f"sequence {b}"
        assert float((lse - expected_lse).abs().max()) <= lse_limit, f"sequence {b}"


def plain_case(**changes: object) -> Case:
    values = dict(
        kind="mla512",
        heads=16,
        dtype=torch.bfloat16,
        dcp_size=1,
        page=(64, 1),
        window=(1, "causal"),
        lengths="long",
        needle=0,
    )
    return Case(**{**values, **changes})


@pytest.mark.parametrize("kind", ["mla512", "gqa128"])
def test_a_stripe_without_keys_gives_zero_and_minus_infinity(kind: str) -> None:
    case = plain_case(kind=kind, dcp_size=8, lengths="tiny")
    part = rank_result(case, make_problem(case), 7, TritonBackend())
    has_keys = torch.tensor([n > 7 for n in case.committed], device=DEVICE)
    assert bool((part.out[~has_keys] == 0).all())
    assert bool((part.lse[~has_keys] == float("-inf")).all())
    assert bool(part.lse[has_keys].isfinite().all())


@pytest.mark.parametrize("kind", ["mla512", "gqa128"])
def test_a_damaged_key_is_not_hidden(kind: str) -> None:
    """NaN in a live row gives NaN, so that damage cannot pass for an empty stripe."""
    case = plain_case(kind=kind)
    problem = make_problem(case)
    problem.keys[0][4000] = float("nan")
    part = rank_result(case, problem, 0, TritonBackend())
    assert bool(part.out[0].isnan().all())
    assert bool(part.lse[0].isnan().all())
    assert bool(part.out[1].isfinite().all())


@pytest.mark.parametrize("kind", ["mla512", "gqa128"])
def test_deterministic_results_do_not_depend_on_the_batch(kind: str) -> None:
    alone, together = plain_case(kind=kind, lengths="solo"), plain_case(kind=kind)
    problem, larger = make_problem(alone), make_problem(together)
    larger.q[0], larger.keys[0][:], larger.values[0][:] = (
        problem.q[0],
        problem.keys[0],
        problem.values[0],
    )
    one = rank_result(alone, problem, 0, TritonBackend(deterministic=True))
    many = rank_result(together, larger, 0, TritonBackend(deterministic=True))
    assert torch.equal(one.out[0], many.out[0])
    assert torch.equal(one.lse[0], many.lse[0])


@pytest.mark.parametrize("kind", ["mla512", "gqa128"])
@pytest.mark.parametrize("window", [(1, "causal"), (4, "causal")])
def test_graph_replay_equals_eager(kind: str, window: tuple[int, str]) -> None:
    case = plain_case(kind=kind, window=window)
    problem = make_problem(case)
    backend = TritonBackend()
    table = torch.nn.functional.pad(page_table(case), (0, 10), value=HUGE_PAGE)
    extra = window[0] if window[0] > 1 else 0
    lengths = torch.tensor([n + extra for n in case.committed], dtype=torch.int32)
    kernel = backend.plan_decode(
        decode_rows(DecodeBatch(lengths, table, *window), StripeLayout(1, 0, *case.page)),
        kv_index=problem.kv_index,
        scale=problem.scale,
        value_width=problem.width,
        device=DEVICE,
    )
    cache = rank_cache(case, problem, table, 0)
    q = problem.q.clone()
    tail = [k[n : n + extra] for k, n in zip(problem.keys, case.committed, strict=True)]
    window_key = torch.cat(tail)

    def call() -> AttentionResult:
        if isinstance(cache, MLACache):
            return kernel.mla(q, cache, window_key[:, 0] if extra else None)
        return kernel.gqa(q, cache, window_key, window_key)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for factor in (1.0, 0.5):
        q.copy_(problem.q * factor)
        graph.replay()
        eager = call()
        torch.cuda.synchronize()
        assert torch.equal(captured.out, eager.out)
        assert torch.equal(captured.lse, eager.lse)


class _Alone:
    """The Group of a single rank; none of its collectives may be called."""

    rank = 0
    size = 1


@pytest.mark.parametrize("is_mla", [True, False])
def test_dispatch_prefers_triton_and_agrees_with_torch(is_mla: bool) -> None:
    torch.manual_seed(SEED)
    geometry: GQAGeometry | MLAGeometry = GQAGeometry(64, 64**-0.5)
    if is_mla:
        geometry = MLAGeometry(64, 32, 16, 32, 48**-0.5)
    num_kv_heads = 1 if is_mla else 3
    needs = AttentionNeeds(
        geometry=geometry,
        num_q_heads=9,
        num_kv_heads=num_kv_heads,
        page_size=16,
        device="cuda",
        operations=frozenset({"decode", "verify", "extend"}),
    )
    chosen = choose(needs).backend
    assert chosen.name == "triton"
    lengths = torch.tensor([300, 5, 0, 64], dtype=torch.int32)
    table = torch.randperm(80, dtype=torch.int32).view(4, 20)
    pool = torch.randn(80, 16, 80 if is_mla else 3 * 128, device=DEVICE)
    outs = []
    for backend in (chosen, TorchBackend()):
        torch.manual_seed(SEED)
        layer = DcpAttention(
            geometry=geometry,
            stripe=StripeLayout(1, 0, 16),
            heads=HeadLayout(9, num_kv_heads, 1, 0, 1),
            group=_Alone(),
            backend=backend,
            exchange=AgRsExchange(),
            q_mode="gather",
        )
        plan = layer.plan_decode(DecodeBatch(lengths, table), DEVICE)
        q = torch.randn(4, 9, 80 if is_mla else 64, device=DEVICE)
        if is_mla:
            outs.append(layer.mla_decode(q[..., :64], q[..., 64:], MLACache(pool), None, plan))
        else:
            key, value = pool.view(80, 16, 3, 128).split(64, dim=-1)
            cache = GQACache(key.contiguous(), value.contiguous())
            outs.append(layer.gqa_decode(q, cache, None, None, plan))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
