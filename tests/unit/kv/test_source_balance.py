"""The busiest rank has no more to do than it must."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.kv.source_balance import WorkItem, balance

NUM_RANKS = 5


def least_possible_peak(items: Sequence[WorkItem], num_ranks: int) -> float:
    """Max-flow min-cut: for every set of ranks, the work that only they can do, shared evenly."""
    return max(
        sum(i.num_units * i.unit_cost for i in items if set(i.candidates) <= set(ranks)) / size
        for size in range(1, num_ranks + 1)
        for ranks in combinations(range(num_ranks), size)
    )


work_items = st.builds(
    WorkItem,
    st.integers(0, 200),
    st.integers(1, 4),
    st.sets(st.integers(0, NUM_RANKS - 1), min_size=1).map(lambda s: tuple(sorted(s))),
)


@given(st.lists(work_items, max_size=12))
def test_peak_load_is_the_least_possible_up_to_rounding(items: list[WorkItem]) -> None:
    loads = np.zeros(NUM_RANKS)
    for item, counts in zip(items, balance(items, NUM_RANKS), strict=True):
        assert counts.sum() == item.num_units
        assert (counts >= 0).all()
        loads[list(item.candidates)] += counts * item.unit_cost
    peak = least_possible_peak(items, NUM_RANKS)
    rounding = sum(item.unit_cost for item in items if len(item.candidates) > 1)
    assert loads.max() <= peak * 1.02 + rounding


def test_chain_of_overlapping_candidates_is_evened_out() -> None:
    """An even split of each item leaves 1500 on two ranks; 4000 over three ranks can be even."""
    items = [
        WorkItem(1000, 1, (0,)),
        WorkItem(1000, 1, (1,)),
        WorkItem(1000, 1, (1, 2)),
        WorkItem(1000, 1, (2, 3)),
        WorkItem(1000, 1, (3,)),
    ]
    loads = np.zeros(4)
    for item, counts in zip(items, balance(items, 4), strict=True):
        loads[list(item.candidates)] += counts
    assert loads[0] == 1000
    assert np.abs(loads[1:] - 4000 / 3).max() < 10
