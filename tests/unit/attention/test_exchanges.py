"""ag_rs and a2a against the float64 merge, any group size and head split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import reference
from attention.dispatch import EXCHANGES
from attention.exchanges.query import gather_query_heads
from attention.interface import AttentionResult
from attention.layout import shard_range

NO_KEYS = float("-inf")


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
    the gathered LSEs; all-to-all T*H*(2D+4)*(c-1)/c."""
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
    assert sent["a2a"] == [("all_to_all", rows * (2 * width + 4) * (size - 1) // size)]


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
