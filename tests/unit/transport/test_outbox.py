"""Cutting runs into frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.errors import IncompatibleError
from kvbraid.kv.handoff import RowRun
from kvbraid.transport.outbox import Piece, RunCursor


def run_of(positions: list[int], heads: range = range(2, 4)) -> RowRun:
    return RowRun(0, 0, heads, np.array(positions, dtype=np.int32))


def cut(cursor: RunCursor, end_position: int) -> list[Piece]:
    pieces = []
    while (piece := cursor.next_piece(end_position)) is not None:
        pieces.append(piece)
    return pieces


@given(
    st.integers(1, 9),
    st.sets(st.integers(0, 60), min_size=1).map(sorted),
    st.integers(1, 3),
    st.integers(1, 30),
    st.lists(st.integers(0, 61), max_size=4).map(sorted),
)
def test_frames_hold_each_computed_row_once_and_fit_in_a_slot(
    num_layers: int, positions: list[int], num_heads: int, rows_a_slot: int, ends: list[int]
) -> None:
    row_bytes = 10
    slot_bytes = max(rows_a_slot, num_heads) * row_bytes + 3
    cursor = RunCursor(run_of(positions, range(num_heads)), num_layers, row_bytes, slot_bytes)
    seen: list[tuple[int, int]] = []
    for end in [*ends, 61]:
        for piece in cut(cursor, end):
            size = len(piece.layers) * len(piece.positions) * num_heads * row_bytes
            assert 0 < size <= slot_bytes
            assert piece.positions.max() < end
            seen += [(layer, p) for layer in piece.layers for p in piece.positions.tolist()]
        assert len(seen) == num_layers * len([p for p in positions if p < end])
    assert sorted(seen) == sorted((layer, p) for layer in range(num_layers) for p in positions)
    assert cursor.num_rows == len(seen) * num_heads


def test_large_slots_hold_many_positions_of_all_layers() -> None:
    pieces = cut(RunCursor(run_of(list(range(10))), 3, 4, 100), 10)
    assert [(len(p.layers), len(p.positions)) for p in pieces] == [(3, 4), (3, 4), (3, 2)]


def test_small_slots_hold_some_layers_of_one_position() -> None:
    pieces = cut(RunCursor(run_of([7, 8]), 5, 4, 17), 9)
    assert [(p.layers, p.positions.tolist()) for p in pieces] == [
        (layers, [position])
        for position in (7, 8)
        for layers in (range(2), range(2, 4), range(4, 5))
    ]


def test_slot_too_small_for_one_position_is_incompatible() -> None:
    with pytest.raises(IncompatibleError, match="8 bytes does not fit in a slot of 7"):
        RunCursor(run_of([1]), 1, 4, 7)
