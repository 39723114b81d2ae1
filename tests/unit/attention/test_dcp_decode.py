"""GQA decode and verify over every rank of a worker, against float64 over whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attention import reference
from attention.dcp import DcpAttention
from attention.dispatch import BACKENDS, EXCHANGES
from attention.interface import DecodeBatch, GQACache, GQAGeometry
from attention.layout import HeadLayout, StripeLayout

SCALE = 0.4


@dataclass(frozen=True)
class Case:
    """A batch on a worker. seq_lens include the window; 0 is a padding row."""

    seq_lens: tuple[int, ...]
    dcp_size: int
    num_groups: int = 1
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 4
    interleave: int = 1
    window: int = 1
    window_mask: str = "causal"
    exchange: str = "a2a"
    q_mode: str = "gather"
    shuffle_pages: bool = True
    seed: int = 0


def dcp_attention(case: Case, group, tp_rank: int, geometry, num_kv_heads: int) -> DcpAttention:
    return DcpAttention(
        geometry=geometry,
        stripe=StripeLayout(case.dcp_size, group.rank, case.page_size, case.interleave),
        heads=HeadLayout(
            case.num_q_heads,
            num_kv_heads,
            case.dcp_size * case.num_groups,
            tp_rank,
            case.dcp_size,
        ),
        group=group,
        backend=BACKENDS["torch"](),
        exchange=EXCHANGES[case.exchange](),
        q_mode=case.q_mode,
    )


def random_rows(case: Case, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    return [torch.randn(length, *shape, generator=generator) for length in case.seq_lens]


def committed_lens(case: Case) -> list[int]:
    """Rows that exist in the pool; the window of a verify step is stale there, so poison."""
    held_back = case.window if case.window > 1 else 0
    return [max(0, length - held_back) for length in case.seq_lens]


def window_rows(case: Case, rows: list[torch.Tensor]) -> torch.Tensor:
    """[B*w, ...] in-hand rows; NaN for padding sequences."""
    poison = torch.full((case.window, *rows[0].shape[1:]), float("nan"))
    return torch.cat([r[-case.window :] if len(r) else poison for r in rows])


def queries(case: Case, num_heads: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (len(case.seq_lens), case.window, num_heads, width)
    q = torch.randn(shape, generator=generator)
    q[[i for i, length in enumerate(case.seq_lens) if length == 0]] = float("nan")
    return q


def given_heads(case: Case, heads: HeadLayout) -> list[int]:
    return list(heads.local_q_heads if case.q_mode == "gather" else heads.group_q_heads)


def run_gqa(case: Case, run_ranks, stripe_rows, keys, values, q) -> torch.Tensor:
    """Output [B, w, H, D] of all tensor-parallel ranks, from striped and poisoned pools."""
    pools, table = stripe_rows(
        [keys, values],
        dcp_size=case.dcp_size,
        page_size=case.page_size,
        interleave=case.interleave,
        num_committed=committed_lens(case),
        shuffle_pages=case.shuffle_pages,
        seed=case.seed,
    )
    batch = DecodeBatch(
        torch.tensor(case.seq_lens, dtype=torch.int32), table, case.window, case.window_mask
    )
    window_key, window_value = window_rows(case, keys), window_rows(case, values)

    def body(group, first_rank):
        attention = dcp_attention(
            case,
            group,
            first_rank + group.rank,
            GQAGeometry(case.head_dim, SCALE),
            case.num_kv_heads,
        )
        heads = HeadLayout(
            case.num_q_heads,
            case.num_kv_heads,
            case.dcp_size * case.num_groups,
            first_rank + group.rank,
            case.dcp_size,
        )
        kept = list(heads.group_kv_heads)
        key, value = (pool[:, :, kept] for pool in pools[group.rank])
        has_window = group.rank == 0
        poison = torch.full_like(window_key[:, kept], float("nan"))
        plan = attention.plan_decode(batch, "cpu")
        return attention.gqa_decode(
            q.flatten(0, 1)[:, given_heads(case, heads)].contiguous(),
            GQACache(key.contiguous(), value.contiguous()),
            window_key[:, kept] if has_window else poison,
            window_value[:, kept] if has_window else poison,
            plan,
        )

    outs = [
        out
        for g in range(case.num_groups)
        for out in run_ranks(case.dcp_size, lambda group, g=g: body(group, g * case.dcp_size))
    ]
    return torch.cat(outs, dim=1).unflatten(0, (len(case.seq_lens), case.window))


def expected_gqa(case: Case, keys, values, q) -> torch.Tensor:
    kv_index = [h * case.num_kv_heads // case.num_q_heads for h in range(case.num_q_heads)]
    outs = []
    for i, length in enumerate(case.seq_lens):
        if length == 0:
            outs.append(torch.zeros(q.shape[1:], dtype=torch.float64))
            continue
        visible = reference.window_visibility(case.window, length, case.window_mask)
        outs.append(
            reference.attend(
                q[i], keys[i], values[i], scale=SCALE, kv_index=kv_index, visible=visible
            ).out
        )
    return torch.stack(outs)


def check_gqa(case: Case, run_ranks, stripe_rows, *, sharpen: float = 1.0) -> None:
    keys = random_rows(case, case.num_kv_heads, case.head_dim)
    values = random_rows(replace(case, seed=case.seed + 7), case.num_kv_heads, case.head_dim)
    q = sharpen * queries(case, case.num_q_heads, case.head_dim)
    out = run_gqa(case, run_ranks, stripe_rows, keys, values, q)
    torch.testing.assert_close(
        out.double(), expected_gqa(case, keys, values, q), rtol=1e-4, atol=2e-5
    )


@st.composite
def gqa_cases(draw, windows=(1,)) -> Case:
    dcp_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    page_size, interleave = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (16, 1)]))
    window = draw(st.sampled_from(windows))
    page = page_size * dcp_size
    committed = st.sampled_from(
        sorted({0, 1, dcp_size - 1, dcp_size, dcp_size + 1, page - 1, page, page + 1, 2 * page + 3})
    )
    lens = draw(st.lists(committed, min_size=1, max_size=4))
    if window > 1:
        padding = draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens)))
        lens = [
            0 if is_padding else length + window
            for length, is_padding in zip(lens, padding, strict=True)
        ]
    num_q_heads, num_kv_heads = draw(
        st.sampled_from([(4, 1), (4, 2), (6, 6), (9, 3), (12, 3), (8, 4), (10, 2), (2, 1)])
    )
    return Case(
        seq_lens=tuple(lens),
        dcp_size=dcp_size,
        num_groups=draw(st.sampled_from([1, 2])) if dcp_size <= 4 else 1,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 24])),
        page_size=page_size,
        interleave=interleave,
        window=window,
        window_mask=draw(st.sampled_from(["causal", "full"])),
        exchange=draw(st.sampled_from(["a2a", "ag_rs"])),
        q_mode=draw(st.sampled_from(["gather", "replicate"])),
        shuffle_pages=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60)
@given(case=gqa_cases())
def test_gqa_decode_equals_attention_over_the_whole_sequence(run_ranks, stripe_rows, case):
    check_gqa(case, run_ranks, stripe_rows)


@settings(max_examples=60)
@given(case=gqa_cases(windows=tuple(range(2, 10))))
def test_gqa_verify_equals_attention_over_the_whole_sequence(run_ranks, stripe_rows, case):
    check_gqa(case, run_ranks, stripe_rows)


@pytest.mark.parametrize("dcp_size", [2, 3, 4])
@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("exchange", ["a2a", "ag_rs"])
def test_a_needle_on_each_rank_in_turn_bug_1(run_ranks, stripe_rows, dcp_size, position, exchange):
    """A short sequence with one dominating score, where a wrong LSE base shows; long random data
    hides it."""
    case = Case((9,), dcp_size, num_q_heads=4, num_kv_heads=1, exchange=exchange)
    keys, values = random_rows(case, 1, 8), random_rows(replace(case, seed=5), 1, 8)
    q = queries(case, 4, 8)
    keys[0][position] = 3.0 * q[0, 0].mean(dim=0)
    out = run_gqa(case, run_ranks, stripe_rows, keys, values, q)
    torch.testing.assert_close(
        out.double(), expected_gqa(case, keys, values, q), rtol=1e-4, atol=1e-5
    )


def test_short_sequence_with_one_score_of_two_bug_2(run_ranks, stripe_rows):
    """L = 5, c = 4, s = [0, 0, 0, 0, 2], v = 1..5 -> 4.12196; a wrong base gives 3.90299."""
    case = Case((5,), 4, num_q_heads=1, num_kv_heads=1, head_dim=1)
    keys = [torch.tensor([0.0, 0, 0, 0, 2]).view(5, 1, 1) / SCALE]
    values = [torch.arange(1.0, 6.0).view(5, 1, 1)]
    out = run_gqa(case, run_ranks, stripe_rows, keys, values, torch.ones(1, 1, 1, 1))
    assert float(out) == pytest.approx(4.121964, abs=1e-5)


@pytest.mark.parametrize("dcp_size", [1, 4])
def test_padding_sequences_give_zero_bugs_8_and_11(run_ranks, stripe_rows, dcp_size):
    """Their queries, window and pages are NaN or huge."""
    for window in (1, 2):
        case = Case((5, 7, 3, 0), dcp_size, window=window)
        check_gqa(case, run_ranks, stripe_rows)
        only_padding = Case((0, 0), dcp_size, window=window)
        check_gqa(only_padding, run_ranks, stripe_rows)


@pytest.mark.parametrize("dcp_size", [1, 2, 4])
@pytest.mark.parametrize("q_mode", ["gather", "replicate"])
@pytest.mark.parametrize("window", [1, 2])
def test_global_kv_head_mapping_bug_13(run_ranks, stripe_rows, dcp_size, q_mode, window):
    """Hq 32, Hkv 2, value head k filled with k: half of the heads return 0, half 1."""
    case = Case((6, 9), dcp_size, num_q_heads=32, num_kv_heads=2, q_mode=q_mode, window=window)
    keys = random_rows(case, 2, 8)
    values = [torch.arange(2.0).view(1, 2, 1).expand(n, 2, 8).clone() for n in case.seq_lens]
    out = run_gqa(case, run_ranks, stripe_rows, keys, values, queries(case, 32, 8))
    torch.testing.assert_close(out[:, :, :16], torch.zeros(2, window, 16, 8))
    torch.testing.assert_close(out[:, :, 16:], torch.ones(2, window, 16, 8))


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "dcp_size", "num_groups"),
    [
        (12, 3, 4, 1),
        (24, 6, 4, 1),
        (20, 5, 4, 1),
        (12, 3, 2, 1),
        (9, 3, 2, 1),
        (9, 3, 1, 2),
        (9, 3, 2, 2),
        (4, 2, 6, 1),
        (1, 1, 2, 2),
    ],
)
@pytest.mark.parametrize("window", [1, 3])
def test_heads_that_straddle_kv_heads_and_ranks_without_heads(
    run_ranks, stripe_rows, num_q_heads, num_kv_heads, dcp_size, num_groups, window
):
    """A slice of KV heads from a local ratio fails on all of these."""
    case = Case(
        (5, 4, 13),
        dcp_size,
        num_groups=num_groups,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        window=window,
    )
    check_gqa(case, run_ranks, stripe_rows)


@pytest.mark.parametrize("rank_count", [2, 4])
def test_window_mass_is_counted_once(run_ranks, stripe_rows, rank_count):
    """8 uniform keys, w = 2: the window weighs 0.2; counted on all 4 ranks it would weigh 0.5."""
    case = Case((10,), rank_count, num_q_heads=4, num_kv_heads=1, window=2, window_mask="full")
    keys = [torch.zeros(10, 1, 8)]
    values = [torch.zeros(10, 1, 8)]
    values[0][8:] = 1.0
    out = run_gqa(case, run_ranks, stripe_rows, keys, values, queries(case, 4, 8))
    torch.testing.assert_close(out, torch.full_like(out, 0.2))


@pytest.mark.parametrize(
    ("dcp_size", "seq_len", "window", "interleave"),
    [(2, 10, 3, 1), (8, 32, 8, 1), (4, 18, 2, 4)],
)
def test_no_window_query_sees_too_few_committed_keys_bugs_32_and_34(
    run_ranks, stripe_rows, dcp_size, seq_len, window, interleave
):
    case = Case((seq_len,), dcp_size, interleave=interleave, window=window)
    check_gqa(case, run_ranks, stripe_rows, sharpen=3.0)


@pytest.mark.parametrize("window_mask", ["causal", "full"])
def test_causal_and_full_windows_differ_where_they_should(run_ranks, stripe_rows, window_mask):
    case = Case((6,), 2, window=4, window_mask=window_mask)
    check_gqa(case, run_ranks, stripe_rows)


def test_a_window_without_any_committed_token(run_ranks, stripe_rows):
    for lens in [(3,), (3, 3), (3, 12, 0)]:
        check_gqa(Case(lens, 4, window=3), run_ranks, stripe_rows)


@pytest.mark.parametrize("dcp_size", [1, 3])
@pytest.mark.parametrize("window", [1, 2])
def test_very_uneven_batches_are_cut_into_pieces_and_put_back_in_order(
    run_ranks, stripe_rows, dcp_size, window
):
    lens = (40 * dcp_size, 900 * dcp_size, 0, 60 * dcp_size, 300 * dcp_size, window)
    case = Case(lens, dcp_size, num_q_heads=2, num_kv_heads=1, page_size=16, window=window)
    check_gqa(case, run_ranks, stripe_rows)


@settings(max_examples=15)
@given(seeds=st.lists(st.integers(0, 1000), min_size=2, max_size=2, unique=True))
def test_where_the_pages_lie_does_not_matter(run_ranks, stripe_rows, seeds):
    """The same tokens in differently permuted pages give the same bits."""
    case = Case((21, 5, 40), 3, page_size=4)
    keys, values = random_rows(case, 2, 8), random_rows(replace(case, seed=9), 2, 8)
    q = queries(case, 4, 8)
    outs = []
    for seed in seeds:
        placed = replace(case, seed=seed)
        outs.append(run_gqa(placed, run_ranks, stripe_rows, keys, values, q))
    assert torch.equal(*outs)


@pytest.mark.parametrize("lens", [(37,), (16,), (24, 24, 24)])
@pytest.mark.parametrize("exchange", ["a2a", "ag_rs"])
def test_one_rank_is_bit_identical_to_plain_attention(run_ranks, stripe_rows, lens, exchange):
    """c = 1 against torch's own attention over unpaged tensors."""
    case = Case(lens, 1, num_q_heads=6, num_kv_heads=2, page_size=4, exchange=exchange)
    keys, values = random_rows(case, 2, 8), random_rows(replace(case, seed=3), 2, 8)
    q = queries(case, 6, 8)
    out = run_gqa(case, run_ranks, stripe_rows, keys, values, q)
    plain = F.scaled_dot_product_attention(
        q.view(len(lens), 2, 3, 8),
        torch.stack(keys).transpose(1, 2),
        torch.stack(values).transpose(1, 2),
        scale=SCALE,
    )
    assert torch.equal(out, plain.reshape(out.shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exchange", ["a2a", "ag_rs"])
def test_half_precision_models(run_ranks, stripe_rows, dtype, exchange):
    for window in (1, 3):
        case = Case((30, 3, 11), 3, num_q_heads=9, num_kv_heads=3, window=window, exchange=exchange)
        keys = [rows.to(dtype) for rows in random_rows(case, 3, 8)]
        values = [rows.to(dtype) for rows in random_rows(replace(case, seed=3), 3, 8)]
        q = queries(case, 9, 8).to(dtype)
        out = run_gqa(case, run_ranks, stripe_rows, keys, values, q)
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.double(), expected_gqa(case, keys, values, q), rtol=2e-2, atol=1e-2
        )


@pytest.mark.parametrize(
    ("q_mode", "exchange", "collectives"),
    [
        ("gather", "a2a", ["all_gather", "all_to_all"]),
        ("replicate", "a2a", ["all_to_all"]),
        ("gather", "ag_rs", ["all_gather", "all_gather", "reduce_scatter"]),
        ("replicate", "ag_rs", ["all_gather", "reduce_scatter"]),
    ],
)
@pytest.mark.parametrize("dcp_size", [1, 2])
def test_collectives_of_a_layer(run_ranks, stripe_rows, q_mode, exchange, collectives, dcp_size):
    """None at all for c = 1; one with replicated q and a2a."""
    case = Case((5,), dcp_size, q_mode=q_mode, exchange=exchange)
    names = []

    def recording(size, body):
        def recorded(group):
            out = body(group)
            names.append([name for name, _ in group.calls])
            return out

        return run_ranks(size, recorded)

    check_gqa(case, recording, stripe_rows)
    assert names == [collectives if dcp_size > 1 else []] * dcp_size
