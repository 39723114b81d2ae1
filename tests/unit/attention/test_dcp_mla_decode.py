"""MLA decode and verify over every rank of a worker, against float64 over whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import reference
from attention.dcp import DcpAttention
from attention.dispatch import BACKENDS, EXCHANGES
from attention.interface import DecodeBatch, MLACache, MLAGeometry
from attention.layout import HeadLayout, StripeLayout

SCALE = 0.4
RANK, ROPE = 12, 4


@dataclass(frozen=True)
class Case:
    """A batch on a worker. seq_lens include the window; 0 is a padding row."""

    seq_lens: tuple[int, ...]
    dcp_size: int
    num_groups: int = 1
    num_q_heads: int = 4
    page_size: int = 4
    interleave: int = 1
    window: int = 1
    window_mask: str = "causal"
    exchange: str = "a2a"
    q_mode: str = "gather"
    seed: int = 0


@st.composite
def cases(draw, windows=(1, 1, 1, 2, 3, 5, 9)) -> Case:
    dcp_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    page_size, interleave = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (16, 1)]))
    window = draw(st.sampled_from(windows))
    page = page_size * dcp_size
    committed = st.sampled_from(
        sorted({0, 1, dcp_size - 1, dcp_size, dcp_size + 1, page - 1, page, page + 1, 2 * page + 3})
    )
    lens = draw(st.lists(committed, min_size=1, max_size=4))
    if window > 1:
        lens = [draw(st.sampled_from([0, length + window])) for length in lens]
    return Case(
        seq_lens=tuple(lens),
        dcp_size=dcp_size,
        num_groups=draw(st.sampled_from([1, 2])) if dcp_size <= 4 else 1,
        num_q_heads=draw(st.sampled_from([1, 4, 9, 16])),
        page_size=page_size,
        interleave=interleave,
        window=window,
        window_mask=draw(st.sampled_from(["causal", "full"])),
        exchange=draw(st.sampled_from(["a2a", "ag_rs"])),
        q_mode=draw(st.sampled_from(["gather", "replicate"])),
        seed=draw(st.integers(0, 99)),
    )


def random_inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Rows [L, R + Rr] of each sequence and q [B, w, H, R + Rr], NaN for padding sequences."""
    generator = torch.Generator().manual_seed(case.seed)
    latents = [torch.randn(length, RANK + ROPE, generator=generator) for length in case.seq_lens]
    shape = (len(case.seq_lens), case.window, case.num_q_heads, RANK + ROPE)
    q = torch.randn(shape, generator=generator)
    q[[i for i, length in enumerate(case.seq_lens) if length == 0]] = float("nan")
    return latents, q


def run_mla(case: Case, run_ranks, stripe_rows, latents, q) -> torch.Tensor:
    """Output [B, w, H, R] of all ranks. The window's rows are poison in the pools."""
    held_back = case.window if case.window > 1 else 0
    pools, table = stripe_rows(
        [latents],
        dcp_size=case.dcp_size,
        page_size=case.page_size,
        interleave=case.interleave,
        num_committed=[max(0, length - held_back) for length in case.seq_lens],
        seed=case.seed,
    )
    batch = DecodeBatch(
        torch.tensor(case.seq_lens, dtype=torch.int32), table, case.window, case.window_mask
    )
    poison = torch.full((case.window, RANK + ROPE), float("nan"))
    window = torch.cat([rows[-case.window :] if len(rows) else poison for rows in latents])

    def body(group, first_rank):
        tp_size = case.dcp_size * case.num_groups
        heads = HeadLayout(case.num_q_heads, 1, tp_size, first_rank + group.rank, case.dcp_size)
        attention = DcpAttention(
            geometry=MLAGeometry(RANK, 4, ROPE, 4, SCALE),
            stripe=StripeLayout(case.dcp_size, group.rank, case.page_size, case.interleave),
            heads=heads,
            group=group,
            backend=BACKENDS["torch"](),
            exchange=EXCHANGES[case.exchange](),
            q_mode=case.q_mode,
        )
        passed = heads.local_q_heads if case.q_mode == "gather" else heads.group_q_heads
        own = q.flatten(0, 1)[:, list(passed)]
        return attention.mla_decode(
            own[..., :RANK],
            own[..., RANK:],
            MLACache(pools[group.rank][0]),
            window if group.rank == 0 else torch.full_like(window, float("nan")),
            attention.plan_decode(batch, "cpu"),
        )

    outs = [
        out
        for g in range(case.num_groups)
        for out in run_ranks(case.dcp_size, lambda group, g=g: body(group, g * case.dcp_size))
    ]
    return torch.cat(outs, dim=1).unflatten(0, (len(case.seq_lens), case.window))


def check_mla(case: Case, run_ranks, stripe_rows) -> None:
    latents, q = random_inputs(case)
    out = run_mla(case, run_ranks, stripe_rows, latents, q)
    for i, length in enumerate(case.seq_lens):
        if length == 0:
            assert (out[i] == 0).all()
            continue
        visible = reference.window_visibility(case.window, length, case.window_mask)
        expected = reference.mla_absorbed(
            q[i, ..., :RANK], q[i, ..., RANK:], latents[i], scale=SCALE, visible=visible
        )
        torch.testing.assert_close(out[i].double(), expected.out, rtol=1e-4, atol=2e-5)


@settings(max_examples=80)
@given(case=cases())
def test_mla_equals_attention_over_the_whole_sequence(run_ranks, stripe_rows, case):
    check_mla(case, run_ranks, stripe_rows)


@pytest.mark.parametrize("dcp_size", [1, 3])
@pytest.mark.parametrize("window", [1, 2])
def test_very_uneven_mla_batches(run_ranks, stripe_rows, dcp_size, window):
    lens = (40 * dcp_size, 900 * dcp_size, 0, 60 * dcp_size, 300 * dcp_size, window)
    check_mla(Case(lens, dcp_size, page_size=16, window=window), run_ranks, stripe_rows)


def test_the_value_is_the_latent_without_its_rope_part(run_ranks, stripe_rows):
    case = Case((7, 12), 2)
    latents, q = random_inputs(case)
    for rows in latents:
        rows[:, :RANK], rows[:, RANK:] = 3.0, torch.randn(len(rows), ROPE)
    out = run_mla(case, run_ranks, stripe_rows, latents, q)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))
