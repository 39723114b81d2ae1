"""Cutting a batch's keys into pieces, and what the triton backend refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.backends.split_plan import (
    WORKER_FIELDS,
    SplitPlan,
    balanced_plan,
    fixed_plan,
)
from attention.backends.triton_backend import TritonBackend
from attention.dispatch import AttentionNeeds
from attention.interface import GQAGeometry, MLAGeometry

BLOCK = 64
lengths_of_batches = st.lists(
    st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 5000)), min_size=1, max_size=12
)


def balanced(
    lengths: list[int], workers: int = 132, min_blocks: int = 1, *, has_window: bool = True
) -> SplitPlan:
    return balanced_plan(
        lengths,
        [has_window] * len(lengths),
        block_keys=BLOCK,
        max_workers=workers,
        min_blocks=min_blocks,
    )


def assert_covers_each_key_once(plan: SplitPlan, lengths: list[int]) -> None:
    assert len(plan.slot_starts) == len(lengths) + 1
    for b, length in enumerate(lengths):
        pieces = [piece for piece in plan.pieces if piece[0] == b]
        ends = [end for _, _, end, _, _ in pieces]
        assert [start for _, start, _, _, _ in pieces] == [0, *ends[:-1]]
        assert ends[-1] == length
        assert [window for *_, window in pieces] == [0] * (len(pieces) - 1) + [1]
        slots = list(range(plan.slot_starts[b], plan.slot_starts[b + 1]))
        assert [slot for *_, slot, _ in pieces] == (slots or [-1])


@given(lengths_of_batches, st.integers(1, 140), st.integers(1, 4))
def test_balanced_pieces_cover_each_key_once(lengths, workers, min_blocks):
    plan = balanced(lengths, workers, min_blocks)
    assert_covers_each_key_once(plan, lengths)
    assert all(start % BLOCK == 0 for _, start, _, _, _ in plan.pieces)


@given(lengths_of_batches, st.sampled_from([64, 1024]))
def test_fixed_pieces_cover_each_key_once(lengths, split_keys):
    plan = fixed_plan(lengths, [True] * len(lengths), split_keys=split_keys)
    assert_covers_each_key_once(plan, lengths)
    assert all(end - start <= split_keys for _, start, end, _, _ in plan.pieces)


@given(lengths_of_batches, st.integers(1, 140))
def test_a_worker_has_only_pieces_with_keys_or_only_without(lengths, workers):
    plan = balanced(lengths, workers)
    bounds = plan.worker_pieces
    assert bounds[0] == 0
    assert bounds[-1] == len(plan.pieces)
    for first, end in pairwise(bounds):
        assert len({stop > start for _, start, stop, _, _ in plan.pieces[first:end]}) == 1


def cost(piece: tuple[int, int, int, int, int]) -> int:
    """Blocks of a piece; its window counts as one."""
    _, start, end, _, window = piece
    return -(-(end - start) // BLOCK) + (window if end > start else 0)


@given(lengths_of_batches, st.integers(1, 140), st.booleans())
def test_no_worker_has_much_more_than_the_mean(lengths, workers, has_window):
    plan = balanced(lengths, workers, has_window=has_window)
    total = sum(cost(piece) for piece in plan.pieces)
    key_blocks = sum(-(-length // BLOCK) for length in lengths)
    mean = total / max(1, min(workers, key_blocks))
    for first, end in pairwise(plan.worker_pieces):
        share = sum(cost(piece) for piece in plan.pieces[first:end])
        # A window is never alone, so a share may end a block late.
        assert share <= max(mean * 1.05, mean + 1 + int(has_window))


def test_one_long_sequence_is_spread_over_the_workers():
    """2048 blocks on 132 workers: the largest share is 16, which 128 workers have exactly."""
    plan = balanced([131072], has_window=False)
    assert plan.num_workers == 128
    assert {end - start for _, start, end, _, _ in plan.pieces} == {16 * BLOCK}


def test_the_worker_that_adds_the_window_has_fewer_keys():
    """2049 blocks with the window: no share is above the 16 that it is without."""
    plan = balanced([131072])
    assert plan.num_workers == 129
    assert max(cost(piece) for piece in plan.pieces) == 16
    assert plan.pieces[-1][2] - plan.pieces[-1][1] == 15 * BLOCK


def test_a_window_is_never_a_piece_of_its_own():
    """Its worker would have a piece without keys beside pieces with keys, or nothing else."""
    plan = balanced([0, 64, 128], workers=3)
    assert [piece for piece in plan.pieces if piece[1] >= piece[2]] == [(0, 0, 0, -1, 1)]


def test_as_many_sequences_as_workers_are_not_cut():
    plan = balanced([4096] * 128)
    assert plan.max_slots == 0
    assert plan.num_workers == 128


def test_the_pieces_of_a_sequence_do_not_depend_on_the_batch_in_a_fixed_plan():
    alone = fixed_plan([5000], [False], split_keys=1024)
    together = fixed_plan([77, 5000, 0], [False] * 3, split_keys=1024)
    assert [piece[1:3] for piece in alone.pieces] == [
        piece[1:3] for piece in together.pieces if piece[0] == 1
    ]


def test_a_workers_record_names_its_first_piece_and_page():
    plan = balanced([256, 0, 512], workers=3)
    tables = {0: [9, 8, 7, 6], 2: list(range(20, 36))}
    records = plan.worker_records(lambda sequence, i: tables[sequence][i], 64)
    assert len(records) == plan.num_workers * WORKER_FIELDS
    for worker, first in enumerate(plan.worker_pieces[:-1]):
        record = records[worker * WORKER_FIELDS : (worker + 1) * WORKER_FIELDS]
        sequence, start, end, _, _ = plan.pieces[first]
        page = tables[sequence][start // 64] if end > start else 0
        assert record == [first, plan.worker_pieces[worker + 1], sequence, start, end, page, 0, 0]


NEEDS = AttentionNeeds(
    geometry=MLAGeometry(512, 128, 64, 128, 0.1),
    num_q_heads=16,
    num_kv_heads=1,
    page_size=64,
    device="cuda",
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"device": "cpu"}, "device 'cpu' is not cuda"),
        ({"dtype": torch.float64}, "dtype torch.float64"),
        ({"kv_dtype": torch.float8_e5m2}, "KV dtype torch.float8_e5m2 is neither"),
        ({"page_size": 256}, "page_size 256 is above 128"),
        ({"geometry": MLAGeometry(1024, 128, 64, 128, 0.1)}, "kv_lora_rank 1024 is above 512"),
        ({"geometry": MLAGeometry(512, 128, 128, 128, 0.1)}, "qk_rope_head_dim 128 is above 64"),
        ({"geometry": GQAGeometry(512, 0.1)}, "head_dim 512 is above 256"),
    ],
)
def test_what_no_kernel_has_is_refused_with_the_value(changes, fragment):
    accepted = set(TritonBackend().refusals(NEEDS))
    refused = TritonBackend().refusals(replace(NEEDS, **changes))
    assert any(fragment in reason for reason in set(refused) - accepted)


def test_a_gpu_with_triton_is_served():
    assert set(TritonBackend().refusals(NEEDS)) <= {"triton is not installed"}
