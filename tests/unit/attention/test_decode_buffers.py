"""What is refused when plans are written into buffers, and bounds that hold every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.backends.device_plan import DevicePlan, ReservedPlan, SplitLimits
from attention.backends.split_plan import (
    balanced_bounds,
    balanced_plan,
    fixed_bounds,
    fixed_plan,
    num_keyless_workers,
)
from attention.backends.torch_backend import TorchBackend
from attention.dcp import DcpAttention
from attention.decode_buffers import DecodeBuffers, decode_bounds
from attention.exchanges.ag_rs import AgRsExchange
from attention.interface import DecodeBatch, GQAGeometry
from attention.layout import HeadLayout, StripeLayout
from attention.rows import decode_rows
from tools.thread_ranks import thread_groups

STRIPE = StripeLayout(1, 0, 4)
TABLE = torch.arange(24, dtype=torch.int32).view(2, 12)


class _Filled:
    """Stands for a backend's buffers: keeps the rows that were filled in."""

    def __init__(self) -> None:
        self.rows: list[object] = []

    def fill(self, rows):
        self.rows.append(rows)
        return self

    def grow(self):
        self.rows.append("grown")


def buffers(**changes) -> DecodeBuffers:
    made = DecodeBuffers(2, 40, 3, "causal", STRIPE, _Filled())
    return replace(made, **changes)


def layer() -> DcpAttention:
    return DcpAttention(
        geometry=GQAGeometry(8, 0.4),
        stripe=STRIPE,
        heads=HeadLayout(2, 1, 1, 0, 1),
        group=thread_groups(1, 1)[0][0],
        backend=TorchBackend(),
        exchange=AgRsExchange(),
        q_mode="gather",
    )


def batch(*lengths: int, window: int = 3, mask: str = "causal") -> DecodeBatch:
    return DecodeBatch(
        torch.tensor(lengths, dtype=torch.int32), TABLE[: len(lengths)], window, mask
    )


def test_a_step_within_the_bounds_is_filled_in():
    into = buffers()
    plan = layer().plan_decode(batch(43, 0), "cpu", into=into)
    assert plan.kernel is into.reserved
    assert plan.num_tokens == 6
    assert into.reserved.rows[0].committed_lens == (40, 0)


@pytest.mark.parametrize(
    ("given_batch", "changes", "message"),
    [
        (batch(9), {}, "the batch has 1 rows, the buffers 2"),
        (batch(9, 44), {}, r"length 44 is outside \[0, 43\]"),
        (batch(9, 9, window=2), {}, "window 2 'causal' is not that of the buffers, 3 'causal'"),
        (batch(9, 9, mask="full"), {}, "window 3 'full' is not that of the buffers"),
        (batch(9, 9), {"stripe": StripeLayout(2, 1, 4)}, "the buffers are of StripeLayout"),
        (batch(9, 43), {"max_growth": 6}, "length 43 may grow by 6, above the page table's 48"),
    ],
)
def test_a_step_outside_the_bounds_is_refused(given_batch, changes, message):
    into = buffers(**changes)
    with pytest.raises(ValueError, match=message):
        layer().plan_decode(given_batch, "cpu", into=into)
    assert into.reserved.rows == []


def test_the_mask_of_plain_decode_does_not_matter():
    into = buffers(window=1)
    layer().plan_decode(batch(9, 9, window=1, mask="full"), "cpu", into=into)
    assert len(into.reserved.rows) == 1


