"""ag_rs and a2a against the float64 merge, any group size and head split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import reference
from attention.backends.torch_backend import TorchBackend
from attention.dcp import DcpAttention
from attention.dispatch import AttentionNeeds
from attention.exchanges.a2a import A2AExchange
from attention.exchanges.ag_rs import AgRsExchange
from attention.exchanges.base import ExchangeLimits, SymmetricWords
from attention.exchanges.combiner import SplitCombiner
from attention.exchanges.fused import FusedExchange, FusedLayout
from attention.exchanges.pieces import TorchPieces, piece_bytes
from attention.exchanges.query import gather_query_heads
from attention.interface import (
    AttentionResult,
    DecodeBatch,
    GQACache,
    GQAGeometry,
    MLACache,
    SplitResult,
)
from attention.layout import HeadLayout, StripeLayout, shard_range
from tools.thread_ranks import ThreadGroup
from tools.triton_interpreter import interpreted, interpreter_obstacle

OBSTACLE = interpreter_obstacle()

NO_KEYS = float("-inf")
# `fused` runs on GPUs, and in the interpreter: see interpreted_exchange_cases.
EXCHANGES = {"a2a": A2AExchange, "ag_rs": AgRsExchange}


def splits_of(num_heads: int, size: int) -> list[int]:
    return [len(shard_range(num_heads, rank, size)) for rank in range(size)]


def random_partials(
    size: int, num_tokens: int, num_heads: int, width: int, seed: int, dtype=torch.float32
) -> list[AttentionResult]:
    """Partials of every rank with some empty stripes, whose outputs are garbage."""
    generator = torch.Generator().manual_seed(seed)
    partials = []
    for _ in range(size):
        out = torch.randn(num_tokens, num_heads, width, generator=generator).to(dtype)
        lse = 4 * torch.randn(num_tokens, num_heads, generator=generator)
        empty = torch.rand(num_tokens, num_heads, generator=generator) < 0.3
        out.masked_fill_(empty[..., None], float("nan"))
        partials.append(AttentionResult(out, lse.masked_fill_(empty, NO_KEYS)))
    return partials


@pytest.mark.parametrize("name", EXCHANGES)
@given(
    size=st.sampled_from([2, 3, 4, 6, 8]),
    num_heads=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 12]),
    num_tokens=st.sampled_from([1, 2, 5]),
    width=st.sampled_from([1, 8, 24]),
    seed=st.integers(0, 1000),
)
def test_each_rank_gets_its_heads_merged(run_ranks, name, size, num_heads, num_tokens, width, seed):
    splits = splits_of(num_heads, size)
    partials = random_partials(size, num_tokens, num_heads, width, seed)
    exchange = EXCHANGES[name]()
    outs = run_ranks(size, lambda g: exchange.combine(partials[g.rank], splits, g))
    assert [out.shape for out in outs] == [(num_tokens, heads, width) for heads in splits]
    expected = reference.merge(partials).out
    torch.testing.assert_close(torch.cat(outs, dim=1).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 7, 64])
def test_half_precision_keeps_float32_lses(run_ranks, name, dtype, width):
    """An lse of 100.1 rounded to bf16 would be off by 0.1, a tenth of the weight."""
    partials = random_partials(3, 2, 7, width, seed=1, dtype=dtype)
    partials = [AttentionResult(out, lse + 100.1) for out, lse in partials]
    outs = run_ranks(3, lambda g: EXCHANGES[name]().combine(partials[g.rank], splits_of(7, 3), g))
    merged = torch.cat(outs, dim=1)
    assert merged.dtype == dtype
    expected = reference.merge(partials).out
    torch.testing.assert_close(merged.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("name", EXCHANGES)
def test_rows_that_are_empty_everywhere_become_zero(run_ranks, name):
    empty = AttentionResult(torch.full((2, 4, 8), float("nan")), torch.full((2, 4), NO_KEYS))
    for out in run_ranks(2, lambda g: EXCHANGES[name]().combine(empty, [2, 2], g)):
        assert (out == 0).all()


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_the_exchanges_agree_with_one_another(run_ranks, size):
    partials = random_partials(size, 4, 9, 16, seed=size)
    splits = splits_of(9, size)
    merged = [
        torch.cat(
            run_ranks(size, lambda g, n=name: EXCHANGES[n]().combine(partials[g.rank], splits, g)),
            dim=1,
        )
        for name in EXCHANGES
    ]
    torch.testing.assert_close(merged[0], merged[1], rtol=1e-6, atol=1e-6)


def test_wire_bytes_are_those_of_the_formulas(run_ranks):
    """T tokens, H heads, width D, 16-bit outputs, per rank: reduce-scatter T*H*D*4*(c-1)/c plus
    the gathered LSEs; all-to-all T*H*(2D+4)*(c-1)/c, each piece padded to 16 bytes."""
    size, num_tokens, num_heads, width = 4, 3, 8, 32
    partials = random_partials(size, num_tokens, num_heads, width, 0, torch.bfloat16)
    sent = {}
    for name in EXCHANGES:

        def combine(group, name=name):
            EXCHANGES[name]().combine(partials[group.rank], [2] * size, group)
            return group.calls

        sent[name] = run_ranks(size, combine)[0]
    rows = num_tokens * num_heads
    assert sent["ag_rs"] == [
        ("all_gather", rows * 4 * (size - 1)),
        ("reduce_scatter", rows * width * 4 * (size - 1) // size),
    ]
    piece = rows * (2 * width + 4) // size
    assert sent["a2a"] == [("all_to_all", -(-piece // 16) * 16 * (size - 1))]


def test_exchanges_declare_their_wire_dtype():
    dtypes = {name: EXCHANGES[name]().wire_dtype(torch.bfloat16) for name in EXCHANGES}
    assert dtypes == {"ag_rs": torch.float32, "a2a": torch.bfloat16}


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("num_heads", [1, 4, 7, 12])
def test_gathered_queries_are_in_head_order(run_ranks, size, num_heads):
    q = torch.randn(3, num_heads, 5)
    splits = splits_of(num_heads, size)
    own = [q[:, list(shard_range(num_heads, rank, size))] for rank in range(size)]
    for gathered in run_ranks(size, lambda g: gather_query_heads(own[g.rank], splits, g)):
        assert torch.equal(gathered, q)


def test_an_odd_width_travels_in_whole_words():
    out, lse = torch.randn(2, 3, 7).half(), torch.randn(2, 3)
    packed = TorchPieces().pack(AttentionResult(out, lse), [1, 2])
    first = piece_bytes(2, 7, torch.float16)
    assert (first, len(packed)) == (48, 48 + 80)
    rows = packed[first : first + 4 * 16].view(torch.float16).view(2, 2, 8)
    assert torch.equal(rows[..., :7], out[:, 1:])
    assert torch.equal(packed[first + 64 : first + 80].view(torch.float32), lse[:, 1:].flatten())


def refusals(**changes) -> list[str]:
    needs = AttentionNeeds(
        geometry=GQAGeometry(64, 0.125),
        num_q_heads=8,
        num_kv_heads=1,
        page_size=16,
        device="cuda",
        dtype=torch.bfloat16,
    )
    reasons = FusedExchange().refusals(replace(needs, **changes))
    return [reason for reason in reasons if reason != "triton is not installed"]


def test_fused_refuses_what_it_cannot_serve():
    assert refusals() == []
    assert refusals(device="cpu") == ["device 'cpu' is not an NVIDIA GPU"]
    assert refusals(num_hosts=2) == ["the ranks of a group are on 2 hosts, not on one"]
    assert refusals(tp_size=9, dcp_size=9) == ["dcp_size 9 is above 8"]
    assert refusals(dtype=torch.float64) == [
        "dtype torch.float64 is not one of torch.bfloat16, torch.float16, torch.float32"
    ]


def dcp_attention(group, exchange, limits):
    return DcpAttention(
        geometry=GQAGeometry(64, 0.125),
        stripe=StripeLayout(2, group.rank, 4, 1),
        heads=HeadLayout(4, 1, 2, group.rank, 2),
        group=group,
        backend=TorchBackend(),
        exchange=exchange,
        q_mode="replicate",
        limits=limits,
    )


def test_fused_needs_limits_and_ranks_that_map_memory(run_ranks):
    limits = ExchangeLimits(4, torch.float32, torch.device("cpu"))

    def without_limits(group):
        with pytest.raises(ValueError, match="fused owns memory: it must be given its limits"):
            dcp_attention(group, FusedExchange(), None)

    def without_memory(group):
        with pytest.raises(ValueError, match="NCCL ranks of one host, not ThreadGroup"):
            dcp_attention(group, FusedExchange(), limits)

    run_ranks(2, without_limits)
    run_ranks(2, without_memory)


class SharedWords(ThreadGroup):
    """A group of threads that map one another's memory, as GPUs of one host do."""

    def symmetric_words(self, num_words: int, device: torch.device) -> SymmetricWords:
        own = torch.zeros(num_words, dtype=torch.int64)
        mine = torch.tensor([own.data_ptr()])
        return SymmetricWords(own, self.all_gather(mine).flatten())


