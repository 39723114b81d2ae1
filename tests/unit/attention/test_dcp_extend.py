"""Prefill and extend over every rank of a worker, against float64 attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import reference
from attention.dcp import DcpAttention
from attention.dispatch import BACKENDS, EXCHANGES
from attention.interface import (
    ExtendBatch,
    GQACache,
    GQAGeometry,
    LatentExpansion,
    MLACache,
    MLAGeometry,
)
from attention.layout import HeadLayout, StripeLayout

SCALE = 0.4
RANK, NOPE, ROPE = 10, 6, 4


@dataclass(frozen=True)
class Case:
    """Chunks after prefixes on a worker."""

    prefix_lens: tuple[int, ...]
    chunk_lens: tuple[int, ...]
    dcp_size: int
    num_groups: int = 1
    num_q_heads: int = 4
    num_kv_heads: int = 2
    page_size: int = 4
    interleave: int = 1
    q_mode: str = "gather"
    shuffle_pages: bool = True
    seed: int = 0

    @property
    def totals(self) -> list[int]:
        return [p + c for p, c in zip(self.prefix_lens, self.chunk_lens, strict=True)]

    def heads(self, tp_rank: int, num_kv_heads: int) -> HeadLayout:
        tp_size = self.dcp_size * self.num_groups
        return HeadLayout(self.num_q_heads, num_kv_heads, tp_size, tp_rank, self.dcp_size)


def random_rows(case: Case, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * case.seed + seed)
    return [torch.randn(total, *shape, generator=generator) for total in case.totals]


def chunks(case: Case, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([r[p:] for r, p in zip(rows, case.prefix_lens, strict=True)])


def run_workers(case: Case, run_ranks, stripe_rows, tensors, geometry, num_kv_heads, layer):
    """layer(attention, heads, pools, plan) -> [T, Hl, Dv]; returns all heads of all ranks."""
    pools, table = stripe_rows(
        tensors,
        dcp_size=case.dcp_size,
        page_size=case.page_size,
        interleave=case.interleave,
        num_committed=case.prefix_lens,
        shuffle_pages=case.shuffle_pages,
        seed=case.seed,
    )
    batch = ExtendBatch(list(case.prefix_lens), list(case.chunk_lens), table)

    def body(group, first_rank):
        heads = case.heads(first_rank + group.rank, num_kv_heads)
        attention = DcpAttention(
            geometry=geometry,
            stripe=StripeLayout(case.dcp_size, group.rank, case.page_size, case.interleave),
            heads=heads,
            group=group,
            backend=BACKENDS["torch"](),
            exchange=EXCHANGES["a2a"](),
            q_mode=case.q_mode,
        )
        plan = attention.plan_extend(batch, "cpu")
        return layer(attention, heads, pools[group.rank], plan), group.calls

    results = [
        result
        for g in range(case.num_groups)
        for result in run_ranks(case.dcp_size, lambda group, g=g: body(group, g * case.dcp_size))
    ]
    return torch.cat([out for out, _ in results], dim=1), [calls for _, calls in results]


def run_gqa(case: Case, run_ranks, stripe_rows, keys, values, q, dtype=torch.float32):
    key, value = chunks(case, keys), chunks(case, values)

    def layer(attention, heads, pools, plan):
        kept = list(heads.group_kv_heads)
        return attention.gqa_extend(
            chunks(case, q)[:, list(heads.local_q_heads)],
            key[:, kept],
            value[:, kept],
            GQACache(*(pool[:, :, kept].contiguous() for pool in pools)),
            plan,
        )

    geometry = GQAGeometry(keys[0].shape[-1], SCALE)
    return run_workers(
        case, run_ranks, stripe_rows, [keys, values], geometry, case.num_kv_heads, layer
    )


def check_gqa(case: Case, run_ranks, stripe_rows) -> list:
    keys = random_rows(case, case.num_kv_heads, 8, seed=1)
    values = random_rows(case, case.num_kv_heads, 8, seed=2)
    q = random_rows(case, case.num_q_heads, 8, seed=3)
    out, calls = run_gqa(case, run_ranks, stripe_rows, keys, values, q)
    expected = [
        reference.attend(
            q[i][prefix:],
            keys[i],
            values[i],
            scale=SCALE,
            kv_index=[h * case.num_kv_heads // case.num_q_heads for h in range(case.num_q_heads)],
            visible=reference.window_visibility(case.chunk_lens[i], case.totals[i]),
        ).out
        for i, prefix in enumerate(case.prefix_lens)
    ]
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-4, atol=2e-5)
    return calls


@st.composite
def cases(draw) -> Case:
    dcp_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    page_size, interleave = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (16, 1)]))
    page = page_size * dcp_size
    prefix = st.sampled_from(
        sorted({0, 1, dcp_size - 1, dcp_size, dcp_size + 1, page - 1, page, page + 1, 2 * page})
    )
    count = draw(st.integers(1, 3))
    num_q_heads, num_kv_heads = draw(
        st.sampled_from([(4, 1), (4, 2), (6, 6), (9, 3), (12, 3), (8, 4), (2, 1)])
    )
    return Case(
        prefix_lens=tuple(draw(st.lists(prefix, min_size=count, max_size=count))),
        chunk_lens=tuple(
            draw(st.lists(st.sampled_from([0, 1, 2, 7]), min_size=count, max_size=count))
        ),
        dcp_size=dcp_size,
        num_groups=draw(st.sampled_from([1, 2])) if dcp_size <= 4 else 1,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        interleave=interleave,
        q_mode=draw(st.sampled_from(["gather", "replicate"])),
        shuffle_pages=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60)
@given(case=cases())
def test_gqa_extend_equals_attention_over_prefix_and_chunk(run_ranks, stripe_rows, case):
    check_gqa(case, run_ranks, stripe_rows)


def run_mla(case: Case, run_ranks, stripe_rows, latents, q, expansion, gives_group_heads=False):
    latent = chunks(case, latents)
    geometry = MLAGeometry(RANK, NOPE, ROPE, expansion.w_vc.shape[-1], SCALE)

    def layer(attention, heads, pools, plan):
        given_heads = list(heads.group_q_heads if gives_group_heads else heads.local_q_heads)
        return attention.mla_extend(
            chunks(case, q)[:, list(heads.local_q_heads)],
            latent,
            MLACache(pools[0]),
            LatentExpansion(*(weight[given_heads] for weight in expansion)),
            plan,
        )

    return run_workers(case, run_ranks, stripe_rows, [latents], geometry, 1, layer)


def random_expansion(num_heads: int, value_width: int) -> LatentExpansion:
    generator = torch.Generator().manual_seed(5)
    return LatentExpansion(
        torch.randn(num_heads, NOPE, RANK, generator=generator),
        torch.randn(num_heads, RANK, value_width, generator=generator),
    )


@settings(max_examples=40)
@given(case=cases(), value_width=st.sampled_from([3, 10, 16]), gives_group_heads=st.booleans())
def test_mla_extend_equals_attention_over_prefix_and_chunk(
    run_ranks, stripe_rows, case, value_width, gives_group_heads
):
    """Values narrower than, as wide as and wider than the keys of 10."""
    latents = random_rows(case, RANK + ROPE, seed=1)
    q = random_rows(case, case.num_q_heads, NOPE + ROPE, seed=2)
    expansion = random_expansion(case.num_q_heads, value_width)
    out, _ = run_mla(case, run_ranks, stripe_rows, latents, q, expansion, gives_group_heads)
    expected = [
        reference.mla_expanded(
            q[i][prefix:],
            latents[i],
            expansion,
            scale=SCALE,
            visible=reference.window_visibility(case.chunk_lens[i], case.totals[i]),
        ).out
        for i, prefix in enumerate(case.prefix_lens)
    ]
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dcp_size", [2, 3, 4])
@pytest.mark.parametrize("num_pages", range(4))
def test_a_prefix_hit_at_every_page_multiple(run_ranks, stripe_rows, dcp_size, num_pages):
    """Whether a prefix was cached or computed in the chunk, the last tokens see the same."""
    page = 2 * dcp_size
    total = 3 * page + 5
    prefix = num_pages * page
    hit = Case((prefix,), (total - prefix,), dcp_size, page_size=2)
    computed = Case((0,), (total,), dcp_size, page_size=2)
    keys, values = random_rows(computed, 2, 8, seed=1), random_rows(computed, 2, 8, seed=2)
    q = random_rows(computed, 4, 8, seed=3)
    cold, _ = run_gqa(computed, run_ranks, stripe_rows, keys, values, q)
    warm, _ = run_gqa(hit, run_ranks, stripe_rows, keys, values, q)
    torch.testing.assert_close(warm, cold[prefix:], rtol=1e-5, atol=1e-5)


def test_the_suffix_keeps_its_share_of_a_prefix_hit_bug_3(run_ranks, stripe_rows):
    """Uniform scores, prefix 3072, suffix 64: the suffix weighs 0.0204 at its last token."""
    case = Case((3072,), (64,), 2, num_q_heads=2, num_kv_heads=1, page_size=16)
    keys = [torch.zeros(3136, 1, 8)]
    values = [torch.zeros(3136, 1, 8)]
    values[0][3072:] = 1.0
    out, _ = run_gqa(case, run_ranks, stripe_rows, keys, values, random_rows(case, 2, 8))
    torch.testing.assert_close(out[-1], torch.full((2, 8), 64 / 3136), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_lens", [(5, 3), (0, 0)])
def test_empty_prefixes_are_skipped_by_every_rank_bug_10(run_ranks, stripe_rows, chunk_lens):
    case = Case((0, 0), chunk_lens, 4)
    assert check_gqa(case, run_ranks, stripe_rows) == [[]] * 4


def test_one_gather_carries_keys_and_values_of_all_sequences(run_ranks, stripe_rows):
    """Each of 3 ranks sends ceil(5/3) + ceil(7/3) rows of K and V of 2 heads of 8 floats."""
    case = Case((5, 0, 7), (2, 2, 2), 3, page_size=1)
    calls = check_gqa(case, run_ranks, stripe_rows)
    sent = (2 + 3) * 2 * 2 * 8 * 4 * (3 - 1)
    assert calls == [[("all_gather", sent)]] * 3


def test_a_single_rank_needs_no_collective(run_ranks, stripe_rows):
    assert check_gqa(Case((5, 7), (2, 3), 1), run_ranks, stripe_rows) == [[]]


def test_a_prefix_that_only_rank_0_holds(run_ranks, stripe_rows):
    """Ranks 1..7 have nothing to send, and their page 0 is poison."""
    check_gqa(Case((1,), (2,), 8, page_size=1), run_ranks, stripe_rows)


@pytest.mark.parametrize("dcp_size", [1, 2])
@pytest.mark.parametrize("shuffle_pages", [False, True])
def test_chunks_longer_than_a_block_of_queries(run_ranks, stripe_rows, dcp_size, shuffle_pages):
    case = Case(
        (40, 0),
        (600, 270),
        dcp_size,
        num_q_heads=1,
        num_kv_heads=1,
        page_size=16,
        shuffle_pages=shuffle_pages,
    )
    keys, values, q = (random_rows(case, 1, 8, seed=seed) for seed in (1, 2, 3))
    out, _ = run_gqa(case, run_ranks, stripe_rows, keys, values, q)
    picked = [0, 1, 255, 256, 257, 511, 512, 599, 600, 855, 856, 869]
    for token in picked:
        i, query = (0, token) if token < 600 else (1, token - 600)
        seen = case.prefix_lens[i] + query + 1
        expected = reference.attend(
            q[i][seen - 1 : seen],
            keys[i],
            values[i],
            scale=SCALE,
            kv_index=[0],
            visible=torch.arange(case.totals[i])[None] < seen,
        )
        torch.testing.assert_close(out[token].double(), expected.out[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "dcp_size"),
    [(12, 3, 4), (24, 6, 4), (20, 5, 4), (12, 3, 2), (9, 3, 2), (2, 1, 4), (32, 2, 4)],
)
def test_local_heads_read_the_kv_heads_of_their_global_ids_bug_13(
    run_ranks, stripe_rows, num_q_heads, num_kv_heads, dcp_size
):
    """Value head k is filled with k."""
    case = Case(
        (5,), (3,), dcp_size, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, page_size=2
    )
    keys = random_rows(case, num_kv_heads, 8, seed=1)
    filled = torch.arange(float(num_kv_heads)).view(1, -1, 1).expand(8, -1, 8).clone()
    q = random_rows(case, num_q_heads, 8, seed=3)
    out, _ = run_gqa(case, run_ranks, stripe_rows, keys, [filled], q)
    for head in range(num_q_heads):
        kv_head = head * num_kv_heads // num_q_heads
        torch.testing.assert_close(out[:, head], torch.full((3, 8), float(kv_head)))


def test_half_precision(run_ranks, stripe_rows):
    for chunk in (3, 300):
        case = Case((9,), (chunk,), 2, num_q_heads=2, num_kv_heads=1)
        keys, values, q = (
            [rows.to(torch.bfloat16) for rows in random_rows(case, heads, 8, seed=heads)]
            for heads in (1, 1, 2)
        )
        out, _ = run_gqa(case, run_ranks, stripe_rows, keys, values, q)
        assert out.dtype == torch.bfloat16
        expected = reference.attend(
            q[0][-1:],
            keys[0],
            values[0],
            scale=SCALE,
            kv_index=[0, 0],
            visible=reference.window_visibility(1, case.totals[0]),
        )
        torch.testing.assert_close(out[-1].double(), expected.out[0], rtol=2e-2, atol=1e-2)


def test_an_expansion_of_other_heads_is_refused(run_ranks, stripe_rows):
    case = Case((0,), (2,), 1, num_q_heads=4)
    latents, q = random_rows(case, RANK + ROPE), random_rows(case, 4, NOPE + ROPE)

    def layer(attention, heads, pools, plan):
        return attention.mla_extend(
            chunks(case, q), latents[0], MLACache(pools[0]), random_expansion(3, 4), plan
        )

    geometry = MLAGeometry(RANK, NOPE, ROPE, 4, SCALE)
    with pytest.raises(ValueError, match="expansion has 3 heads; expected the rank's 4"):
        run_workers(case, run_ranks, stripe_rows, [latents], geometry, 1, layer)
