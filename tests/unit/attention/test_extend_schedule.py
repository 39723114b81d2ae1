"""Cutting a step's extend attention into pieces: everything once, in order, within the limits."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.backends.extend_schedule import (
    NO_SLOT,
    ExtendSchedule,
    TileShape,
    extend_schedule,
    heads_together,
)

lens = st.one_of(st.sampled_from([0, 1, 31, 32, 33, 129]), st.integers(0, 700))
batches = st.lists(st.tuples(lens, lens), min_size=1, max_size=6)
shapes = st.builds(
    TileShape,
    group=st.sampled_from([1, 3, 4, 40]),
    block_rows=st.sampled_from([32, 64]),
    block_keys=st.just(32),
    num_kv_heads=st.sampled_from([1, 2, 5]),
)


def keys_of_tiles(
    schedule: ExtendSchedule, batch: list[tuple[int, int]]
) -> dict[tuple[int, int], list[int]]:
    """For each (first token, first row): prefix rows in order of the launches, then -1 for the
    chunk. Checks on the way that slots are continued and merged as they were written."""
    seen: dict[tuple[int, int], list[int]] = {}
    written: dict[tuple[int, int], set[int]] = {}
    finished: set[tuple[int, int]] = set()
    for launch in schedule.launches:
        for piece in sorted(launch.pieces, key=lambda piece: piece.prefix_start):
            tile = (piece.token, piece.first_row)
            assert tile not in finished
            assert piece.prefix_len > 0 or piece.adds_chunk
            start = launch.prefix.start + piece.prefix_start
            assert start + piece.prefix_len <= launch.prefix.stop
            seen.setdefault(tile, []).extend(range(start, start + piece.prefix_len))
            seen[tile] += [-1] * piece.adds_chunk
            slots = written.setdefault(tile, set())
            assert (piece.slot_in != NO_SLOT) == (piece.slot_in in slots)
            if piece.slot_out == NO_SLOT:
                assert slots <= {piece.slot_in}
                finished.add(tile)
            else:
                assert piece.slot_in in (NO_SLOT, piece.slot_out)
                slots.add(piece.slot_out)
    for merge in schedule.merges:
        tile = (merge.token, merge.first_row)
        assert tile not in finished
        assert written[tile] == set(range(merge.first_slot, merge.end_slot))
        finished.add(tile)
    assert finished == set(seen)
    used = [slot for slots in written.values() for slot in slots]
    assert sorted(used) == list(range(schedule.num_slots))
    return seen


def expected_tiles(
    batch: list[tuple[int, int]], shape: TileShape
) -> dict[tuple[int, int], list[int]]:
    rows = list(accumulate((prefix for prefix, _ in batch), initial=0))
    tokens = list(accumulate((chunk for _, chunk in batch), initial=0))
    return {
        (tokens[i], first_row): [*range(rows[i], rows[i] + prefix), -1]
        for i, (prefix, chunk) in enumerate(batch)
        for first_row in range(0, chunk * shape.group, shape.block_rows)
    }


@given(batches, shapes, st.sampled_from([0, 4, 132]), st.sampled_from([None, 32, 96, 1024]))
def test_every_tile_sees_each_key_once_and_has_one_result(batch, shape, max_programs, max_prefix):
    schedule = extend_schedule(
        [prefix for prefix, _ in batch],
        [chunk for _, chunk in batch],
        shape=shape,
        max_programs=max_programs,
        max_prefix=max_prefix,
    )
    assert keys_of_tiles(schedule, batch) == expected_tiles(batch, shape)
    if max_prefix is not None:
        assert all(x.prefix.stop - x.prefix.start <= max_prefix for x in schedule.launches)


@given(batches, shapes, st.sampled_from([None, 96]))
def test_uncut_tiles_do_not_depend_on_the_batch(batch, shape, max_prefix):
    def ranges(batch: list[tuple[int, int]], token: int) -> list[tuple[int, int, int]]:
        schedule = extend_schedule(
            [prefix for prefix, _ in batch],
            [chunk for _, chunk in batch],
            shape=shape,
            max_programs=0,
            max_prefix=max_prefix,
        )
        assert schedule.merges == ()
        return [
            (piece.first_row, piece.prefix_len, piece.adds_chunk)
            for launch in schedule.launches
            for piece in sorted(launch.pieces, key=lambda piece: piece.first_row)
            if piece.token == token
        ]

    prefix, chunk = batch[-1]
    if chunk:
        assert ranges(batch, sum(x for _, x in batch[:-1])) == ranges([(prefix, chunk)], 0)


def test_a_short_chunk_over_a_long_prefix_fills_the_gpu():
    shape = TileShape(group=4, block_rows=64, block_keys=64, num_kv_heads=8)
    schedule = extend_schedule([128 << 10], [16], shape=shape, max_programs=264)
    (launch,) = schedule.launches
    assert 264 - 8 <= len(launch.pieces) * 8 <= 264 or len(launch.pieces) * 8 % 264 >= 256
    longest = max(piece.prefix_len for piece in launch.pieces)
    assert longest <= 1.1 * (128 << 10) / len(launch.pieces)


def test_many_tiles_are_not_cut_and_the_longest_come_first():
    shape = TileShape(group=4, block_rows=128, block_keys=128, num_kv_heads=8)
    schedule = extend_schedule([1000], [32 << 10], shape=shape, max_programs=132)
    assert schedule.merges == ()
    rows = [piece.first_row for piece in schedule.launches[0].pieces]
    assert rows[0] > rows[len(rows) // 2] > rows[-1] == 0


def test_without_chunks_there_is_nothing_to_do():
    shape = TileShape(group=1, block_rows=64, block_keys=64, num_kv_heads=1)
    schedule = extend_schedule([5, 0], [0, 0], shape=shape, max_programs=132)
    assert schedule == ExtendSchedule((), (), 0)


@pytest.mark.parametrize(
    ("num_pieces", "num_kv_heads", "together"),
    [(1, 8, 8), (264, 8, 4), (5000, 8, 1), (600, 9, 3), (1, 1, 1)],
)
def test_heads_run_together_until_they_fill_the_gpu(num_pieces, num_kv_heads, together):
    assert heads_together(num_pieces, num_kv_heads, 132) == together