def test_a_step_above_the_limits_is_refused_when_planned(run_ranks):
    limits = ExchangeLimits(4, torch.float32, torch.device("cpu"))

    def plan(group):
        shared = SharedWords(group.rank, group.size, group.meeting)
        attention = dcp_attention(shared, FusedExchange(), limits)
        batch = DecodeBatch(torch.ones(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32))
        attention.plan_decode(batch, "cpu")
        five = DecodeBatch(
            5 * torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), window=5
        )
        with pytest.raises(ValueError, match="5 tokens is above the 4 that exchange fused"):
            attention.plan_decode(five, "cpu")

    run_ranks(2, plan)


def test_memory_of_a_rank_is_what_the_formula_says():
    """2 slots of c - 1 peers: rows of 8-byte words with 4 bytes of payload, lses, the arrival."""
    layout = FusedLayout(64, 512, torch.bfloat16, (8, 8, 8))
    rows = 64 * 8
    assert layout.num_words == 2 * 2 * (rows * (512 * 2 // 4 + 1) + 2)


class Recorder(FusedExchange):
    """Notes which way a kernel's result came."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[str] = []

    def combine(self, partial, head_splits, group):
        self.ways.append("merged")
        return partial.out

    def combine_splits(self, splits, head_splits, group):
        self.ways.append("splits")
        return splits.out


class WholeKernel:
    """As a vendor's."""

    def gqa(self, q, cache, window_key, window_value):
        return AttentionResult(q, q[..., 0])

    def mla(self, q, cache, window_latent):
        return AttentionResult(q, q[..., 0])


class SplitKernel(WholeKernel):
    """As ours."""

    def gqa_splits(self, q, cache, window_key, window_value):
        return SplitResult(q, q[..., 0], q[:0], q[:0, 0], q[:0, 0, 0], 0)

    def mla_splits(self, q, cache, window_latent):
        return self.gqa_splits(q, cache, None, None)


@pytest.mark.parametrize(("kernel", "way"), [(SplitKernel(), "splits"), (WholeKernel(), "merged")])
def test_splits_are_handed_over_where_the_kernel_gives_them(run_ranks, kernel, way):
    def ways(group):
        exchange = Recorder()
        combiner = SplitCombiner(exchange, group, [1, 1])
        q = torch.ones(1, 2, 3)
        combiner.gqa(kernel, q, GQACache(q, q), None, None)
        combiner.mla(kernel, q, MLACache(q), None)
        return exchange.ways

    assert run_ranks(2, ways) == [[way] * 2] * 2


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_kernels_equal_the_reference_in_the_interpreter():
    """pack, merge, weigh and the fused kernel with 2, 3 and 8 ranks, one of them a step ahead."""
    results = interpreted(Path(__file__).with_name("interpreted_exchange_cases.py"))
    assert {result["size"] for result in results} == {2, 3, 8}
    for result in results:
        # The interpreter cuts values off where the hardware rounds them.
        limit = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[result["dtype"]]
        for kernel, error in result["errors"].items():
            assert error <= limit, (kernel, result)


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_pieces_may_have_more_than_31_bits_of_elements():
    assert interpreted(Path(__file__).with_name("huge_piece_case.py")) == [
        {"row": [1.0, 2.0], "lse": 0.5},
        {"row": [3.0, 4.0], "lse": 0.25},
    ]
