"""Fused rows by slot: they wait on the device until somebody reads, and the newest ones count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbraid.kv.slots import LogicalSlots
from kvbraid.speculative import fused_rows
from kvbraid.speculative.fused_rows import FusedRows, RowsInPlace
from kvbraid.speculative.late_fusion import LateFusion, TapsAsRows
from tests.unit.speculative.mean_fusion import WIDTH, Mean

PAGE = 4

Read = Callable[[FusedRows, LogicalSlots], torch.Tensor]
EITHER_WAY = pytest.mark.parametrize("read", [FusedRows.read, FusedRows.read_in_place])


def slots(*values: int) -> LogicalSlots:
    return LogicalSlots(np.array(values, dtype=np.int64))


def rows_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, WIDTH).clone()


def new_rows(num_slots: int = 4096) -> FusedRows:
    return FusedRows(WIDTH, num_slots=num_slots, logical_page_size=PAGE, dtype=torch.float32)


@EITHER_WAY
def test_the_newest_row_of_a_slot_counts(read: Read) -> None:
    """Rejected drafts leave rows in slots that the tokens after them take."""
    rows = new_rows()
    rows.take(slots(8, 9, 10), rows_of(1, 2, 3))
    rows.take(slots(9, 10, 11), rows_of(4, 5, 6))
    rows.take(slots(10), rows_of(7))
    for _ in range(2):
        assert read(rows, slots(8, 9, 10, 11))[:, 0].tolist() == [1, 4, 7, 6]
        assert read(rows, slots(11, 8))[:, 0].tolist() == [6, 1]


@EITHER_WAY
def test_of_no_slots_there_are_no_rows(read: Read) -> None:
    rows = new_rows()
    rows.take(slots(8), rows_of(1))
    assert read(rows, slots()).shape == (0, WIDTH)
    assert rows.num_missing(slots()) == 0


@EITHER_WAY
def test_memory_of_a_graph_is_written_again_before_anybody_reads(read: Read) -> None:
    rows = new_rows()
    memory = rows_of(1, 2)
    rows.take(slots(8, 9), memory)
    memory.fill_(torch.nan)
    assert read(rows, slots(8, 9))[:, 1].tolist() == [1, 2]


@EITHER_WAY
def test_padding_of_a_window_is_kept_nowhere(read: Read) -> None:
    rows = new_rows()
    rows.take(slots(8, 0, 9, 0), rows_of(1, float("nan"), 2, float("nan")))
    assert read(rows, slots(8, 9))[:, 0].tolist() == [1, 2]
    assert rows.num_missing(slots(0)) == 1


@EITHER_WAY
def test_more_steps_than_may_wait(read: Read) -> None:
    rows = new_rows(num_slots=8192)
    for step in range(7000):
        rows.take(slots(4 + step), rows_of(step))
    assert read(rows, slots(4, 503, 7003))[:, 0].tolist() == [0, 499, 6999]
    assert read(rows, slots(7002, 7003))[:, 0].tolist() == [6998, 6999]


@EITHER_WAY
def test_wide_rows_wait_in_bounded_memory(monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    monkeypatch.setattr(fused_rows, "_MOST_BYTES", 10 * rows_of(0).nbytes)
    rows = new_rows()
    for step in range(40):
        rows.take(slots(4 + step), rows_of(step))
    rows.take(slots(*range(100, 125)), rows_of(*range(25)))
    assert read(rows, slots(43, 100, 109, 110, 124))[:, 0].tolist() == [39, 0, 9, 10, 24]
    rows.take(slots(200), rows_of(5))
    memory = rows.read_in_place(slots(200)).untyped_storage()
    assert memory.nbytes() == 10 * rows_of(0).nbytes


def test_rows_that_all_wait_are_read_where_they_are() -> None:
    rows = new_rows()
    rows.put(slots(7), rows_of(9))
    rows.take(slots(8, 9, 10), rows_of(1, 2, 3))
    rows.take(slots(16, 17), rows_of(4, 5))
    in_place = RowsInPlace(rows)
    memory = in_place.read(slots(8, 9, 10))
    assert in_place.read(slots(9, 10)).data_ptr() == memory[1:].data_ptr(), "not even copied"
    scattered = in_place.read(slots(8, 10, 16))
    assert scattered[:, 0].tolist() == [1, 3, 4]
    assert in_place.read(slots(8)).data_ptr() == memory.data_ptr(), "nothing was moved to the host"
    assert in_place.read(slots(8, 10, 9, 16))[:, 0].tolist() == [1, 3, 2, 4], "in another order"
    assert in_place.read(slots(7, 8))[:, 0].tolist() == [9, 1]
    assert in_place.read(slots(16, 17))[:, 0].tolist() == [4, 5]


def test_pushed_rows_replace_those_of_a_page_s_last_owner() -> None:
    rows = new_rows()
    rows.take(slots(8, 9), rows_of(1, 2))
    rows.renew([2])
    rows.put(slots(8), rows_of(5))
    assert rows.num_missing(slots(8, 9)) == 2
    assert rows.read(slots(8))[:, 0].tolist() == [5]


@EITHER_WAY
def test_rows_that_are_computed_after_pushed_ones_count(read: Read) -> None:
    rows = new_rows()
    rows.take(slots(8, 9), rows_of(1, 2))
    rows.put(slots(8, 9), rows_of(5, 5))
    rows.take(slots(9), rows_of(7))
    assert read(rows, slots(8, 9))[:, 0].tolist() == [5, 7]
    rows.take(slots(8), rows_of(6))
    assert read(rows, slots(8, 9))[:, 0].tolist() == [6, 7]


@EITHER_WAY
def test_rows_of_slots_that_were_forgotten_are_missing_until_there_are_new_ones(read: Read) -> None:
    rows = new_rows()
    rows.take(slots(8, 9, 10), rows_of(1, 2, 3))
    rows.forget(slots(9, 10))
    rows.take(slots(10), rows_of(5))
    assert rows.num_missing(slots(8, 9, 10)) == 2
    assert read(rows, slots(8, 10))[:, 0].tolist() == [1, 5]


def late_rows(fusion: Mean) -> tuple[FusedRows, TapsAsRows]:
    taps = TapsAsRows(fusion.tap_layers, WIDTH)
    rows = FusedRows(
        WIDTH, num_slots=8192, logical_page_size=PAGE, dtype=torch.float32,
        late=LateFusion(taps, fusion),
    )  # fmt: skip
    return rows, taps


def two_taps(*values: float) -> torch.Tensor:
    """Taps whose mean has these values."""
    return torch.stack((rows_of(*values) - 1, rows_of(*values) + 1), dim=1)


def test_taps_that_nobody_reads_are_fused_together_and_do_not_pile_up() -> None:
    fusion = Mean()
    rows, taps = late_rows(fusion)
    for step in range(7000):
        rows.take(slots(4 + step), taps.fuse(two_taps(step)))
    assert fusion.num_fused == [2048] * 3
    assert rows.read(slots(4, 503, 7003))[:, 0].tolist() == [0, 499, 6999]
    assert fusion.num_fused == [2048] * 3 + [7000 - 3 * 2048]


def test_late_rows_are_fused_for_whoever_reads_them() -> None:
    fusion = Mean()
    rows, taps = late_rows(fusion)
    rows.put(slots(7), rows_of(9))
    rows.take(slots(8, 9, 10), taps.fuse(two_taps(1, 2, 3)))
    rows.take(slots(10, 16), taps.fuse(two_taps(4, 5)))
    assert rows.read_in_place(slots(8, 9))[:, 0].tolist() == [1, 2]
    assert rows.read_in_place(slots(16, 8, 10))[:, 2].tolist() == [5, 1, 4]
    assert fusion.num_fused == [2, 3], "those that were asked for"
    assert rows.read(slots(7))[:, 0].tolist() == [9]
    assert fusion.num_fused == [2, 3]
    assert rows.read(slots(7, 10, 16))[:, 1].tolist() == [9, 4, 5]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "put", "read", "in place"]),
        st.lists(st.integers(PAGE, 15), min_size=1, max_size=9, unique=True),
    ),
    max_size=30,
)


@given(STEPS)
def test_whoever_reads_when_gets_what_was_kept_last(
    steps: list[tuple[str, list[int]]],
) -> None:
    """Against a dictionary, with room for seven rows that wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_rows, "_MOST_ROWS", 7)
        rows = new_rows(num_slots=16)
    kept: dict[int, float] = {}
    for number, (what, places) in enumerate(steps):
        if what in ("take", "put"):
            values = [number + place / 100 for place in places]
            keep = rows.take if what == "take" else rows.put
            keep(slots(*places), rows_of(*values))
            kept |= dict(zip(places, values, strict=True))
            continue
        held = [place for place in places if place in kept]
        read = rows.read if what == "read" else rows.read_in_place
        found = read(slots(*held))
        assert torch.equal(found, rows_of(*(kept[place] for place in held)).view(-1, WIDTH))
