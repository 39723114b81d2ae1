"""Two index spaces that cannot be mixed up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.layout import StripeLayout
from kvbraid.kv.slots import (
    LogicalSlots,
    PhysicalRows,
    local_indices,
    owners_of,
    slots_between,
    slots_of,
)


@st.composite
def stripes(draw: st.DrawFn) -> StripeLayout:
    size = draw(st.integers(1, 7))
    interleave = draw(st.integers(1, 4))
    pages = draw(st.integers(1, 4))
    return StripeLayout(size, draw(st.integers(0, size - 1)), interleave * pages, interleave)


@given(stripes(), st.lists(st.integers(0, 10_000), max_size=40))
def test_arrays_follow_the_scalar_owner_rule(stripe: StripeLayout, ids: list[int]) -> None:
    array = np.array(ids, dtype=np.int64)
    assert owners_of(stripe, array).tolist() == [stripe.owner(i) for i in ids]
    assert local_indices(stripe, array).tolist() == [stripe.row(i) for i in ids]


@given(stripes(), st.integers(0, 200))
def test_local_index_counts_the_owned_positions_before(stripe: StripeLayout, length: int) -> None:
    owned = [p for p in range(length) if stripe.owner(p) == stripe.dcp_rank]
    assert local_indices(stripe, np.array(owned, dtype=np.int64)).tolist() == list(
        range(stripe.local_length(length))
    )


def test_slots_follow_the_page_table() -> None:
    slots = slots_of([5, 1, 7], np.array([0, 3, 4, 9]), logical_page_size=4)
    assert slots.array.tolist() == [20, 23, 4, 29]


def test_stale_table_tail_is_not_read() -> None:
    slots = slots_of([2, 10**9], np.arange(4), logical_page_size=4)
    assert slots.array.tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("position", [-1, 8])
def test_position_outside_the_table_is_refused_with_the_range(position: int) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 8\)"):
        slots_of([1, 2], np.array([position]), logical_page_size=4)


@pytest.mark.parametrize("kind", [LogicalSlots, PhysicalRows])
@pytest.mark.parametrize(
    "wrong", [[1, 2], np.zeros((1, 2), np.int64), np.zeros(2), np.int64(3)], ids=repr
)
def test_only_one_dimensional_integer_arrays_become_ids(kind: type, wrong: object) -> None:
    with pytest.raises(TypeError, match=kind.__name__):
        kind(wrong)


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_range_of_positions_has_the_slots_of_its_positions(page_size: int) -> None:
    pages = [5, 1, 7, 2]
    most = len(pages) * page_size
    for first in range(most + 1):
        for end in range(first, most + 1):
            expected = slots_of(pages, np.arange(first, end), page_size)
            found = slots_between(pages, first, end, page_size)
            assert found.array.tolist() == expected.array.tolist()


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (3, 2), (0, 9), (9, 9)])
def test_a_range_outside_of_the_pages_is_refused(first: int, end: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{first}, {end}\) are outside of 2 pages of 4"):
        slots_between([5, 1], first, end, 4)
