"""Costs are robust medians, monotone in the width, and never hoped for."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.speculative.cost_table import (
    CostGrid,
    CostTable,
    bucket_of,
    pool_adjacent,
    profile_cells,
)

CELLS = st.tuples(st.integers(1, 80), st.integers(1, 8))


def observe(grid: CostGrid, num_sequences: int, width: int, seconds: float, times: int = 3) -> None:
    for _ in range(times):
        grid.observe(num_sequences, width, seconds)


def test_a_cell_is_the_median_of_what_was_seen_lately() -> None:
    grid = CostGrid(4)
    noise = random.Random(1)
    for step in range(200):
        grid.observe(3, 2, 5.0 if step % 10 == 0 else 0.01 * noise.uniform(0.97, 1.03))
    row = grid.seconds(3)
    assert row is not None
    assert row[1] == pytest.approx(0.01, rel=0.04)
    # Contexts grow: after a few steps the new price holds.
    observe(grid, 3, 2, 0.02, times=10)
    row = grid.seconds(3)
    assert row is not None
    assert row[1] == pytest.approx(0.02, rel=0.04)


def test_a_first_observation_may_be_warm_up_and_does_not_count() -> None:
    grid = CostGrid(4)
    observe(grid, 1, 1, 0.01)
    grid.observe(1, 2, 7.0)  # a kernel was compiled
    row = grid.seconds(1)
    assert row is not None
    assert row[1] == pytest.approx(0.02)
    assert not grid.is_measured(1, 2)
    grid.observe(1, 2, 0.011)
    row = grid.seconds(1)
    assert row is not None
    assert row[1] == pytest.approx(0.011)
    assert grid.is_measured(1, 2)


@given(st.lists(st.tuples(CELLS, st.floats(1e-4, 10.0)), min_size=1, max_size=60), CELLS)
def test_estimates_are_positive_and_grow_with_the_width(
    observations: list[tuple[tuple[int, int], float]], cell: tuple[int, int]
) -> None:
    grid = CostGrid(8)
    for (num_sequences, width), seconds in observations:
        grid.observe(num_sequences, width, seconds)
        grid.observe(num_sequences, width, seconds * 1.1)
    row = grid.seconds(cell[0])
    assert row is not None
    assert row.shape == (8,)
    assert (row > 0).all()
    assert np.isfinite(row).all()
    assert (np.diff(row) >= -1e-12).all()
    assert (grid.hopeful(cell[0]) <= row * (1 + 1e-12)).all()


@given(
    st.floats(0.1, 10.0),
    st.floats(0.001, 1.0),
    st.integers(1, 400),
    st.sets(CELLS, min_size=1, max_size=12),
)
def test_what_was_not_measured_is_never_estimated_too_cheap(
    fixed: float, per_row: float, free_rows: int, cells: set[tuple[int, int]]
) -> None:
    """On a machine that is bound by memory up to some rows and by arithmetic from there on."""

    def true(num_sequences: int, width: int) -> float:
        return fixed + per_row * max(num_sequences * width, free_rows)

    grid = CostGrid(8)
    for num_sequences, width in cells:
        size = bucket_of(num_sequences)
        observe(grid, size, width, true(size, width))
    for size in {bucket_of(num_sequences) for num_sequences, _ in cells}:
        row, hopeful = grid.seconds(size), grid.hopeful(size)
        assert row is not None
        largest = grid.largest_measured(size)
        for width in range(1, 9):
            assert row[width - 1] >= true(size, width) * (1 - 1e-9)
            if width >= largest:
                assert hopeful[width - 1] <= true(size, width) * (1 + 1e-9)


def test_a_measured_grid_is_monotone_in_both_and_met_exactly() -> None:
    grid = CostGrid(5)
    for num_sequences in (1, 4, 16, 64):
        for width in (1, 2, 5):
            observe(grid, num_sequences, width, 1.0 + 0.02 * num_sequences * width)
    rows = [grid.seconds(size) for size in range(1, 65)]
    table = np.stack([row for row in rows if row is not None])
    assert table.shape == (64, 5)
    assert (np.diff(table, axis=0) >= -1e-12).all()
    assert (np.diff(table, axis=1) >= 0).all()
    for num_sequences in (1, 4, 16, 64):
        expected = [1.0 + 0.02 * num_sequences * width for width in range(1, 6)]
        assert table[num_sequences - 1] == pytest.approx(expected)


def test_a_bucket_is_not_changed_by_what_others_measured() -> None:
    """A lone sequence with a long context is slower than eight short ones; both rows stand."""
    grid = CostGrid(2)
    observe(grid, 1, 1, 0.05)
    observe(grid, 1, 2, 0.06)
    observe(grid, 8, 1, 0.01)
    observe(grid, 8, 2, 0.02)
    row = grid.seconds(8)
    assert row is not None
    assert row.tolist() == pytest.approx([0.01, 0.02])


def test_nothing_measured_is_unknown_and_hoped_to_be_free() -> None:
    grid = CostGrid(3)
    assert grid.seconds(4) is None
    assert grid.hopeful(4).tolist() == [0.0, 0.0, 0.0]
    observe(grid, 8, 1, 0.4)
    assert grid.hopeful(4) == pytest.approx([0.2] * 3)
    assert grid.seconds(4) == pytest.approx([0.4, 0.8, 1.2])
    assert grid.seconds(16) == pytest.approx([0.8, 1.6, 2.4])


@pytest.mark.parametrize(
    ("num_sequences", "width", "seconds", "message"),
    [
        (0, 1, 1.0, "0 sequences"),
        (1 << 17, 1, 1.0, "131072 sequences"),
        (1, 0, 1.0, "width 0"),
        (1, 4, 1.0, "width 4"),
        (1, 1, 0.0, "0.0 s"),
        (1, 1, -1.0, "-1.0 s"),
        (1, 1, float("nan"), "nan s"),
        (1, 1, float("inf"), "inf s"),
    ],
)
def test_nonsense_is_refused(num_sequences: int, width: int, seconds: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostGrid(3).observe(num_sequences, width, seconds)


def test_memory_is_bounded_by_buckets_and_widths() -> None:
    grid = CostGrid(2)
    for num_sequences in range(1, 1025):
        for _ in range(20):
            grid.observe(num_sequences, 1, 1.0)
    assert len({bucket_of(n) for n in range(1, 1025)}) < 40
    assert grid.num_observed(1000, 1) <= 15
    assert all(n <= bucket_of(n) <= 1.25 * n for n in range(1, 1025))


def test_steps_with_prompt_rows_are_not_observed() -> None:
    table = CostTable(3)
    for _ in range(5):
        table.observe_step(2, 1, 9.0, has_prompt_rows=True)
    assert table.plain_seconds(2) is None
    for count in range(3):
        assert table.plain_seconds(2) is None, count
        table.observe_step(2, 1, 0.5, has_prompt_rows=False)
    assert table.plain_seconds(2) == 0.5


def test_the_age_of_the_plain_price_is_counted_by_batch_size() -> None:
    table = CostTable(3)
    for _ in range(4):
        table.observe_step(2, 3, 0.5, has_prompt_rows=False)
    assert (table.steps_since_plain(2), table.steps_since_plain(8)) == (4, 0)
    table.observe_step(2, 1, 0.5, has_prompt_rows=False)
    assert table.steps_since_plain(2) == 0


@pytest.mark.parametrize(("max_sequences", "max_width"), [(1, 1), (1, 8), (8, 2), (200, 8)])
def test_profile_measures_the_corners_cheapest_first(max_sequences: int, max_width: int) -> None:
    cells = profile_cells(max_sequences, max_width)
    assert len(set(cells)) == len(cells)
    assert {(1, 1), (1, max_width), (max_sequences, 1), (max_sequences, max_width)} <= set(cells)
    assert all(1 <= b <= max_sequences and 1 <= w <= max_width for b, w in cells)
    rows = [b * w for b, w in cells]
    assert rows == sorted(rows)
    assert len(cells) <= 24


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 15)), min_size=1, max_size=8))
def test_pooling_gives_the_closest_monotone_values(items: list[tuple[float, int]]) -> None:
    values, weights = [v for v, _ in items], [w for _, w in items]
    pooled = pool_adjacent(values, weights)
    assert len(pooled) == len(values)
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(pooled))

    def error(candidate: list[float]) -> float:
        return sum(w * (v - c) ** 2 for v, c, w in zip(values, candidate, weights, strict=True))

    total = np.dot(pooled, weights)
    assert total == pytest.approx(np.dot(values, weights), abs=1e-6)
    # No monotone sequence that is easy to think of is closer.
    above = list(np.maximum.accumulate(values))
    below = list(np.minimum.accumulate(values[::-1])[::-1])
    for other in (above, below, [(a + b) / 2 for a, b in zip(above, below, strict=True)]):
        assert error(pooled) <= error(other) + 1e-6
