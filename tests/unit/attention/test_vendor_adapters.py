"""Adapters of vendors' decode kernels over doubles that check each call and answer it in torch.

Rows that a rank does not own, rows of the window, page 0 and unused pages are NaN; page ids past a
sequence's pages are huge. A kernel that is pointed at any of them shows as NaN or as a WrongCall.
"""

from __future__ import annotations

import math

import pytest
import torch

from attention.backends.aiter_mla import RESTRICTED_HEADS, head_chunks
from attention.backends.flashinfer_backend import FlashInferBackend
from attention.backends.latent_prefix import chunks_up_to
from attention.backends.lse_base import LseBase
from attention.backends.torch_backend import TorchBackend
from attention.dcp import DcpAttention
from attention.exchanges.a2a import A2AExchange
from attention.interface import DecodeBatch, MLACache, MLAGeometry
from attention.layout import HeadLayout, StripeLayout
from attention.rows import ExtendRows, decode_rows
from tests.unit.attention.vendor_doubles.adapters import ADAPTERS
from tests.unit.attention.vendor_doubles.machine import pretend
from tests.unit.attention.vendor_doubles.recording import BASE_2, BASE_E
from tests.unit.attention.vendor_doubles.striped_case import (
    Problem,
    Step,
    assert_step_is_exact,
    attend_on_rank,
    lengths_around,
)

# (heads, c, window, mask, interleave)
MLA_STEPS = (
    (1, 1, 1, "causal", 1),
    (5, 3, 1, "causal", 2),
    (16, 2, 4, "causal", 1),
    (16, 3, 3, "full", 1),
    (64, 2, 1, "causal", 2),
    (64, 2, 2, "causal", 1),
    (96, 3, 1, "causal", 1),
    (128, 2, 1, "causal", 1),
    (128, 3, 2, "causal", 1),
)
GQA_HEADS = {
    "32 over 8": tuple(h // 4 for h in range(32)),
    "9 over 3": tuple(h // 3 for h in range(9)),
    "uneven": (0, 1, 1, 1),
    "mqa": (0,) * 12,
}


def wrong(base: float) -> float:
    return BASE_E if base == BASE_2 else BASE_2


def latent_step(name: str, row: int, page: int) -> Step:
    heads, dcp_size, window, mask, interleave = MLA_STEPS[row]
    sizes = ADAPTERS[name].page_sizes
    page_size = sizes[page % len(sizes)]
    if page_size % interleave:
        interleave = 1
    committed = lengths_around(dcp_size, page_size)
    if heads > 64:
        committed = committed[-3:] + committed[:4]
    return Step(committed, heads, None, dcp_size, page_size, interleave, window, mask)


@pytest.mark.parametrize("row", range(len(MLA_STEPS)))
@pytest.mark.parametrize("name", ADAPTERS)
def test_latent_attention_over_stripes_is_exact(name, row, stripe_rows, monkeypatch):
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    problem = Problem(latent_step(name, row, page=row), stripe_rows)
    assert_step_is_exact(problem, adapter.make())


@pytest.mark.parametrize("page", range(3))
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_page_size_is_translated(name, page, stripe_rows, monkeypatch):
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    problem = Problem(latent_step(name, 2, page), stripe_rows)
    assert_step_is_exact(problem, adapter.make())


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_other_base_of_the_lse_is_noticed(name, stripe_rows, monkeypatch):
    """The negative control: short, skewed stripes do not forgive a base that is taken for another
    (bugs 1 and 2)."""
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, wrong(adapter.base))
    problem = Problem(latent_step(name, 2, 1), stripe_rows)
    with pytest.raises(AssertionError, match="sequence"):
        assert_step_is_exact(problem, adapter.make())


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_stripe_without_any_key_launches_nothing(name, stripe_rows, monkeypatch):
    adapter = ADAPTERS[name]
    calls = adapter.install(monkeypatch, None)
    step = Step((1, 2, None), dcp_size=3, page_size=adapter.page_sizes[-1])
    part = attend_on_rank(Problem(step, stripe_rows), adapter.make(), rank=2)
    assert not [call for call in calls if "wrapper" not in call.function]
    assert bool((part.out == 0).all())
    assert bool((part.lse == float("-inf")).all())


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_step_without_tokens_has_an_empty_result(name):
    batch = DecodeBatch(torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32))
    kernel = (
        ADAPTERS[name]
        .make()
        .plan_decode(
            decode_rows(batch, StripeLayout(1, 0, 64)),
            kv_index=(0,) * 4,
            scale=0.1,
            value_width=512,
            device=torch.device("cpu"),
        )
    )
    pool = MLACache(torch.zeros(1, 64, 576, dtype=torch.bfloat16))
    out, lse = kernel.mla(torch.zeros(0, 4, 576, dtype=torch.bfloat16), pool, None)
    assert out.shape == (0, 4, 512)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_damaged_key_is_not_hidden(name, stripe_rows, monkeypatch):
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    problem = Problem(Step((40, 3), page_size=adapter.page_sizes[-1], dcp_size=1), stripe_rows)
    live = ~problem.pools[0][0].isnan().any(dim=-1).flatten()
    first_row = int(problem.page_table[0, 0]) * problem.step.page_size
    assert bool(live[first_row])
    problem.pools[0][0].view(-1, 576)[first_row] = float("nan")
    part = attend_on_rank(problem, adapter.make(), 0)
    assert bool(part.out[0].isnan().all())
    assert bool(part.lse[0].isnan().all())
    assert bool(part.out[1].isfinite().all())


