"""Steps on the same objects, one after the other, as an engine takes them; and what is refused."""

from __future__ import annotations

import pytest
import torch

from attention import reference
from attention.dcp import DcpAttention
from attention.dispatch import BACKENDS, EXCHANGES
from attention.interface import DecodeBatch, GQACache, GQAGeometry
from attention.layout import HeadLayout, StripeLayout

SCALE = 0.4


class Steps:
    """One sequence on one rank, with a pool that is written row by row."""

    def __init__(self, group, dcp_size: int, q_mode: str = "replicate") -> None:
        self.stripe = StripeLayout(dcp_size, group.rank, 4)
        self.attention = DcpAttention(
            geometry=GQAGeometry(8, SCALE),
            stripe=self.stripe,
            heads=HeadLayout(4, 2, dcp_size, group.rank, dcp_size),
            group=group,
            backend=BACKENDS["torch"](),
            exchange=EXCHANGES["a2a"](),
            q_mode=q_mode,
        )
        self.cache = GQACache(*torch.full((2, 8, 4, 2, 8), float("nan")))
        self.table = torch.tensor([[5, 2, 7, 1, 3, 6, 2**31 - 1]], dtype=torch.int32)

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for position in range(start, start + len(keys)):
            if position % self.stripe.dcp_size != self.stripe.dcp_rank:
                continue
            index = position // self.stripe.dcp_size
            page = int(self.table[0, index // 4])
            self.cache.key[page, index % 4] = keys[position - start]
            self.cache.value[page, index % 4] = values[position - start]

    def attend(self, q, keys, values, seq_len: int) -> torch.Tensor:
        batch = DecodeBatch(torch.tensor([seq_len], dtype=torch.int32), self.table, len(q))
        plan = self.attention.plan_decode(batch, "cpu")
        return self.attention.gqa_decode(q, self.cache, keys, values, plan)


@pytest.mark.parametrize("dcp_size", [1, 2, 3])
@pytest.mark.parametrize("accepted", range(5))
def test_rejected_rows_are_overwritten_and_never_seen_bug_35(run_ranks, dcp_size, accepted):
    """Verify windows of 4 write stale rows for what is rejected. After accepting k of them, decode
    equals a run that never drafted."""
    torch.manual_seed(accepted)
    truth = torch.randn(2, 17 + 4, 2, 8)
    draft = torch.randn(2, 4, 2, 8)
    draft[:, :accepted] = truth[:, 13 : 13 + accepted]
    q = torch.randn(4, 4, 8)
    seq_len = 13 + accepted + 1

    def body(group):
        steps = Steps(group, dcp_size)
        steps.write(0, *truth[:, :13])
        steps.write(13, *draft)
        verified = steps.attend(q, draft[0], draft[1], 17)
        steps.write(13 + accepted, *truth[:, 13 + accepted : seq_len])
        return verified, steps.attend(q[:1], None, None, seq_len)

    results = run_ranks(dcp_size, body)
    verified = torch.cat([result[0] for result in results], dim=1)
    decoded = torch.cat([result[1] for result in results], dim=1)
    drafted = torch.cat([truth[:, :13], draft], dim=1)
    for out, queries_, rows in ((verified, q, drafted), (decoded, q[:1], truth[:, :seq_len])):
        expected = reference.attend(
            queries_,
            rows[0],
            rows[1],
            scale=SCALE,
            kv_index=[0, 0, 1, 1],
            visible=reference.window_visibility(len(queries_), rows.shape[1]),
        )
        torch.testing.assert_close(out.double(), expected.out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_a_short_step_after_a_long_one_sees_nothing_of_it(run_ranks, dcp_size):
    """Buffers and tables of the longer step are stale by then."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 16 * dcp_size, 2, 8)
    q = torch.randn(1, 4, 8)

    def body(group):
        steps = Steps(group, dcp_size)
        steps.write(0, keys, values)
        return [steps.attend(q, None, None, length) for length in (len(keys), 3, 1, 9)]

    outs = [torch.cat(out, dim=1) for out in zip(*run_ranks(dcp_size, body), strict=True)]
    for out, length in zip(outs, (len(keys), 3, 1, 9), strict=True):
        expected = reference.attend(
            q,
            keys[:length],
            values[:length],
            scale=SCALE,
            kv_index=[0, 0, 1, 1],
            visible=reference.window_visibility(1, length),
        )
        torch.testing.assert_close(out.double(), expected.out, rtol=1e-4, atol=1e-5)


def test_planning_needs_no_collective(run_ranks, stripe_rows):
    """Ranks plan at different times; only layers meet."""

    def body(group):
        attention = Steps(group, 2).attention
        batch = DecodeBatch(
            torch.tensor([3], dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32)
        )
        if group.rank == 0:
            attention.plan_decode(batch, "cpu")
        return group.calls

    assert run_ranks(2, body) == [[], []]


def test_contradicting_ranks_are_refused(run_ranks):
    def body(group):
        return DcpAttention(
            geometry=GQAGeometry(8, SCALE),
            stripe=StripeLayout(2, 1, 4),
            heads=HeadLayout(4, 2, 1, 0, 1),
            group=group,
            backend=BACKENDS["torch"](),
            exchange=EXCHANGES["a2a"](),
            q_mode="gather",
        )

    with pytest.raises(ValueError, match=r"stripe \(rank 1 of 2\).*must agree"):
        run_ranks(1, body)


def test_unknown_q_mode_and_wrong_head_counts_are_refused(run_ranks):
    with pytest.raises(ValueError, match="q_mode 'broadcast'"):
        run_ranks(1, lambda group: Steps(group, 1, q_mode="broadcast"))

    def body(group):
        steps = Steps(group, 1)
        return steps.attend(torch.zeros(1, 3, 8), None, None, 5)

    with pytest.raises(ValueError, match=r"1 tokens of 3 heads; .* passes 4 heads"):
        run_ranks(1, body)


def test_a_pool_of_other_heads_is_refused_bug_16(run_ranks):
    def body(group):
        steps = Steps(group, 1)
        steps.cache = GQACache(steps.cache.key[:, :, :1], steps.cache.value[:, :, :1])
        return steps.attend(torch.zeros(1, 4, 8), None, None, 5)

    with pytest.raises(ValueError, match=r"pool keeps 1 KV heads; .* read 2"):
        run_ranks(1, body)