def test_a_backend_that_cannot_be_captured_says_so():
    with pytest.raises(NotImplementedError, match=r"backend torch .* cannot be captured"):
        layer().decode_buffers(
            batch_size=2,
            max_len=40,
            window=1,
            window_mask="causal",
            dtype=torch.float32,
            kv_dtype=torch.float32,
            device="cpu",
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size 0 must be >= 1"),
        ({"max_len": 0}, "max_len 0 must be >= 1"),
        ({"window": 0}, "window 0 must be >= 1"),
        ({"window_mask": "none"}, "window_mask 'none' must be one of"),
        ({"max_growth": -1}, "max_growth -1 must be 0"),
        ({"max_growth": 1, "stripe": StripeLayout(2, 0, 4)}, "the stripe is of 2"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(changes, message):
    sizes = {"batch_size": 2, "max_len": 40, "window": 1, "window_mask": "causal", **changes}
    with pytest.raises(ValueError, match=message):
        decode_bounds(sizes.pop("stripe", STRIPE), **sizes)


@pytest.mark.parametrize("dcp_size", [1, 2, 3])
def test_every_rank_has_the_bounds_of_the_first(dcp_size):
    """n_0(max_len + window): 22 of 43 tokens for c = 2, 15 for c = 3."""
    bounds = [
        decode_bounds(
            StripeLayout(dcp_size, rank, 4), batch_size=2, max_len=40, window=3, window_mask="full"
        )
        for rank in range(dcp_size)
    ]
    assert {each.max_rows for each in bounds} == {-(-43 // dcp_size)}
    assert [each.has_window for each in bounds] == [True] + [False] * (dcp_size - 1)


lengths_of_batches = st.lists(
    st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 5000)), min_size=1, max_size=40
)


@given(lengths_of_batches, st.integers(1, 140), st.integers(1, 4), st.integers(0, 2000))
def test_balanced_plans_stay_within_their_bounds(lengths, workers, min_blocks, spare):
    bounds = balanced_bounds(
        len(lengths),
        max(1, *lengths, spare),
        block_keys=64,
        max_workers=workers,
        min_blocks=min_blocks,
    )
    plan = balanced_plan(
        lengths,
        [True] * len(lengths),
        block_keys=64,
        max_workers=max(1, bounds.num_workers - num_keyless_workers(lengths)),
        min_blocks=min_blocks,
    )
    assert_within(plan.bounds, bounds)
    assert bounds.num_workers <= max(workers, 1 + -(-len(lengths) // 8))


@given(lengths_of_batches, st.sampled_from([64, 1024]), st.integers(0, 2000))
def test_fixed_plans_stay_within_their_bounds(lengths, split_keys, spare):
    bounds = fixed_bounds(len(lengths), max(1, *lengths, spare), split_keys=split_keys)
    plan = fixed_plan(lengths, [True] * len(lengths), split_keys=split_keys)
    assert_within(plan.bounds, bounds)


def assert_within(plan, bounds):
    assert plan.num_workers <= bounds.num_workers
    assert plan.num_pieces <= bounds.num_pieces
    assert plan.num_slots <= bounds.num_slots
    assert plan.max_slots <= bounds.max_slots


def test_workers_that_a_plan_does_not_need_have_no_pieces(monkeypatch):
    """Whatever memory holds; tables start at 64 bytes and rows of the page table are so wide."""
    fresh = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda n, **kwargs: fresh(n, **kwargs).copy_(torch.arange(n))
    )
    rows = decode_rows(batch(40, 0, window=1), STRIPE)
    plan = balanced_plan([40, 0], [False, False], block_keys=64, max_workers=4, min_blocks=1)
    tables = DevicePlan(
        replace(plan.bounds, num_workers=9, num_pieces=20),
        batch_size=2,
        num_pages=30,
        head_starts=[0, 4],
        device=torch.device("cpu"),
    )
    tables.upload(plan, rows)
    workers = tables.workers.view(9, -1)
    assert workers[:2, :5].tolist() == [[0, 1, 0, 0, 40], [1, 2, 1, 0, 0]]
    assert bool((workers[2:, 0] == workers[2:, 1]).all())
    assert tables.pieces[:10].tolist() == [0, 0, 40, -1, 0, 1, 0, 0, -1, 0]
    assert tables.slot_starts.tolist() == [0, 0, 0]
    assert tables.head_starts.tolist() == [0, 4]
    assert tables.page_table.shape == (2, 32)
    assert torch.equal(tables.page_table[:, :10], TABLE[:, :10])
    starts = [tables.pieces, tables.slot_starts, tables.head_starts, tables.page_table]
    assert all(table.storage_offset() % 16 == 0 for table in starts)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=9),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([None, 64]),
)
def test_a_plan_that_grows_covers_every_key_once(lengths, workers, growth, split_keys):
    """Pieces of a sequence are its keys in order; what a worker has of its first piece agrees."""
    page_table = torch.arange(len(lengths) * 80, dtype=torch.int32).view(len(lengths), 80)
    rows = decode_rows(DecodeBatch(torch.tensor(lengths), page_table, 1), STRIPE)
    bounds = decode_bounds(
        STRIPE,
        batch_size=len(lengths),
        max_len=300,
        window=1,
        window_mask="causal",
        max_growth=growth,
    )
    reserved = ReservedPlan(
        bounds,
        SplitLimits(workers, 1),
        head_starts=[0, 4],
        split_keys=split_keys,
        device=torch.device("cpu"),
    )
    for _ in range(2):
        reserved.fill(rows)
        tables = reserved.device_plan(SplitLimits(workers, 1))
        for grown in range(growth + 1):
            if grown:
                reserved.grow()
            assert covered(tables, len(lengths)) == [n + grown if n else 0 for n in lengths]
        used = -(-(max(lengths) + growth) // 4) if max(lengths) else 0
        assert torch.equal(tables.page_table[:, :used], page_table[:, :used])


def covered(tables: DevicePlan, num_sequences: int) -> list[int]:
    """Keys of each sequence."""
    ends = [0] * num_sequences
    pieces = tables.pieces.view(-1, 5).tolist()
    for first, end, *of_first in tables.workers.view(-1, 8)[:, :5].tolist():
        for sequence, start, stop, _, _ in pieces[first:end]:
            assert start == ends[sequence]
            ends[sequence] = stop
        if first < end:
            assert of_first == pieces[first][:3]
    return ends
