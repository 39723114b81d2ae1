"""Fused rows by slot: taps wait on the device until somebody reads, and the newest ones count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbraid.kv.slots import LogicalSlots
from kvbraid.speculative import waiting_taps
from kvbraid.speculative.fused_rows import FusedRows

PAGE, WIDTH = 4, 3


class Halves:
    """A fusion that takes the mean of two taps."""

    tap_layers = (0, 1)
    fused_width = WIDTH

    def __init__(self) -> None:
        self.num_fused: list[int] = []

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        self.num_fused.append(len(taps))
        return taps.mean(1)


def slots(*values: int) -> LogicalSlots:
    return LogicalSlots(np.array(values, dtype=np.int64))


def taps(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 2, WIDTH).clone()


def new_rows(fusion: Halves, num_slots: int = 4096) -> FusedRows:
    return FusedRows(fusion, num_slots=num_slots, logical_page_size=PAGE, dtype=torch.float32)


def test_the_newest_row_of_a_slot_counts() -> None:
    """Rejected drafts leave rows in slots that the tokens after them take."""
    rows = new_rows(Halves())
    rows.take(slots(8, 9, 10), taps(1, 2, 3))
    rows.take(slots(9, 10, 11), taps(4, 5, 6))
    rows.take(slots(10), taps(7))
    assert rows.read(slots(8, 9, 10, 11))[:, 0].tolist() == [1, 4, 7, 6]


def test_of_no_slots_there_are_no_rows() -> None:
    rows = new_rows(Halves())
    rows.take(slots(8), taps(1))
    assert rows.read(slots()).shape == (0, WIDTH)
    assert rows.num_missing(slots()) == 0


def test_memory_of_a_graph_is_written_again_before_anybody_reads() -> None:
    rows = new_rows(Halves())
    memory = taps(1, 2)
    rows.take(slots(8, 9), memory)
    memory.fill_(torch.nan)
    assert rows.read(slots(8, 9))[:, 1].tolist() == [1, 2]


def test_padding_of_a_window_is_kept_nowhere() -> None:
    rows = new_rows(Halves())
    rows.take(slots(8, 0, 9, 0), taps(1, float("nan"), 2, float("nan")))
    assert rows.read(slots(8, 9))[:, 0].tolist() == [1, 2]
    assert rows.num_missing(slots(0)) == 1


def test_steps_that_nobody_reads_are_fused_together_and_do_not_pile_up() -> None:
    fusion = Halves()
    rows = new_rows(fusion, num_slots=8192)
    for step in range(7000):
        rows.take(slots(4 + step), taps(step))
    assert 3 <= len(fusion.num_fused) < 20
    assert max(fusion.num_fused) < 2500
    assert rows.read(slots(4, 503, 7003))[:, 0].tolist() == [0, 499, 6999]


def test_wide_taps_wait_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = Halves()
    rows = new_rows(fusion)
    monkeypatch.setattr(waiting_taps, "_MOST_BYTES", 10 * taps(0).nbytes)
    for step in range(40):
        rows.take(slots(4 + step), taps(step))
    assert fusion.num_fused == [10, 10, 10]
    rows.take(slots(*range(100, 111)), taps(*range(11)))
    assert fusion.num_fused == [10] * 5, "more than may wait are taken in pieces"
    assert rows.read(slots(43, 100, 109, 110))[:, 0].tolist() == [39, 0, 9, 10]
    assert fusion.num_fused == [10] * 5 + [1]


def test_padded_taps_have_few_sizes_and_their_padding_reaches_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 24
    monkeypatch.setattr(waiting_taps, "_MOST_ROWS", most)
    fusion = Halves()
    rows = FusedRows(
        fusion, num_slots=256, logical_page_size=PAGE, dtype=torch.float32, pads_taps=True
    )
    # The memory is full of what must reach nobody.
    rows.take(slots(*range(100, 100 + most)), taps(*[float("nan")] * most))
    rows.renew(range(25, 32))
    for number in (1, 2, 3, 5, 9, 17, 24, 50):
        taken = slots(*range(4, 4 + number))
        rows.take(taken, taps(*range(number)))
        assert rows.read(taken)[:, 0].tolist() == list(range(number))
    sizes = set(fusion.num_fused)
    assert sizes <= set(waiting_taps.padded_sizes((2, WIDTH), torch.float32))
    assert sizes >= {1, 2, 4, 8, 16, 24}


def test_pushed_rows_replace_those_of_a_page_s_last_owner() -> None:
    fusion = Halves()
    rows = new_rows(fusion)
    rows.take(slots(8, 9), taps(1, 2))
    rows.renew([2])
    rows.put(slots(8), torch.full((1, WIDTH), 5.0))
    assert fusion.num_fused == [], "nothing waits for the device"
    assert rows.num_missing(slots(8, 9)) == 2
    assert rows.read(slots(8))[:, 0].tolist() == [5]


def test_rows_that_are_computed_after_pushed_ones_count() -> None:
    rows = new_rows(Halves())
    rows.take(slots(8, 9), taps(1, 2))
    rows.put(slots(8, 9), torch.full((2, WIDTH), 5.0))
    rows.take(slots(9), taps(7))
    assert rows.read(slots(8, 9))[:, 0].tolist() == [5, 7]
    rows.take(slots(8), taps(6))
    assert rows.read(slots(8, 9))[:, 0].tolist() == [6, 7], "what was dropped once is done with"


def test_rows_of_slots_that_were_forgotten_are_missing_until_there_are_new_ones() -> None:
    fusion = Halves()
    rows = new_rows(fusion)
    rows.take(slots(8, 9, 10), taps(1, 2, 3))
    rows.forget(slots(9, 10))
    rows.take(slots(10), taps(5))
    assert rows.num_missing(slots(8, 9, 10)) == 2
    assert rows.read(slots(8, 10))[:, 0].tolist() == [1, 5]
    assert fusion.num_fused == [4]