@pytest.mark.parametrize("name", ADAPTERS)
def test_rank_0_refuses_a_verify_step_without_its_window(name, stripe_rows, monkeypatch):
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    step = Step((8,), page_size=adapter.page_sizes[-1], window=2)
    problem = Problem(step, stripe_rows)
    problem.window_rows = lambda sequences: None
    with pytest.raises(ValueError, match="in-hand rows"):
        attend_on_rank(problem, adapter.make(), 0)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("heads", GQA_HEADS)
def test_flashinfer_serves_grouped_heads(heads, window, stripe_rows, monkeypatch):
    calls = ADAPTERS["flashinfer"].install(monkeypatch, None)
    kv_index = GQA_HEADS[heads]
    for dcp_size, page_size in ((1, 16), (2, 1), (3, 64)):
        step = Step(
            lengths_around(dcp_size, page_size),
            heads=len(kv_index),
            kv_index=kv_index,
            dcp_size=dcp_size,
            page_size=page_size,
            window=window,
        )
        assert_step_is_exact(Problem(step, stripe_rows), FlashInferBackend())
    kinds = {call.function for call in calls}
    assert kinds == (
        {"decode plan", "decode run"} if window == 1 else {"prefill plan", "prefill run"}
    )


def test_flashinfer_grouped_heads_notice_the_other_base(stripe_rows, monkeypatch):
    ADAPTERS["flashinfer"].install(monkeypatch, BASE_E)
    step = Step((70, 3, 1), heads=4, kv_index=(0,) * 4)
    with pytest.raises(AssertionError, match="sequence"):
        assert_step_is_exact(Problem(step, stripe_rows), FlashInferBackend())


@pytest.mark.parametrize("kv_index", [None, (0, 0, 1, 1)])
def test_flashinfer_plans_once_a_step(kv_index, stripe_rows, monkeypatch):
    calls = ADAPTERS["flashinfer"].install(monkeypatch, None)
    backend = FlashInferBackend()
    step = Step((40, 3), heads=4, kv_index=kv_index)
    problem = Problem(step, stripe_rows)
    for _ in range(2):
        attend_on_rank(problem, backend, 0, layers=3)
    kinds = [call.function.split()[1] for call in calls]
    assert kinds.count("plan") == 2
    assert kinds.count("run") == 6
    assert kinds.count("wrapper") == (1 if kv_index is None else 0)


def test_flashinfer_names_its_kernels(stripe_rows, monkeypatch):
    calls = ADAPTERS["flashinfer"].install(monkeypatch, None)
    problem = Problem(Step((40,), heads=4), stripe_rows)
    attend_on_rank(problem, FlashInferBackend(mla="fa3"), 0)
    attend_on_rank(problem, FlashInferBackend(), 0)
    wrappers = [call.arguments["backend"] for call in calls if call.function == "mla wrapper"]
    assert wrappers == ["fa3", "fa2"]
    with pytest.raises(ValueError, match="mla 'auto' is not one of fa2, fa3, best"):
        FlashInferBackend(mla="auto")


