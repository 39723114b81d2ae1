"""Which pool rows a step reads, and which batches are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.interface import DecodeBatch, ExtendBatch
from attention.layout import StripeLayout
from attention.rows import contiguous_start, decode_rows, extend_rows, row_ids

HUGE_PAGE = 2**31 - 1


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(st.integers(1, 5), st.lists(st.integers(0, 17), min_size=1, max_size=5))
def test_only_live_rows_are_ever_named(page_size, num_rows):
    if max(num_rows) == 0:
        num_rows[0] = 1
    pages = [[100 * i + 2 * j + 3 for j in range(18)] for i in range(len(num_rows))]
    live = [
        [pages[i][j // page_size] * page_size + j % page_size for j in range(count)]
        for i, count in enumerate(num_rows)
    ]
    for i, count in enumerate(num_rows):
        used = -(-count // page_size)
        pages[i][used:] = [HUGE_PAGE] * (18 - used)
    width = max(num_rows) + 2
    ids = row_ids(table(*pages), num_rows, width, page_size).tolist()
    everything_live = {row for rows in live for row in rows}
    for i, count in enumerate(num_rows):
        assert ids[i][:count] == live[i]
        assert set(ids[i]) <= everything_live


@pytest.mark.parametrize(
    ("pages", "num_rows", "start"),
    [
        ([5, 6, 7], 12, 20),
        ([5, 6, 9], 8, 20),
        ([5, 6, 9], 9, None),
        ([5, 4], 8, None),
        ([5], 1, 20),
    ],
)
def test_contiguous_runs_are_recognised(pages, num_rows, start):
    assert contiguous_start(table([*pages, HUGE_PAGE])[0], num_rows, 4) == start


def test_plain_decode_reads_the_new_token_and_verify_stops_before_the_window():
    stripe = StripeLayout(4, 2, 1)
    pages = torch.zeros(3, 8, dtype=torch.int32)
    decode = decode_rows(DecodeBatch(lengths(20, 3, 0), pages), stripe)
    assert decode.committed_lens == (5, 1, 0)
    assert decode.is_padding == (False, False, True)
    verify = decode_rows(DecodeBatch(lengths(20, 3, 0), pages, window=3), stripe)
    assert verify.committed_lens == (4, 0, 0)


def test_the_window_is_counted_on_rank_0_only_and_never_in_plain_decode():
    pages = torch.zeros(1, 8, dtype=torch.int32)
    for rank in range(4):
        stripe = StripeLayout(4, rank, 1)
        verify = decode_rows(DecodeBatch(lengths(20), pages, window=2), stripe)
        assert verify.has_window == (rank == 0)
        assert not decode_rows(DecodeBatch(lengths(20), pages), stripe).has_window


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (DecodeBatch(lengths(-1), table([1])), "sequence length -1"),
        (DecodeBatch(lengths(2), table([1]), window=3), "sequence length 2 .* >= window 3"),
        (DecodeBatch(lengths(5), table([1]), window=0), "window 0"),
        (DecodeBatch(lengths(5), table([1]), window_mask="tree"), "'tree'"),
        (DecodeBatch(lengths(5, 5), table([1])), "1 rows for 2 sequences"),
        (DecodeBatch(lengths(9), table([1])), "length 9 .* 8 tokens"),
    ],
)
def test_impossible_decode_batches_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        decode_rows(batch, StripeLayout(2, 0, 4))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ExtendBatch([1], [1, 2], table([1])), "1 prefix lengths but 2 chunk"),
        (ExtendBatch([-1], [1], table([1])), "length -1"),
        (ExtendBatch([0], [-2], table([1])), "length -2"),
        (ExtendBatch([0, 0], [1, 1], table([1])), "1 rows for 2 sequences"),
        (ExtendBatch([9], [1], table([1])), "length 9"),
    ],
)
def test_impossible_extend_batches_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        extend_rows(batch, StripeLayout(2, 0, 4))
