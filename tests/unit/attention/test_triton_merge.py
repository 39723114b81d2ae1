"""The tile that the triton backend merges split results with, and what the merge then gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from attention.backends.triton_merge import MergeTile, merge_tile
from tools.triton_interpreter import interpreted, interpreter_obstacle

HERE = Path(__file__).parent
OBSTACLE = interpreter_obstacle()


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_tiles_of_every_kind_merge_like_float64() -> None:
    """Fewer slots than a tile and more, sequences with and without any, widths with a rest."""
    results = interpreted(HERE / "triton_merge_cases.py")
    tiles = {(r["tile"]["slots"], r["tile"]["columns"], r["tile"]["warps"]) for r in results}
    # One warp for few slots, long lines, short ones, and four warps for many slots.
    assert {(4, 512, 1), (16, 256, 1), (32, 64, 1), (128, 64, 4), (256, 32, 4)} <= tiles
    for result in results:
        assert result["error"] <= 1e-6, result
        assert result["lse_error"] <= 1e-5, result


def tile(max_slots: int, num_slots: int, num_sequences: int, **changes: int) -> MergeTile:
    sizes = {"num_rows": 64 * num_sequences, "dim": 512, "itemsize": 2, **changes}
    return merge_tile(max_slots, num_slots, num_sequences, **sizes)


@pytest.mark.parametrize(
    ("slots", "num_sequences", "num_rows", "itemsize", "expected"),
    [
        ((2, 128), 64, 4096, 2, MergeTile(2, 512, 1)),
        ((18, 139), 8, 512, 2, MergeTile(16, 256, 1)),
        ((10, 74), 8, 1024, 2, MergeTile(16, 256, 1)),
        ((18, 139), 8, 128, 4, MergeTile(16, 128, 1)),
        ((66, 66), 1, 128, 2, MergeTile(32, 64, 1)),
        ((128, 128), 1, 64, 2, MergeTile(128, 64, 4)),
        ((129, 129), 1, 64, 2, MergeTile(256, 32, 4)),
        ((128, 128), 1, 16, 4, MergeTile(128, 32, 4)),
        ((2, 128), 64, 1024, 4, MergeTile(2, 512, 1)),
    ],
    ids=[
        "64 heads, 64 x 8K",
        "64 heads, 8 x 128K",
        "128 heads, 8 x 128K",
        "16 heads, 8 x 128K",
        "128 rows, 1 x 128K",
        "64 heads, 1 x 128K",
        "16 heads, window 4, 1 x 128K",
        "16 heads, 1 x 128K",
        "16 heads, 64 x 8K",
    ],
)
def test_shapes_that_were_measured_have_the_fastest_tile(
    slots: tuple[int, int], num_sequences: int, num_rows: int, itemsize: int, expected: MergeTile
) -> None:
    assert tile(*slots, num_sequences, num_rows=num_rows, itemsize=itemsize) == expected


def test_one_long_sequence_among_many_short_ones_does_not_decide() -> None:
    assert tile(120, 128, 128) == MergeTile(4, 512, 1)


def test_few_rows_keep_short_lines_so_that_there_are_programs_for_all_multiprocessors() -> None:
    assert tile(16, 16, 1, num_rows=16) == MergeTile(16, 64, 1)
    assert tile(16, 16, 1, num_rows=256) == MergeTile(16, 256, 1)


@pytest.mark.parametrize("dim", [24, 64, 72, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("max_slots", [2, 3, 5, 16, 33, 97, 400])
def test_no_tile_is_wider_than_a_result_nor_too_large_for_its_warps(
    max_slots: int, itemsize: int, dim: int
) -> None:
    chosen = tile(max_slots, max_slots, 1, dim=dim, itemsize=itemsize, num_rows=2048)
    assert chosen.columns < 2 * dim
    assert chosen.slots < 2 * max_slots
    # Elements of a thread, all of which are loaded before the first is used.
    assert chosen.slots * chosen.columns <= 128 * 32 * chosen.warps
