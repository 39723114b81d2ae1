"""Handoff plans between any two layouts, compared with a row-by-row model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbraid.errors import IncompatibleError
from kvbraid.kv.handoff import KvLayout, RowRun, plan_handoff, ranks_heads
from kvbraid.kv.slots import local_indices, slots_of

BASE = KvLayout("gqa", 2, 2, 8, 16, "float32", 1, 1, 4, 1, "digest")


@st.composite
def shardings(draw: st.DrawFn, base: KvLayout) -> KvLayout:
    dcp_size = draw(st.integers(1, 4))
    interleave = draw(st.integers(1, 3))
    return replace(
        base,
        tp_size=dcp_size * draw(st.integers(1, 4)),
        dcp_size=dcp_size,
        page_size=interleave * draw(st.integers(1, 4)),
        interleave=interleave,
    )


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    num_kv_heads = draw(st.integers(1, 5))
    base = replace(
        BASE,
        kind="mla" if num_kv_heads == 1 else "gqa",
        num_kv_heads=num_kv_heads,
        num_q_heads=draw(st.integers(num_kv_heads, 13)),
    )
    return draw(shardings(base)), draw(shardings(base))


spans = st.tuples(st.integers(0, 30), st.integers(0, 60)).map(lambda s: (s[0], s[0] + s[1]))


def rows_of(layout: KvLayout, rank: int, start: int, end: int) -> set[tuple[int, int]]:
    """(position, global head) that the rank stores, from the scalar rules alone."""
    stripe = layout.stripe(rank)
    group = rank // layout.dcp_size
    num_groups = layout.tp_size // layout.dcp_size
    first, stop = (layout.num_q_heads * g // num_groups for g in (group, group + 1))
    heads = {h * layout.num_kv_heads // layout.num_q_heads for h in range(first, stop)}
    return {
        (p, h)
        for p in range(start, end)
        if stripe.owner(p) == rank % layout.dcp_size
        for h in heads
    }


def rows_in(run: RowRun) -> list[tuple[int, int]]:
    return [(int(p), h) for p in run.positions for h in run.heads]


@settings(max_examples=300, deadline=None)
@given(layout_pairs(), spans)
def test_every_destination_row_comes_exactly_once_from_a_rank_that_has_it(
    layouts: tuple[KvLayout, KvLayout], span: tuple[int, int]
) -> None:
    src, dst = layouts
    runs = plan_handoff(src, dst, *span)
    arrived: Counter[tuple[int, int, int]] = Counter()
    for run in runs:
        assert run.positions.dtype == np.int32
        assert len(run.positions)
        assert (np.diff(run.positions) > 0).all()
        assert set(rows_in(run)) <= rows_of(src, run.src_rank, *span)
        arrived.update((run.dst_rank, p, h) for p, h in rows_in(run))
    needed = {(rank, p, h) for rank in range(dst.tp_size) for p, h in rows_of(dst, rank, *span)}
    assert arrived == Counter(dict.fromkeys(needed, 1))


@settings(max_examples=100, deadline=None)
@given(layout_pairs(), st.integers(0, 60), st.integers(0, 60))
def test_rows_already_held_are_left_out_and_the_rest_is_the_same(
    layouts: tuple[KvLayout, KvLayout], held: int, rest: int
) -> None:
    def by_destination(start: int, end: int) -> set[tuple[int, int, int]]:
        runs = plan_handoff(*layouts, start, end)
        return {(run.dst_rank, p, h) for run in runs for p, h in rows_in(run)}

    whole = by_destination(0, held + rest)
    assert by_destination(held, held + rest) == {row for row in whole if row[1] >= held}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), shardings(replace(BASE, kind="mla", num_kv_heads=1)))
def test_replicas_send_equal_shares(dcp_size: int, num_groups: int, dst: KvLayout) -> None:
    """MLA: every group of the source stores all rows, so ranks of one stripe share the bytes."""
    src = replace(dst, tp_size=dcp_size * num_groups, dcp_size=dcp_size, interleave=1)
    src = replace(src, num_q_heads=64)
    dst = replace(dst, num_q_heads=64)
    sent: Counter[int] = Counter({rank: 0 for rank in range(src.tp_size)})
    for run in plan_handoff(src, dst, 0, 240):
        sent[run.src_rank] += len(run.positions)
    for owner in range(dcp_size):
        shares = [sent[group * dcp_size + owner] for group in range(num_groups)]
        # Rounding is at most one position for each destination rank and source stripe.
        assert max(shares) - min(shares) <= 2


def test_each_source_has_work_from_the_first_chunk_on() -> None:
    src = replace(BASE, kind="mla", num_kv_heads=1, tp_size=4)
    dst = replace(src, tp_size=2, dcp_size=2)
    early = Counter(
        run.src_rank
        for run in plan_handoff(src, dst, 0, 4096)
        for position in run.positions
        if position < 64
    )
    assert len(early) == 4
    assert max(early.values()) - min(early.values()) <= 2


def test_golden_rows_of_one_rank_to_two() -> None:
    """dcp.md 6.2: P = 2, c = 2, five tokens; and a second chunk that starts one page later."""
    src = replace(BASE, num_kv_heads=1, num_q_heads=2, page_size=2)
    dst = replace(src, tp_size=2, dcp_size=2)

    def rows(layout: KvLayout, rank: int, pages: list[int], run: RowRun) -> list[int]:
        stripe = layout.stripe(rank)
        slots = slots_of(pages, run.positions, stripe.logical_page_size)
        return [int(row) for row in local_indices(stripe, slots.array)]

    def plan(start: int, src_pages: list[int]) -> dict[int, tuple[list[int], list[int]]]:
        return {
            run.dst_rank: (rows(src, 0, src_pages, run), rows(dst, run.dst_rank, [4, 9], run))
            for run in plan_handoff(src, dst, start, 5)
        }

    assert plan(0, [5, 1, 7]) == {0: ([10, 2, 14], [8, 9, 18]), 1: ([11, 3], [8, 9])}
    assert plan(2, [99, 1, 7]) == {0: ([2, 14], [9, 18]), 1: ([3], [9])}


def test_plan_counts_tokens_and_not_pages() -> None:
    """dcp.md bug 43: three pages of P = 2 to c = 8 are 6 tokens, not 3 * 2 * 8 rows."""
    src = replace(BASE, num_kv_heads=1, num_q_heads=8, page_size=2)
    dst = replace(src, tp_size=8, dcp_size=8)
    runs = plan_handoff(src, dst, 0, 6)
    assert [(run.dst_rank, run.positions.tolist()) for run in runs] == [
        (rank, [rank]) for rank in range(6)
    ]


def test_replicated_kv_heads_are_sent_once() -> None:
    """dcp.md bug 15: Hkv = 2 on tp = 4 -> tp = 1 gives [h0, h1], and no head twice."""
    src = replace(BASE, tp_size=4)
    rows = Counter((p, h) for run in plan_handoff(src, BASE, 0, 8) for p, h in rows_in(run))
    assert rows == Counter({(p, h): 1 for p in range(8) for h in range(2)})


def test_heads_of_a_rank_follow_its_group() -> None:
    """dcp.md bug 14: Hkv = 2, tp = 4, c = 2: rank t stores head t // 2."""
    layout = replace(BASE, tp_size=4, dcp_size=2)
    assert [list(ranks_heads(layout, rank)) for rank in range(4)] == [[0], [0], [1], [1]]


def test_rank_that_owns_nothing_gets_nothing() -> None:
    dst = replace(BASE, tp_size=4, dcp_size=4)
    assert {run.dst_rank for run in plan_handoff(BASE, dst, 4, 6)} == {0, 1}
    assert plan_handoff(BASE, dst, 6, 6) == []


def test_layouts_of_other_rows_are_refused_with_every_difference() -> None:
    """serving.md 3.8: a mismatch is found when the two sides meet, not when rows move."""
    other = replace(BASE, num_layers=3, dtype="bfloat16", model_digest="other")
    with pytest.raises(IncompatibleError) as refusal:
        plan_handoff(BASE, other, 0, 5)
    for name in ("num_layers: 2", "dtype: 'float32'", "model_digest: 'digest'"):
        assert name in str(refusal.value)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3)])
def test_impossible_spans_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"start {start} and end {end}"):
        plan_handoff(BASE, BASE, start, end)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "mha"},
        {"dtype": "int8"},
        {"num_layers": 0},
        {"num_q_heads": 1},
        {"tp_size": 3, "dcp_size": 2},
        {"page_size": 4, "interleave": 3},
    ],
    ids=str,
)
def test_impossible_layouts_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(BASE, **changes)
