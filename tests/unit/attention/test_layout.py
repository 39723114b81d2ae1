"""The owner rule. The oracle walks positions one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.layout import StripeLayout

topologies = st.tuples(
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (16, 1), (16, 8)]),
)


def stripes(dcp_size: int, page_size: int = 1, interleave: int = 1) -> list[StripeLayout]:
    return [StripeLayout(dcp_size, r, page_size, interleave) for r in range(dcp_size)]


def owned(length: int, dcp_size: int, interleave: int = 1) -> list[list[int]]:
    positions = [[] for _ in range(dcp_size)]
    for position in range(length):
        positions[position // interleave % dcp_size].append(position)
    return positions


@given(topologies, st.integers(0, 200))
def test_local_lengths_count_the_owned_positions(topology, length):
    dcp_size, (page_size, interleave) = topology
    ranks = stripes(dcp_size, page_size, interleave)
    expected = [len(positions) for positions in owned(length, dcp_size, interleave)]
    assert [rank.local_length(length) for rank in ranks] == expected
    assert sum(expected) == length
    assert max(expected) - min(expected) <= interleave


@given(topologies, st.integers(0, 200))
def test_one_more_token_grows_exactly_its_owner(topology, length):
    dcp_size, (page_size, interleave) = topology
    ranks = stripes(dcp_size, page_size, interleave)
    grown = [r.local_length(length + 1) - r.local_length(length) for r in ranks]
    expected = [0] * dcp_size
    expected[ranks[0].owner(length)] = 1
    assert grown == expected


@given(topologies, st.integers(0, 150), st.integers(0, 60))
def test_local_count_of_a_chunk_at_any_start(topology, start, num_tokens):
    dcp_size, (page_size, interleave) = topology
    end = start + num_tokens
    for rank in stripes(dcp_size, page_size, interleave):
        positions = owned(end, dcp_size, interleave)[rank.dcp_rank]
        assert rank.local_count(start, end) == sum(p >= start for p in positions)


@given(topologies, st.integers(1, 200))
def test_position_of_local_enumerates_the_owned_positions(topology, length):
    dcp_size, (page_size, interleave) = topology
    for rank in stripes(dcp_size, page_size, interleave):
        positions = owned(length, dcp_size, interleave)[rank.dcp_rank]
        assert [rank.position_of_local(i) for i in range(len(positions))] == positions


@given(topologies, st.permutations(range(6)))
def test_rows_are_a_bijection_and_agree_with_the_paged_slot_mapping(topology, pages):
    """Both published formulas: v // c for I = 1, and offset o // (c*I) * I + o % I in a page."""
    dcp_size, (page_size, interleave) = topology
    logical_page = page_size * dcp_size
    stripe = StripeLayout(dcp_size, 0, page_size, interleave)
    taken = set()
    for position in range(len(pages) * logical_page):
        page, offset = pages[position // logical_page], position % logical_page
        slot = page * logical_page + offset
        local_offset = offset // (dcp_size * interleave) * interleave + offset % interleave
        assert stripe.row(slot) == page * page_size + local_offset
        assert stripe.owner(slot) == stripe.owner(position)
        if interleave == 1:
            assert stripe.row(slot) == slot // dcp_size
        taken.add((stripe.owner(position), stripe.row(slot)))
    assert len(taken) == len(pages) * logical_page
    assert max(row for _, row in taken) < len(pages) * page_size


@given(topologies, st.integers(0, 300))
def test_live_pages_of_a_rank_never_exceed_the_logical_pages(topology, length):
    dcp_size, (page_size, interleave) = topology
    logical_pages = -(-length // (page_size * dcp_size))
    for rank in stripes(dcp_size, page_size, interleave):
        pages = -(-rank.local_length(length) // page_size)
        assert logical_pages - 1 <= pages <= logical_pages or length == 0


@given(topologies, st.integers(0, 300), st.integers(0, 9))
def test_static_bound_holds_for_every_rank_and_is_positive(topology, max_length, window):
    dcp_size, (page_size, interleave) = topology
    ranks = stripes(dcp_size, page_size, interleave)
    bounds = {rank.max_local_length(max_length + window) for rank in ranks}
    assert len(bounds) == 1
    assert bounds == {max(1, *(rank.local_length(max_length + window) for rank in ranks))}


@given(topologies, st.integers(0, 100))
def test_owner_and_row_are_elementwise_on_arrays(topology, start):
    dcp_size, (page_size, interleave) = topology
    stripe = StripeLayout(dcp_size, 0, page_size, interleave)
    slots = list(range(start, start + 50))
    for array in (np.array(slots), torch.tensor(slots)):
        assert stripe.owner(array).tolist() == [stripe.owner(slot) for slot in slots]
        assert stripe.row(array).tolist() == [stripe.row(slot) for slot in slots]


def test_rejected_tokens_need_the_formula_again_bug_35():
    """c = 4: 13 -> 10 tokens gives [3, 3, 2, 2]; subtracting 3 from each gives [1, 0, 0, 0]."""
    ranks = stripes(4)
    assert [rank.local_length(13) for rank in ranks] == [4, 3, 3, 3]
    assert [rank.local_length(10) for rank in ranks] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("dcp_size", "rank", "global_length", "num_queries", "bounds"),
    [(2, 1, 10, 3, [4, 4, 5]), (8, 3, 32, 8, [3, 3, 3, 4, 4, 4, 4, 4])],
)
def test_keys_visible_to_window_queries_bug_32(dcp_size, rank, global_length, num_queries, bounds):
    """Query t sees n_r(G - q + 1 + t) local keys, not n_r(G) - (q - 1 - t)."""
    stripe = StripeLayout(dcp_size, rank, 1)
    first = global_length - num_queries + 1
    assert [stripe.local_length(first + t) for t in range(num_queries)] == bounds


def test_draft_extend_keeps_the_local_length_bug_31():
    assert StripeLayout(4, 2, 1).local_length(20) == 5


def test_raw_logical_ids_are_divided_once_bugs_21_and_25():
    """c = 4, logical slots 32..47: rank 1 owns 33, 37, 41, 45, in rows 8..11. Filtering and
    dividing those rows again would keep one."""
    stripe = StripeLayout(4, 1, 4)
    slots = [v for v in range(32, 48) if stripe.owner(v) == 1]
    assert slots == [33, 37, 41, 45]
    assert [stripe.row(v) for v in slots] == [8, 9, 10, 11]
    assert [stripe.row(row) for row in (8, 9, 10, 11) if stripe.owner(row) == 1] == [2]


def test_pages_of_a_rank_follow_its_local_length_bug_29():
    """L = 100, P = 16, c = 2: 4 pages a rank, not the 7 of the global length."""
    lengths = [rank.local_length(100) for rank in stripes(2, 16)]
    assert [-(-length // 16) for length in lengths] == [4, 4]


def test_chunk_not_starting_at_a_multiple_of_c():
    """c = 4, positions 5..11: rank 0 owns {8}; a plain stride over the chunk picks {5, 9}."""
    stripe = StripeLayout(4, 0, 1)
    first = stripe.local_length(5)
    positions = [stripe.position_of_local(first + i) for i in range(stripe.local_count(5, 12))]
    assert positions == [8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 16, 1), "dcp_size 0"),
        ((4, 4, 16, 1), r"dcp_rank 4 is outside \[0, 4\)"),
        ((4, -1, 16, 1), "dcp_rank -1"),
        ((4, 0, 0, 1), "page_size 0"),
        ((4, 0, 16, 0), "interleave 0"),
        ((4, 0, 16, 3), "interleave 3 must be >= 1 and divide page_size 16"),
    ],
)
def test_impossible_stripes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StripeLayout(*arguments)