def test_windows_become_heads_in_launches_that_the_kernel_takes(stripe_rows, monkeypatch):
    """Bug 53 and the counters of 1.5: never more heads than the tile, so never a larger slab."""
    adapter = ADAPTERS["trtllm_mla"]
    calls = adapter.install(monkeypatch, None)
    step = Step((40, 3), heads=48, page_size=64, dcp_size=1, window=3)
    attend_on_rank(Problem(step, stripe_rows), adapter.make(), 0, layers=2)
    assert [call.arguments["heads"] for call in calls] == [72, 72] * 2
    assert all(call.arguments["q_len"] == 1 for call in calls)
    assert all(call.arguments["max_seq_len"] == 40 for call in calls)


def test_rank_local_lengths_reach_the_kernel(stripe_rows, monkeypatch):
    """Bug 29: global lengths would read pages that a rank does not have."""
    adapter = ADAPTERS["cutedsl_mla"]
    calls = adapter.install(monkeypatch, None)
    problem = Problem(Step((100,), page_size=16, dcp_size=3), stripe_rows)
    for rank in range(3):
        attend_on_rank(problem, adapter.make(), rank)
    assert [call.arguments["max_seq_len"] for call in calls] == [34, 33, 33]


def test_aiter_chunks_avoid_the_restricted_regime():
    for num_heads in (*range(1, 300), 1024):
        chunks = head_chunks(num_heads)
        assert sum(chunks) == num_heads
        assert all(1 <= size <= 96 and size not in RESTRICTED_HEADS for size in chunks)
        assert len(chunks) <= -(-num_heads // 96) + 1


@pytest.mark.parametrize("num_heads", [1, 127, 128, 129, 384, 1000])
def test_even_chunks(num_heads):
    chunks = chunks_up_to(128)(num_heads)
    assert sum(chunks) == num_heads
    assert len(chunks) == -(-num_heads // 128)
    assert max(chunks) - min(chunks) <= 1
    assert max(chunks) <= 128


def test_bases_and_minus_infinity():
    lse = torch.tensor([3.0, float("-inf")])
    assert LseBase.E.to_natural(lse) is lse
    assert torch.allclose(LseBase.TWO.to_natural(lse)[:1], torch.tensor([3.0 * math.log(2.0)]))
    assert LseBase.TWO.to_natural(lse)[1] == float("-inf")


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_whole_layer_over_ranks(name, stripe_rows, run_ranks, monkeypatch):
    """Gathered queries, the adapter on each rank's stripe, the exchange: as without stripes."""
    adapter = ADAPTERS[name]
    adapter.install(monkeypatch, None)
    step = Step((130, 1, None, 5), heads=7, page_size=adapter.page_sizes[-1], dcp_size=3, window=2)
    problem = Problem(step, stripe_rows)
    lengths = torch.tensor(step.lengths, dtype=torch.int32)
    window = problem.window_rows(problem.keys)[:, 0]

    def rank_out(group):
        heads = HeadLayout(7, 1, 3, group.rank, 3)
        layer = DcpAttention(
            geometry=MLAGeometry(512, 128, 64, 128, step.scale),
            stripe=StripeLayout(3, group.rank, step.page_size),
            heads=heads,
            group=group,
            backend=adapter.make(),
            exchange=A2AExchange(),
            q_mode="gather",
        )
        plan = layer.plan_decode(DecodeBatch(lengths, problem.page_table, 2), "cpu")
        local = heads.local_heads_in_group
        q = problem.q[:, local.start : local.stop]
        return layer.mla_decode(q[..., :512], q[..., 512:], problem.cache(group.rank), window, plan)

    out = torch.cat(run_ranks(3, rank_out), dim=1)
    for b, length in enumerate(step.lengths):
        mine = out[2 * b : 2 * b + 2].double()
        if not length:
            assert bool((mine == 0).all())
            continue
        expected = problem.expected(b).out
        assert float(((mine - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) <= 5e-3


@pytest.mark.parametrize("name", ADAPTERS)
def test_extend_without_a_gpu_is_that_of_the_torch_backend(name, monkeypatch):
    pretend(monkeypatch, None)
    rows, kv_index = ExtendRows((0,), (3,)), (0, 0)
    q, key = torch.randn(3, 2, 64), torch.randn(3, 1, 64)
    outs = [
        backend.plan_extend(rows, kv_index=kv_index, scale=0.1, device=torch.device("cpu")).gqa(
            q, key, key, None, None
        )
        for backend in (ADAPTERS[name].make(), TorchBackend())
    ]
    assert torch.equal(*outs)
